"""The overlong filter as `datasets` does it, in TRL's environment: `python dataset_peer.py`.

Not a benchmark: `benchmarks.dataset` starts it and asks it, a JSON line at a time, to filter a parquet file by the length of its prompts
under the tokenizer of a folder. That is how other systems of this field do it: `Dataset.filter` over `apply_chat_template`.
"""

import json
import os
import sys
import tempfile
import time


def answer(request: dict, scratch: str) -> dict:
    """Processor seconds and rows kept; nothing is taken from an earlier request's cache."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(request["tokenizer"])

    def fits(row: dict) -> bool:
        token_ids = tokenizer.apply_chat_template(
            row["prompt"], tools=request["tools"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return len(token_ids) <= request["limit"]

    started = time.process_time()
    with tempfile.TemporaryDirectory(dir=scratch) as cache:
        rows = datasets.load_dataset("parquet", data_files=request["file"], split="train", cache_dir=cache)
        kept = rows.filter(fits, load_from_cache_file=False)
        return {"seconds": time.process_time() - started, "kept": len(kept)}


def main() -> None:
    """Answer until the input ends."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(HF_HOME=scratch, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        for line in sys.stdin:
            try:
                found = answer(json.loads(line), scratch)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
