"""One peer's multi-turn tokenization, in the peer's own environment: `python tokenization_peer.py PEER`.

Not a benchmark: `benchmarks.tokenization` starts it and asks it, a JSON line at a time, to load a tokenizer with a
template (`load`) and to go through conversations (`run`, the names of files). It answers with the seconds of each turn
and hashes of the ids at the end. Turns take the shortest way that the peer has; where it has none, it renders anew, as its users must.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from array import array
from types import SimpleNamespace

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Renderers:
    """`renderers`: the bridge to the next turn."""

    def __init__(self, tokenizer, family):
        import renderers

        configs = {"qwen3": "Qwen3RendererConfig", "llama3": "Llama3RendererConfig"}
        name = configs.get(family, "DefaultRendererConfig")
        self.renderer = renderers.create_renderer(tokenizer, getattr(renderers.configs, name)())

    def turn(self, ids, said, messages, new, tools):
        bridged = self.renderer.bridge_to_next_turn(ids, said, new, tools=tools)
        if bridged is not None:
            return bridged.token_ids
        return self.renderer.render_ids([*messages, *new], tools=tools, add_generation_prompt=True)


class Trl:
    """TRL: the suffix for tool messages, computed on a short conversation."""

    def __init__(self, tokenizer, family):
        from trl import GRPOTrainer
        from trl.chat_template_utils import get_training_chat_template

        try:
            template = get_training_chat_template(tokenizer) or tokenizer.chat_template
        except ValueError:  # it has none for this model and takes the model's own
            template = tokenizer.chat_template
        trainer = SimpleNamespace(
            processing_class=tokenizer,
            _tokenizer=tokenizer,
            chat_template=template,
            chat_template_kwargs={},
            _is_vlm=False,
        )
        self.suffix = lambda new: GRPOTrainer._get_tool_suffix_ids(trainer, new)

    def turn(self, ids, said, messages, new, tools):
        return ids + said + self.suffix(new)


class Verl:
    """verl: the continuous token builder."""

    def __init__(self, tokenizer, family):
        from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

        self.builder = create_continuous_token_builder(tokenizer, hf_model_type={"qwen3": "qwen3"}.get(family, "llama"))

    def turn(self, ids, said, messages, new, tools):
        runtime = self.builder.merge_assistant_tokens(ids, said).token_ids
        return self.builder.merge_context_tokens(messages, [*messages, *new], runtime, tools=tools).token_ids


PEERS = {"renderers": Renderers, "trl": Trl, "verl": Verl}


def run(peer, paths):
    """Seconds of each turn, and a hash of the ids at the end of each conversation."""
    seconds, hashes = [], []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            conversation = json.load(file)
        messages, ids, tools = list(conversation["messages"]), conversation["ids"], conversation["tools"]
        for turn in conversation["turns"]:
            messages.append(turn["message"])
            started = time.perf_counter()
            ids = peer.turn(ids, turn["ids"], messages, turn["new"], tools)
            seconds.append(time.perf_counter() - started)
            messages.extend(turn["new"])
        hashes.append(hashlib.sha256(array("i", ids).tobytes()).hexdigest())
    return {"seconds": seconds, "hashes": hashes}


def main():
    """Answers until its input ends. Whatever the peer prints goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from transformers import AutoTokenizer

    peer = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "load" in request:
                tokenizer = AutoTokenizer.from_pretrained(request["load"])
                tokenizer.chat_template = request["template"]
                peer, answer = PEERS[sys.argv[1]](tokenizer, request["family"]), {}
            else:
                answer = run(peer, request["run"])
        except Exception as error:  # a peer may fail as it likes; the benchmark then leaves it out and says why
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
