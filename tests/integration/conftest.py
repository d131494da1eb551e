"""A run that is ready to be trained, what must not be left of one that failed, and programs of other frameworks behind the gateway."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pytest

from ostinato_agent_loop import AgentConfig, AgentLoopManager, GatewayConfig, MultiTurnConfig, RolloutConfig, Trajectory
from ostinato_engines.testing import ScriptedServer
from ostinato_rollout import ServerPool, SessionBudget
from ostinato_tokenization import ContinuousTokens
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.quickstart import run as quickstart_run


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the quickstart writes before it trains: model, data, tools, reward and configuration."""
    folder = tmp_path_factory.mktemp("failures") / "base"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart_run, "NUM_TRAIN_ROWS", 16)
        patch.setattr(quickstart_run, "NUM_VAL_ROWS", 4)
        quickstart_run.make_files(folder, seed=0)
    shutil.copytree(folder / "model", folder / "warm_start")
    return folder


@pytest.fixture
def small() -> tuple[str, ...]:
    """Overrides that make a run one step of a few tokens."""
    return (
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "data.train_batch_size=2",
        "data.max_response_length=24",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
    )


@pytest.fixture
def must_hold_no_checkpoint() -> Callable[[Path], None]:
    """Checks that a run left no checkpoint, visible or hidden, and whole lines of metrics."""

    def check(folder: Path) -> None:
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        assert set(names) <= {"metrics.jsonl", "engine.log", "run.log"}, names
        for line in (folder / "metrics.jsonl").read_text().splitlines() if "metrics.jsonl" in names else ():
            json.loads(line)

    return check


class Frameworks:
    """Runs a program of another framework, under its own interpreter, against a policy that says what it is told."""

    _CONTROL = re.compile(r"(<\|im_end\|>|</?tool_call>)")
    _ROOT = Path(__file__).parents[2]

    def __init__(self) -> None:
        self.tokenizer = tiny_chat_tokenizer()
        self.metrics: Mapping[str, float] = {}

    def python_of(self, name: str) -> str:
        """The interpreter of an environment with the framework: of OSTINATO_NAME_PYTHON, or .venv-peers/NAME. Skips without."""
        variable = f"OSTINATO_{name.upper().replace('-', '_')}_PYTHON"
        default = self._ROOT / ".venv-peers" / name / "bin/python"
        python = os.environ.get(variable) or (str(default) if default.exists() else None)
        if python is None:
            pytest.skip(f"{variable} names no interpreter with {name}, and `just peers` made none")
        return python

    def example(self, name: str) -> str:
        """The path of an example."""
        return str(self._ROOT / "examples" / name)

    def encode(self, text: str) -> list[int]:
        """Ids as a model samples them: control tokens in the text are control tokens."""
        ids = []
        for piece in filter(None, self._CONTROL.split(text)):
            token_id = self.tokenizer.token_id(piece) if self._CONTROL.fullmatch(piece) else None
            ids += self.tokenizer.encode_text(piece) if token_id is None else [token_id]
        return ids

    def call(self, name: str, **arguments: object) -> str:
        """A turn that calls a tool."""
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"

    def sampled_ids(self, segment) -> list[list[int]]:
        """What was sampled in a segment, by turn."""
        pairs = zip(segment.response_ids, segment.response_mask, strict=True)
        return [[token for token, _ in run] for mask, run in groupby(pairs, lambda pair: pair[1]) if mask]

    async def run(self, turns: Sequence, row: Mapping, gateway: GatewayConfig, **multi_turn) -> Trajectory:
        """One trajectory of the row, in which the policy says `turns`; nothing of it is left behind."""
        config = RolloutConfig(
            agent=AgentConfig(
                num_workers=1, default_agent_loop="gateway_agent", gateway=gateway, trajectory_timeout_s=120
            ),
            multi_turn=MultiTurnConfig(**multi_turn),
        )
        pool = ServerPool([ScriptedServer(turns, encode=self.encode)])
        client = pool.client()
        manager = AgentLoopManager(
            config,
            tokens=ContinuousTokens(self.tokenizer),
            budget=SessionBudget(16_000, 16_000),
            pool=pool,
            client=client,
        )
        row = {"raw_prompt": [{"role": "user", "content": "-"}], **row}
        batch = await manager.generate_sequences([row], n=1, step=0)
        self.metrics = batch.metrics
        assert set(client.num_in_flight.values()) == {0}
        assert client.num_sticky == 0
        return batch.trajectories[0]


@pytest.fixture(scope="session")
def frameworks() -> Frameworks:
    """See Frameworks."""
    return Frameworks()
