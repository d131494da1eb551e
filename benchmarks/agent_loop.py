"""The tool agent beside verl's on the same conversations: `uv run python -m benchmarks.agent_loop [--rounds N] [--shared DIR]`.

Server and tool are stubs that answer at once, so that what is measured is the agent loop with what stands below it: sessions, client,
tool calls, parsing, and tokenization with Qwen2.5's tokenizer. A conversation is a question, eight turns that call the tool, and an
answer; all of a round run at the same time in one process, and no text occurs twice. verl runs in an environment of its own (`uv run
python -m benchmarks.peers verl`); the two take turns, the first round warms both, and figures are the best of the other rounds. Seconds
are those of the processor, over all threads of a process: ours has one thread, so on an idle machine they are those of the clock, and
on a busy one they do not count other processes.

- `turns_ratio_vs_verl`: our turns per second over verl's, ours with the default settings, which check each conversation against a fresh
  render at its end; verl has the setting but no longer the check, so `turns_ratio_same_work` compares without it;
- `turns_per_s`: ours, with the check;
- `arrays_ratio_vs_verl`: verl's time from finished trajectories to the tensors of a batch over ours, for the shorter padding of two;
  `arrays_ratio_wide` for the longer;
- `arrays_us_per_trajectory`: our time for that; there is no padding that it could depend on;
- `kib_per_trajectory`: resident memory of a trajectory under way, all of its turns taken but the last, out of 10,000 at the same time;
  `kib_growth`: that of the last 5,000 over that of the first 2,500 after 2,500;
- `same_batch`: both made the same token ids, loss mask and log-probabilities in every round.
"""

import argparse
import asyncio
import gc
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import PeerProcess, python_of
from benchmarks.tokenization import corpus
from ostinato_agent_loop import AgentConfig, AgentLoopManager, MultiTurnConfig, RewardResult, RolloutConfig, Trajectory
from ostinato_engines import AsyncServerBase, StopReason, TokenOutput
from ostinato_rollout import ServerPool, SessionBudget
from ostinato_tokenization import ChatTokenizer, ContinuousTokens, SanityCheckMode
from ostinato_tools import ToolExecutor, ToolRegistry, function_tool
from ostinato_trainer.batch import Batch
from ostinato_trainer.segments import segments_of

CONVERSATIONS = 32
TOOL_TURNS = 8
LENGTHS = ((1024, 2048), (2048, 16_384))
"""Prompt and response lengths to which verl pads: what these conversations need, and what long ones do."""
RUNS_A_ROUND = 1 + len(LENGTHS)
"""One without the check; one with it for each of the lengths."""
CONCURRENT = (2500, 5000, 10_000)
MAX_ANSWER = 2000
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a page of the manual up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "The number of the page."}},
            "required": ["key"],
        },
    },
}
VERL_TOOLS = f"""
import json
from pathlib import Path
from verl.tools.function_tool import function_tool

ANSWERS = json.loads(Path(__file__).with_name("answers.json").read_text())

@function_tool(schema={TOOL!r})
async def lookup(key: str) -> str:
    return ANSWERS[key]
"""
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
}


class Workload:
    """Conversations of every run, as files that both sides read. No text occurs twice: its number stands in it.

    Args:
        folder: Where they are written.
        tokenizer_folder: The tokenizer with its chat template.
        num_runs: How many times conversations are run; each time they are others.
    """

    def __init__(self, folder: Path, tokenizer_folder: Path, num_runs: int) -> None:
        self.folder = folder
        self.tokenizer = ChatTokenizer.from_pretrained(tokenizer_folder)
        shutil.copytree(tokenizer_folder, folder / "model")
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        (folder / "verl_tools.py").write_text(VERL_TOOLS)
        self._texts = itertools.cycle([text for text in _pieces(corpus("prose")) if "<" not in text])
        self._numbers = itertools.count(1)
        self.answers: dict[str, str] = {}
        for number in range(num_runs):
            conversations = [self._conversation(f"{number}/{place}") for place in range(CONVERSATIONS)]
            (folder / f"conversations-{number}.json").write_text(json.dumps(conversations))
        (folder / "answers.json").write_text(json.dumps(self.answers))

    def conversations(self, number: int) -> list[dict]:
        """Those of one run."""
        return json.loads((self.folder / f"conversations-{number}.json").read_text())

    def _conversation(self, name: str) -> dict:
        prompt = [
            {"role": "system", "content": "You answer questions about a manual; look pages up before you answer."},
            {"role": "user", "content": self._text(400)},
        ]
        turns = []
        for turn in range(TOOL_TURNS):
            key = f"{name}/{turn}"
            self.answers[key] = self._text(400)
            call = json.dumps({"name": "lookup", "arguments": {"key": key}})
            turns.append(self._said(f"{self._text(100)}\n", f"\n{call}\n"))
        return {"prompt": prompt, "turns": [*turns, self._said(self._text(200))]}

    def _text(self, length: int) -> str:
        pieces = [f"{next(self._numbers)}."]
        while sum(map(len, pieces)) < length:
            pieces.append(next(self._texts))
        return " ".join(pieces)[:length].strip()

    def _said(self, text: str, call: str | None = None) -> dict:
        """A turn as a model samples it, its control tokens being control tokens."""
        ids = self.tokenizer.encode_text(text)
        if call is not None:
            ids += [
                *self._control("<tool_call>"),
                *self.tokenizer.encode_text(call),
                *self._control("</tool_call>"),
            ]
        ids += self._control("<|im_end|>")
        return {"ids": ids, "logprobs": [-(token_id % 64) / 64 for token_id in ids]}

    def _control(self, token: str) -> list[int]:
        token_id = self.tokenizer.token_id(token)
        assert token_id is not None
        return [token_id]


def _pieces(text: str) -> list[str]:
    """Lines of a text, without those of drawings and grammars."""
    return [line.strip() for line in text.splitlines() if sum(map(str.isalpha, line)) > 20]


class StubServer(AsyncServerBase):
    """Answers at once: turn by turn what the conversation says; its number is in the request's id.

    Args:
        conversations: What is said, cyclically.
        last_turn: Where given, an event that every last turn waits for.
    """

    def __init__(self, conversations: Sequence[dict], *, last_turn: asyncio.Event | None = None) -> None:
        self._turns = [
            [TokenOutput(turn["ids"], turn["logprobs"], StopReason.STOP) for turn in conversation["turns"]]
            for conversation in conversations
        ]
        self._last_turn = last_turn
        self._served: dict[str, int] = {}
        self.arrived = asyncio.Semaphore(0)

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        """See AsyncServerBase."""
        number = int(request_id.split("-")[2].partition("/")[0])
        turns = self._turns[number % len(self._turns)]
        served = self._served.get(request_id, 0)
        self._served[request_id] = served + 1
        if self._last_turn is not None and served == len(turns) - 1:
            self.arrived.release()
            await self._last_turn.wait()
        return turns[served]

    async def chat_completion(self, raw_request):
        """See AsyncServerBase."""
        raise NotImplementedError


async def no_reward(row, outputs) -> RewardResult:
    """The score that makes a trajectory one to train on."""
    return RewardResult(0.0)


class Ours:
    """The manager with one worker, over stubs.

    Args:
        workload: The conversations and the tool's answers.
        check: How a conversation is compared with a fresh render at its end.
    """

    def __init__(self, workload: Workload, check: SanityCheckMode = SanityCheckMode.STRICT) -> None:
        answers = workload.answers

        @function_tool(schema=TOOL)
        async def lookup(key: str) -> str:
            return answers[key]

        self._config = RolloutConfig(
            multi_turn=MultiTurnConfig(enable=True, tokenization_sanity_check_mode=check),
            agent=AgentConfig(num_workers=1, default_agent_loop="tool_agent", max_concurrency=CONCURRENT[-1]),
        )
        self._registry = ToolRegistry([lookup])
        self._tokens = ContinuousTokens(workload.tokenizer)
        self._trajectories: list[Trajectory] = []
        self._batch: Batch | None = None

    def manager(self, server: StubServer) -> AgentLoopManager:
        """A manager as the trainer makes it."""
        return AgentLoopManager(
            self._config,
            tokens=self._tokens,
            budget=SessionBudget(*LENGTHS[0]),
            pool=ServerPool([server]),
            tools=ToolExecutor(self._registry, max_response_length=MAX_ANSWER),
            reward_fn=no_reward,
        )

    async def turns(self, conversations: list[dict]) -> float:
        """Seconds for all trajectories."""
        manager = self.manager(StubServer(conversations))
        rows = [{"raw_prompt": conversation["prompt"]} for conversation in conversations]
        started = time.process_time()
        result = await manager.generate_sequences(rows, n=1, step=0)
        seconds = time.process_time() - started
        self._trajectories = result.trajectories
        failures = [trajectory.failure for trajectory in result.trajectories if trajectory.failure is not None]
        if failures or result.metrics["agent_loop/tokenization_mismatches"]:
            raise SystemExit(f"every trajectory must end well, got {failures or result.metrics}")
        return seconds

    def arrays(self) -> float:
        """Seconds from the last trajectories to the columns of a batch, as the trainer makes them."""
        started = time.process_time()
        self._batch = Batch.from_segments(segments_of(self._trajectories))
        return time.process_time() - started

    def digest(self) -> list[str]:
        """A hash of the tokens, of what is trained on, and of the log-probabilities there."""
        assert self._batch is not None
        batch = self._batch
        parts = (batch.token_ids, batch.loss_mask, batch.rollout_log_probs[batch.loss_mask])
        return [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in parts]


def _ask(peer: PeerProcess, request: dict) -> dict:
    answer = peer.ask(request)
    if "error" in answer:
        raise SystemExit(f"verl must run the conversations, got {answer['error']}")
    return answer


def compare(workload: Workload, num_rounds: int) -> dict[str, object]:
    """Both sides, round by round; what needs verl is None where it is not there."""
    python = python_of("verl")
    peer = None if python is None else PeerProcess("verl", python, "agent_loop_peer.py", str(workload.folder))
    if peer is None:
        print("verl is left out: it is not installed; uv run python -m benchmarks.peers verl", flush=True)
    ours, unchecked = Ours(workload), Ours(workload, SanityCheckMode.DISABLE)
    best: dict[str, float] = {}
    same = peer is not None
    num_turns = CONVERSATIONS * (TOOL_TURNS + 1)

    def took(what: str, number: int, seconds: float) -> None:
        if number:
            best[what] = min(seconds, best.get(what, seconds))

    with asyncio.Runner() as runner:
        runs = itertools.count()
        for number in range(num_rounds):
            took("unchecked", number, runner.run(unchecked.turns(workload.conversations(next(runs)))))
            for lengths in LENGTHS:
                run = next(runs)
                took("ours", number, runner.run(ours.turns(workload.conversations(run))))
                took("our arrays", number, ours.arrays())
                if peer is None:
                    continue
                request = {"conversations": run, "lengths": lengths}
                took("verl", number, _ask(peer, {"run": "turns", **request})["seconds"])
                took(f"verl arrays {lengths}", number, _ask(peer, {"run": "arrays", **request})["seconds"])
                same = same and _ask(peer, {"run": "digest", **request})["digest"] == ours.digest()
    if peer is not None:
        peer.close()
    for what, seconds in best.items():
        print(f"{what}: {1e6 * seconds / CONVERSATIONS:.0f} us a trajectory", flush=True)
    ratios = [best.get(f"verl arrays {lengths}", 0.0) / best["our arrays"] for lengths in LENGTHS]
    return {
        "turns_ratio_vs_verl": round(best["verl"] / best["ours"], 2) if peer else None,
        "turns_ratio_same_work": round(best["verl"] / best["unchecked"], 2) if peer else None,
        "turns_per_s": round(num_turns / best["ours"]),
        "arrays_ratio_vs_verl": round(ratios[0], 1) if peer else None,
        "arrays_ratio_wide": round(ratios[1], 1) if peer else None,
        "arrays_us_per_trajectory": round(1e6 * best["our arrays"] / CONVERSATIONS, 1),
        "same_batch": same,
    }


def _resident_kib() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


async def memory(workload: Workload) -> dict[str, float]:
    """Resident memory of trajectories that all wait in their last turn."""
    ours = Ours(workload)
    conversations = workload.conversations(0)
    await ours.turns(conversations)  # what is made once is there
    readings = [(0, _resident_kib())]
    gate = asyncio.Event()
    server = StubServer(conversations, last_turn=gate)
    manager = ours.manager(server)
    batches = []
    for step, (before, count) in enumerate(itertools.pairwise((0, *CONCURRENT))):
        rows = [{"raw_prompt": conversations[index % len(conversations)]["prompt"]} for index in range(count - before)]
        batches.append(asyncio.ensure_future(manager.generate_sequences(rows, n=1, step=step)))
        for _ in rows:
            await server.arrived.acquire()
        readings.append((count, _resident_kib()))
    gate.set()
    for batch in batches:
        assert (await batch).metrics["agent_loop/failures"] == 0
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(readings)]
    print(", ".join(f"{count} under way: {kib / 1024:.0f} MiB" for count, kib in readings), flush=True)
    total = readings[-1][1] - readings[0][1]
    return {"kib_per_trajectory": round(total / CONCURRENT[-1], 1), "kib_growth": round(slopes[-1] / slopes[-2], 2)}


def main() -> None:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    default = Path(__file__).resolve().parents[1].parent / "shared"
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("OSTINATO_SHARED", default)))
    parser.add_argument("--memory", action="store_true", help="measure the memory alone, in this process")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as scratch:
        num_rounds = 1 + arguments.rounds
        num_runs = 1 if arguments.memory else num_rounds * RUNS_A_ROUND
        workload = Workload(Path(scratch), arguments.shared / "tokenizers" / "qwen25", num_runs)
        if arguments.memory:
            print(json.dumps(asyncio.run(memory(workload))))
            return
        figures = compare(workload, num_rounds)
    again = [sys.executable, "-m", "benchmarks.agent_loop", "--memory", "--shared", str(arguments.shared)]
    *shown, last = subprocess.run(again, check=True, capture_output=True, text=True).stdout.splitlines()
    print(*shown, sep="\n", flush=True)
    print(json.dumps(figures | json.loads(last)))


if __name__ == "__main__":
    main()
