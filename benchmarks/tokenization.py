"""Ours against the fastest peer, turn by turn: `uv run python -m benchmarks.tokenization [--rounds N] [--shared DIR]`.

Conversations of 64 tool turns of 187 tokens (what the assistant says, what the template writes, and a result that fills up
the rest), the results of prose or of source code, no text twice. Peers run in
environments of their own (`uv run python -m benchmarks.peers`) and take turns with ours, eight conversations at a time;
figures are medians over all turns but those of the first eight conversations, which warm everybody. The ids at the end must be
those of transformers for the whole conversation: a peer that has others is left out, saying so, and `ids_equal` says that
ours are the same in every conversation, and that at least one peer has them too.

- `ratio_fast`: a peer's time per turn over ours, the least for Qwen3 and Llama-3 with `tiktoken`;
- `ratio_plain_min`: the same without it, the least for all tokenizers;
- `growth_1k_to_262k`: our time per turn behind 262,144 tokens of history over that behind 1,024;
- `tools20_over_tools1`: our time per turn with 20 tool schemas over that with one;
- `initial_ratio`: `apply_chat_template(tokenize=True)` over our first prompt, the least with `tiktoken`; `initial_ratio_plain` without.
"""

import argparse
import ast
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from pydoc_data import topics
from unittest.mock import patch

from transformers import AutoTokenizer

from benchmarks.peers import PEERS, PeerProcess, python_of
from ostinato_tokenization import ChatTokenizer, ContinuousTokens, TokenLedger

TURNS = 64
BLOCK = 8
TURN_TOKENS = 187
HISTORY = (1024, 262_144)
LLAMA2_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
TOKENIZERS = {
    "qwen3": ("qwen", "chat_template_qwen3.jinja"),
    "llama3": ("llama3", "chat_template.jinja"),
    "smollm2": ("smollm2", "chat_template.jinja"),
    "llama2": ("llama2", None),
}
FAST = ("qwen3", "llama3")


def schemas(count: int) -> list[dict]:
    """Tool schemas of ordinary size."""
    properties = {
        "query": {"type": "string", "description": "What to look for, in words or as a pattern."},
        "limit": {"type": "integer", "description": "How many results at most."},
        "scope": {"type": "string", "enum": ["all", "open", "closed"]},
    }
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    return [
        {
            "type": "function",
            "function": {"name": f"search_{n}", "description": f"Search in source {n}.", "parameters": parameters},
        }
        for n in range(count)
    ]


@cache
def corpus(kind: str) -> str:
    """Real text that comes with Python: its manual and what its library says of itself, or the source of that library."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    if kind == "code":
        return "\n\n".join(sources)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    said = [text for node in nodes if (text := ast.get_docstring(node))]
    return "\n\n".join([text for _, text in sorted(topics.topics.items())] + said)


def results(reference, kind: str, count: int, length: int) -> list[str]:
    """Texts of about `length` tokens that begin and end as words do."""
    ids = reference.encode(corpus(kind)[: 16 * length * count], add_special_tokens=False)
    found: list[str] = []
    for start in range(0, len(ids) - length, length):
        text = reference.decode(ids[start : start + length]).strip()
        if len(reference.encode(text, add_special_tokens=False)) in range(length - 4, length + 1) and "<|" not in text:
            found.append(text)
    if len(found) < count:
        raise SystemExit(f"texts must suffice for {count} turns, got {len(found)} of {kind}; lower --rounds")
    return found[:count]


class Side:
    """Our way through conversations, with or without tiktoken."""

    def __init__(self, folder: Path, template: str, *, tiktoken: bool) -> None:
        with patch.dict(sys.modules, {} if tiktoken else {"tiktoken": None}):
            self.tokenizer = ChatTokenizer.from_pretrained(folder, chat_template=template)
            self.tokenizer.encode_text("x")  # makes the encoder
        self.tokens = ContinuousTokens(self.tokenizer)

    def run_all(self, paths: list[str]) -> dict:
        """Seconds of each turn, and a hash of the ids at the end of each conversation."""
        seconds, hashes = [], []
        for path in paths:
            conversation = json.loads(Path(path).read_text(encoding="utf-8"))
            messages, tools = list(conversation["messages"]), conversation["tools"]
            ledger = self.tokens.build_initial_tokens(messages, tools)
            for turn in conversation["turns"]:
                messages.append(turn["message"])
                started = time.perf_counter()
                self.tokens.merge_assistant_tokens(ledger, turn["ids"], None)
                self.tokens.merge_context_messages(ledger, messages, turn["new"], tools)
                seconds.append(time.perf_counter() - started)
                messages.extend(turn["new"])
            hashes.append(hash_of(ledger.snapshot()))
        return {"seconds": seconds, "hashes": hashes}


def hash_of(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(array("i", token_ids).tobytes()).hexdigest()


CALL = {"id": "call00001", "type": "function", "function": {"name": "search_0", "arguments": {"query": "clue"}}}
ASSISTANT = {"role": "assistant", "content": "I look.", "reasoning_content": "The log may say.", "tool_calls": [CALL]}
ASSISTANT_IN_WORDS = {
    "role": "assistant",
    "content": f"I look.\n<tool_call>\n{json.dumps(CALL['function'])}\n</tool_call>",
}
"""What it says where the template writes no calls."""
OPENING = [{"role": "user", "content": "Find out why the build fails, and mend it."}]


def assistant_message(side: Side) -> dict:
    """What the assistant says in every turn."""
    text = side.tokenizer.render([*OPENING, ASSISTANT], schemas(1), add_generation_prompt=False)
    return ASSISTANT if "clue" in text else ASSISTANT_IN_WORDS


def result_message(text: str) -> dict:
    """A tool's answer to what the assistant asks in every turn."""
    return {"role": "tool", "name": "search_0", "tool_call_id": "call00001", "content": text}


def spoken_ids(side: Side) -> tuple[list[int], list[int]]:
    """The ids of the first prompt, and those that the assistant says in every turn."""
    first = side.tokens.build_initial_tokens(OPENING, schemas(1)).token_ids
    messages = [*OPENING, assistant_message(side)]
    spoken = side.tokenizer.encode_chat(messages, schemas(1), add_generation_prompt=False)[len(first) :]
    end = next(place for place, token_id in enumerate(spoken) if token_id in side.tokenizer.stop_token_ids) + 1
    return first, spoken[:end]


def room_for_result(side: Side, reference, kind: str) -> int:
    """How many tokens a result has on its own, so that turns have `TURN_TOKENS`: templates may write it another way."""
    _, said = spoken_ids(side)
    messages = [*OPENING, assistant_message(side)]
    ledger = side.tokens.build_initial_tokens(OPENING, schemas(1))
    side.tokens.merge_assistant_tokens(ledger, said, None)
    mark = ledger.mark()

    def added(text: str) -> int:
        ledger.truncate(mark)
        return side.tokens.merge_context_messages(ledger, messages, [result_message(text)], schemas(1))

    frame = added("x") - 1
    room = TURN_TOKENS - len(said) - frame
    written = statistics.mean(map(added, results(reference, kind, TURNS, room))) - frame
    return round(room * room / written)


def write_conversation(path: Path, side: Side, reference, texts: list[str]) -> str:
    """A conversation in which the assistant says, as ids, what the template writes for its messages.

    Returns:
        The hash of the ids that transformers gives for it as a whole.
    """
    first, said = spoken_ids(side)
    turns = [{"ids": said, "message": assistant_message(side), "new": [result_message(text)]} for text in texts]
    conversation = {"messages": OPENING, "tools": schemas(1), "ids": first, "turns": turns}
    path.write_text(json.dumps(conversation), encoding="utf-8")
    whole = OPENING + [message for turn in turns for message in (turn["message"], *turn["new"])]
    ids = reference.apply_chat_template(
        whole, tools=schemas(1), tokenize=True, add_generation_prompt=True, return_dict=False
    )
    return hash_of(ids)


def compare(
    name: str, folder: Path, template: str, peers: list[PeerProcess], rounds: int
) -> tuple[dict[str, float], bool]:
    """For each kind of text the least ratio of a peer's time to ours, with and without tiktoken; and whether ids agree."""
    sides = {"plain": Side(folder, template, tiktoken=False)}
    if name in FAST:
        sides["fast"] = Side(folder, template, tiktoken=True)
    present = []
    for peer in peers:
        answer = peer.ask({"load": str(folder), "template": template, "family": name})
        if "error" in answer:
            print(f"{name}: {peer.name} is left out: {answer['error'][:200]}", flush=True)
        else:
            present.append(peer)
    reference = AutoTokenizer.from_pretrained(folder)
    reference.chat_template = template
    figures: dict[str, float] = {}
    equal = True
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("prose", "code"):
            room = room_for_result(sides["plain"], reference, kind)
            texts = results(reference, kind, TURNS * BLOCK * (rounds + 1), room)
            seconds: dict[str, list[float]] = {}
            out: set[str] = set()
            for number in range(rounds + 1):
                paths, expected = [], []
                for place in range(BLOCK):
                    paths.append(str(Path(scratch) / f"{place}.json"))
                    own = texts[TURNS * (BLOCK * number + place) :][:TURNS]
                    expected.append(write_conversation(Path(paths[-1]), sides["plain"], reference, own))
                answers = {label: side.run_all(paths) for label, side in sides.items()}
                answers |= {peer.name: peer.ask({"run": paths}) for peer in present if peer.name not in out}
                for label, answer in answers.items():
                    if "error" in answer:
                        print(f"{name}, {kind}: {label} is left out: {answer['error'][:200]}", flush=True)
                        out.add(label)
                    elif answer["hashes"] != expected:
                        if label in sides:
                            equal = False
                        print(f"{name}, {kind}: {label} has other ids than transformers for the whole and is left out")
                        out.add(label)
                    elif number:
                        seconds.setdefault(label, []).extend(answer["seconds"])
            medians = {label: statistics.median(times) for label, times in seconds.items()}
            print(
                f"{name:8s} {kind:6s}" + "".join(f" {label} {1e6 * value:.0f} us" for label, value in medians.items()),
                flush=True,
            )
            rivals = [value for label, value in medians.items() if label not in sides]
            equal = equal and bool(rivals)
            for label in sides:
                if rivals:
                    figures[f"{label} {kind}"] = min(rivals) / medians[label]
    return figures, equal


Case = tuple[TokenLedger, list[dict], list[dict]]
"""A ledger, the conversation with the answer to come, and the tools it is shown."""


def median_turns(side: Side, said: list[int], texts: list[str], cases: Sequence[Case]) -> list[float]:
    """Median seconds of a tool turn behind each case; the cases take turns, and every turn is taken back."""
    seconds: list[list[float]] = [[] for _ in cases]
    order = list(enumerate(cases))
    for number in range(6 * TURNS):
        new = [{"role": "tool", "content": texts[number % len(texts)]}]
        for place, (ledger, messages, tools) in order if number % 2 else order[::-1]:
            mark = ledger.mark()
            started = time.perf_counter()
            side.tokens.merge_assistant_tokens(ledger, said, None)
            side.tokens.merge_context_messages(ledger, messages, new, tools)
            seconds[place].append(time.perf_counter() - started)
            ledger.truncate(mark)
    return [statistics.median(taken) for taken in seconds]


def growth(side: Side, texts: list[str]) -> float:
    """Time per turn behind a long history over that behind a short one; the two take turns."""
    tools = schemas(1)
    said = [*side.tokenizer.encode_text("I look."), side.tokenizer.eos_token_id]
    assistant = {"role": "assistant", "content": "I look."}
    cases = []
    for length in HISTORY:
        messages = [{"role": "user", "content": "Find out."}]
        ledger = side.tokens.build_initial_tokens(messages, tools)
        while len(ledger) < length:
            messages.append(assistant)
            new = [{"role": "tool", "content": texts[len(messages) % len(texts)]}]
            side.tokens.merge_assistant_tokens(ledger, said, None)
            side.tokens.merge_context_messages(ledger, messages, new, tools)
            messages.extend(new)
        cases.append((ledger, [*messages, assistant], tools))
    short, long = median_turns(side, said, texts, cases)
    print(
        f"{1e6 * short:.0f} us a turn behind {HISTORY[0]} tokens, {1e6 * long:.0f} us behind {HISTORY[1]}", flush=True
    )
    return long / short


def tools_ratio(side: Side, texts: list[str]) -> float:
    """Time per turn with many tool schemas over that with one; the two take turns."""
    said = [*side.tokenizer.encode_text("I look."), side.tokenizer.eos_token_id]
    messages = [{"role": "user", "content": "Find out."}, {"role": "assistant", "content": "I look."}]
    cases = [
        (side.tokens.build_initial_tokens(messages[:1], schemas(count)), messages, schemas(count)) for count in (1, 20)
    ]
    one, many = median_turns(side, said, texts, cases)
    return many / one


def initial_ratio(side: Side, reference, texts: list[str]) -> float:
    """The least ratio of `apply_chat_template` to our first prompt, over prompts of several kinds; ids must agree."""
    ratios = []
    for tools in (None, schemas(4)):
        for size in (1, 12):
            theirs, ours = [], []
            for number in range(40):
                text = "\n".join(texts[(number * size + k) % len(texts)] for k in range(size))
                messages = [{"role": "system", "content": "You are careful."}, {"role": "user", "content": text}]
                started = time.perf_counter()
                expected = reference.apply_chat_template(
                    messages, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False
                )
                middle = time.perf_counter()
                ledger = side.tokens.build_initial_tokens(messages, tools)
                ended = time.perf_counter()
                if ledger.token_ids != expected:
                    raise SystemExit("the first prompt must be that of apply_chat_template, got other ids")
                theirs.append(middle - started)
                ours.append(ended - middle)
            ratios.append(statistics.median(theirs) / statistics.median(ours))
    return min(ratios)


def run(shared: Path, rounds: int) -> dict[str, object]:
    """All figures."""
    peers = []
    for name in PEERS:
        python = python_of(name)
        if python is None:
            print(f"{name} is left out: it is not installed; uv run python -m benchmarks.peers {name}", flush=True)
        else:
            peers.append(PeerProcess(name, python, "tokenization_peer.py", name))
    fast: list[float] = []
    plain: list[float] = []
    ids_equal = True
    for name, (folder, file) in TOKENIZERS.items():
        path = shared / "tokenizers" / folder
        template = LLAMA2_TEMPLATE if file is None else (path / file).read_text(encoding="utf-8")
        figures, equal = compare(name, path, template, peers, rounds)
        ids_equal = ids_equal and equal
        fast += [value for label, value in figures.items() if label.startswith("fast")]
        plain += [value for label, value in figures.items() if label.startswith("plain")]
        print(f"{name:8s} " + ", ".join(f"{label}: {value:.1f}x" for label, value in figures.items()), flush=True)
    for peer in peers:
        peer.close()
    grown, tools20, initial = [], [], {True: [], False: []}
    for name, (folder, file) in TOKENIZERS.items():
        path = shared / "tokenizers" / folder
        template = LLAMA2_TEMPLATE if file is None else (path / file).read_text(encoding="utf-8")
        reference = AutoTokenizer.from_pretrained(path)
        reference.chat_template = template
        texts = results(reference, "prose", 2 * TURNS, TURN_TOKENS)
        for tiktoken in (True, False) if name in FAST else (False,):
            side = Side(path, template, tiktoken=tiktoken)
            grown.append(growth(side, texts))
            tools20.append(tools_ratio(side, texts))
            initial[tiktoken].append(initial_ratio(side, reference, texts))
    return {
        "ratio_fast": round(min(fast), 2) if fast else None,
        "ratio_plain_min": round(min(plain), 2) if plain else None,
        "growth_1k_to_262k": round(max(grown), 3),
        "tools20_over_tools1": round(max(tools20), 3),
        "initial_ratio": round(min(initial[True]), 2),
        "initial_ratio_plain": round(min(initial[False]), 2),
        "ids_equal": ids_equal,
    }


def main() -> None:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    default = Path(__file__).resolve().parents[1].parent / "shared"
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("OSTINATO_SHARED", default)))
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    print(json.dumps(run(arguments.shared, arguments.rounds)))


if __name__ == "__main__":
    main()
