"""The start of a run on 20,000 prompts with a tool: `uv run python -m benchmarks.dataset [--rounds N] [--shared DIR]`.

Rows made of GSM8K, with a system message and a tool's schema, under a real tokenizer and its template; both sides drop the prompts
that are too long, in turns. Processor time, so that a busy machine disturbs neither.

- `cpu_over_datasets`: reading, checking and counting in one process, over `datasets.filter` with transformers' tokenizer, which only
  counts. Without the peer's environment (`python -m benchmarks.peers trl`) it is null.
- `known_over_first`: the same with another limit, where the counts are known, over the first time.
- `reader_over_serial`: what the reading process does where two others count, over all of it in one process: the part that no
  number of further processes shortens.
- `kept_equal`: both sides keep the same number of rows.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers import PeerProcess, python_of
from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.config.data import DataConfig
from ostinato_trainer.data.dataset import RLHFDataset

NUM_ROWS = 20_000
LIMIT = 300
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluate an arithmetic expression and return its value.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "An expression such as (3+4)*5."}},
            "required": ["expression"],
        },
    },
}


def write_rows(questions: Path, path: Path) -> None:
    """As many different prompts as are asked for, of the questions in turn."""
    texts = [json.loads(line)["question"] for line in questions.read_text(encoding="utf-8").splitlines()]
    system = {"role": "system", "content": "Solve the problem step by step. Use the calculator where it helps."}
    rows = [
        {"data_source": "gsm8k", "prompt": [system, {"role": "user", "content": f"{n}. {texts[n % len(texts)]}"}]}
        for n in range(NUM_ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def start(file: Path, tokenizer: ChatTokenizer, cache: Path, *, limit: int, workers: int) -> tuple[float, int]:
    """Processor seconds of this process, and rows kept."""
    config = DataConfig(
        max_prompt_length=limit,
        filter_overlong_prompts=True,
        filter_overlong_prompts_workers=workers,
        cache_dir=str(cache),
    )
    started = time.process_time()
    dataset = RLHFDataset(str(file), config=config, tokenizer=tokenizer, tool_schemas=lambda row: [TOOL])
    return time.process_time() - started, len(dataset)


def run(shared: Path, rounds: int) -> dict:
    """Medians over the rounds."""
    python = python_of("trl")
    peer = None if python is None else PeerProcess("datasets", python, "dataset_peer.py")
    folder = shared / "tokenizers" / "qwen"
    ratios: dict[str, list[float]] = {"cpu_over_datasets": [], "known_over_first": [], "reader_over_serial": []}
    kept_equal = None if peer is None else True
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.parquet"
        write_rows(shared / "data/gsm8k/train.jsonl", file)
        for number in range(rounds):
            tokenizer = ChatTokenizer.from_pretrained(folder)
            caches = Path(scratch) / f"one-{number}", Path(scratch) / f"two-{number}"
            first, kept = start(file, tokenizer, caches[0], limit=LIMIT, workers=1)
            known, _ = start(file, tokenizer, caches[0], limit=LIMIT - 10, workers=1)
            reader, _ = start(file, tokenizer, caches[1], limit=LIMIT, workers=2)
            ratios["known_over_first"].append(known / first)
            ratios["reader_over_serial"].append(reader / first)
            print(f"first {first:.2f} s, known {known:.2f} s, reader {reader:.2f} s, {kept} rows kept", flush=True)
            if peer is None:
                continue
            found = peer.ask({"file": str(file), "tokenizer": str(folder), "tools": [TOOL], "limit": LIMIT})
            if "error" in found:
                raise SystemExit(f"the peer failed: {found['error']}")
            print(f"datasets {found['seconds']:.2f} s, {found['kept']} rows kept", flush=True)
            ratios["cpu_over_datasets"].append(first / found["seconds"])
            kept_equal = kept_equal and found["kept"] == kept
    if peer is not None:
        peer.close()
    medians = {name: round(statistics.median(values), 3) if values else None for name, values in ratios.items()}
    return {**medians, "kept_equal": kept_equal}


def main() -> None:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    default = Path(__file__).resolve().parents[1].parent / "shared"
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("OSTINATO_SHARED", default)))
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.shared, arguments.rounds)))


if __name__ == "__main__":
    main()
