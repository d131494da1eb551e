"""What a user sees when something is wrong: one message, an exit status, no traceback, and nothing half-written.

The command runs in this process, which is the same code from the arguments on; what needs a process of its own is in test_interrupts.
"""

import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ostinato_trainer.checkpoints.manager import CheckpointManager, check_complete
from ostinato_trainer.cli import app
from ostinato_trainer.error_reporting import run_reporting_errors

MODEL = "actor_rollout_ref.model.path="
TOOLS = "actor_rollout_ref.rollout.multi_turn.function_tool_path="
REWARD = "reward.custom_reward_function.path="
SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


class Ended:
    """How a command ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    def must_be_one_message(self, status: int, *fragments: str) -> None:
        """Check status, and that standard error ends in one error that holds the fragments, with no traceback anywhere."""
        assert self.status == status, self.out + self.err
        assert "Traceback" not in self.out + self.err
        starts = [match.start() for match in re.finditer("^error: ", self.err, re.MULTILINE)]
        assert len(starts) == 1, self.err
        message = self.err[starts[0] :]
        for fragment in fragments:
            assert fragment in message, message
        assert ";" in message, f"no cure in {message}"


@pytest.fixture
def ostinato(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run a command line in this process."""

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        status = run_reporting_errors(lambda: app([str(each) for each in arguments], standalone_mode=False))
        return Ended(status, *capsys.readouterr())

    return run


@pytest.fixture
def train(ostinato: Callable[..., Ended], small: tuple[str, ...], base: Path, tmp_path: Path) -> Callable[..., Ended]:
    """Train one small step into `tmp_path / "out"` with overrides."""

    def run(*overrides: str) -> Ended:
        return ostinato(
            "train", base / "config.yaml", *small, f"trainer.default_local_dir={tmp_path / 'out'}", *overrides
        )

    return run


def file_with(path: Path, content: str | bytes) -> Path:
    """Write a file and return its path."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def model_with(base: Path, folder: Path, name: str, content: str | bytes | None) -> Path:
    """A copy of the model in which one file is another, or is not there."""
    shutil.copytree(base / "model", folder)
    (folder / name).unlink()
    if content is not None:
        file_with(folder / name, content)
    return folder


def rows_with(base: Path, path: Path, change: Callable[[dict], dict]) -> Path:
    """A copy of the training rows, each changed."""
    rows = [change(row) for row in pq.read_table(base / "train.parquet").to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_the_base_trains(train: Callable[..., Ended], tmp_path: Path) -> None:
    """Without a fault the same command ends well: what the other tests see comes from the fault."""
    ended = train()
    assert ended.status == 0, ended.err
    assert check_complete(tmp_path / "out" / "global_step_1").step == 1


@pytest.mark.parametrize(
    ("name", "content", "fragments"),
    [
        ("absent.parquet", None, ("absent.parquet", "must exist", "data.train_files")),
        ("x.parquet", "no parquet", ("x.parquet must be a parquet file",)),
        ("x.parquet", "", ("x.parquet must be a parquet file",)),
        ("x.jsonl", "", ("x.jsonl must hold at least one row",)),
        ("x.jsonl", '{"prompt": ', ("x.jsonl, line 1",)),
        ("x.jsonl", '{"question": "1?"}', ("x.jsonl, line 1", "prompt must be there", "data.prompt_key")),
        ("x.txt", "a", ("must end with .parquet",)),
    ],
)
def test_data_that_cannot_be_read(
    must_hold_no_checkpoint: Callable[[Path], None],
    train: Callable[..., Ended],
    tmp_path: Path,
    name: str,
    content: str | None,
    fragments: tuple[str, ...],
) -> None:
    """A data file that is missing, is no parquet, is empty or lacks the prompt is named with its row."""
    if content is not None:
        file_with(tmp_path / name, content)
    train(f"data.train_files={tmp_path / name}").must_be_one_message(1, *fragments)
    must_hold_no_checkpoint(tmp_path / "out")


def test_agents_and_tools_that_rows_ask_for(
    must_hold_no_checkpoint: Callable[[Path], None], train: Callable[..., Ended], base: Path, tmp_path: Path
) -> None:
    """An unknown agent or tool is found before the first step, with file and row and what there is instead."""
    path = rows_with(base, tmp_path / "rows.parquet", lambda row: {**row, "agent_name": "ghost"})
    train(f"data.train_files={path}").must_be_one_message(1, "rows.parquet, row 1", "ghost", "tool_agent")
    kwargs = {"abacus": {"create_kwargs": {"beads": 10}}}
    for key, value in (("tools_kwargs", kwargs), ("tool_selection", ["calculator", "abacus"])):

        def asks(row: dict, key: str = key, value: object = value) -> dict:
            return {**row, "extra_info": {**row["extra_info"], key: value}}

        path = rows_with(base, tmp_path / "rows.parquet", asks)
        train(f"data.train_files={path}").must_be_one_message(
            1, "rows.parquet, row 1", "abacus", "calculator", TOOLS[:-1]
        )
    train("actor_rollout_ref.rollout.agent.default_agent_loop=ghost").must_be_one_message(1, "ghost", "tool_agent")
    must_hold_no_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("path", "fragments"),
    [
        ("{tmp}/absent", ("nothing there",)),
        ("{base}/config.yaml", ("a file",)),
        ("{base}", ("without config.json",)),
        ("owner/name", ("hf download owner/name",)),
    ],
)
def test_a_model_path_that_is_no_model(
    must_hold_no_checkpoint: Callable[[Path], None],
    train: Callable[..., Ended],
    base: Path,
    tmp_path: Path,
    path: str,
    fragments: tuple[str, ...],
) -> None:
    """The message names the key, what is there, and what to do about it."""
    train(MODEL + path.format(tmp=tmp_path, base=base)).must_be_one_message(1, MODEL[:-1], *fragments)
    must_hold_no_checkpoint(tmp_path / "out")


def test_a_checkpoint_in_place_of_its_model(train: Callable[..., Ended], base: Path, tmp_path: Path) -> None:
    """Who gives a run's checkpoint as the model is told the folder inside it."""
    shutil.copytree(base / "model", tmp_path / "global_step_3" / "huggingface")
    ended = train(f"{MODEL}{tmp_path / 'global_step_3'}")
    ended.must_be_one_message(1, f"write {MODEL}{tmp_path / 'global_step_3' / 'huggingface'}")


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("model.safetensors", b"x" * 3000, "damaged"),
        ("model.safetensors", b"", "damaged"),
        ("model.safetensors", None, "model.safetensors"),
        ("config.json", "{", "config.json"),
        ("config.json", '{"model_type": "unheard_of"}', "unheard_of"),
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("chat_template.jinja", None, "chat_template"),
        ("chat_template.jinja", "{% for", "valid Jinja template"),
        ("chat_template.jinja", "{{ raise_exception('no system turns') }}", "no system turns"),
    ],
)
def test_a_damaged_model(
    must_hold_no_checkpoint: Callable[[Path], None],
    train: Callable[..., Ended],
    ostinato: Callable[..., Ended],
    base: Path,
    tmp_path: Path,
    name: str,
    content: str | bytes | None,
    fragment: str,
) -> None:
    """Whichever file of a model is missing or broken, training and chat say so in one message that names the folder."""
    folder = model_with(base, tmp_path / "damaged", name, content)
    train(MODEL + str(folder)).must_be_one_message(1, fragment)
    must_hold_no_checkpoint(tmp_path / "out")
    if "raise_exception" not in str(content):  # a template that refuses some messages may suit others
        ostinato("chat", folder).must_be_one_message(1, fragment)


@pytest.mark.parametrize(
    ("source", "fragments"),
    [
        (None, ("function_tool_path", "nothing there")),
        ("def f(:", ("tools.py must run as Python", "SyntaxError", "line 1")),
        ("raise ValueError('boo')", ("tools.py must run as Python", "ValueError: boo")),
        ("import sys; sys.exit(3)", ("tools.py must run as Python", "SystemExit")),
        ("x = 1", ("@function_tool",)),
        ("from ostinato_tools import function_tool\n@function_tool\ndef f(a): ...", ("schema of f", "tools.py:2")),
    ],
)
def test_broken_tools(
    must_hold_no_checkpoint: Callable[[Path], None],
    train: Callable[..., Ended],
    tmp_path: Path,
    source: str | None,
    fragments: tuple[str, ...],
) -> None:
    """A file of tools that is missing, does not run or holds none is refused before the first step, sys.exit included."""
    if source is not None:
        file_with(tmp_path / "tools.py", source)
    train(f"{TOOLS}{tmp_path / 'tools.py'}").must_be_one_message(1, *fragments)
    must_hold_no_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "fragments"),
    [
        (None, (REWARD[:-1], "reward.py")),
        ("def f(:", ("SyntaxError", "line 1")),
        ("raise ValueError('boo')", ("reward.py:1: ValueError: boo",)),
        ("x = 1", ("compute_score", "it defines x")),
        ("def compute_score(answer): return 1.0", ("by name", "answer")),
        (SCORE + "    return 1 / 0", ("got 3 failed", "ZeroDivisionError")),
        (SCORE + "    return float('nan')", ("got 3 failed", "nan")),
        (SCORE + "    return 'good'", ("got 3 failed", "'good'")),
        (SCORE + "    import time; time.sleep(600)", ("got 3 failed", "reward.timeout_s=0.5")),
    ],
)
def test_broken_rewards(
    must_hold_no_checkpoint: Callable[[Path], None],
    train: Callable[..., Ended],
    tmp_path: Path,
    source: str | None,
    fragments: tuple[str, ...],
) -> None:
    """A reward that cannot be loaded is refused at once; one that fails for every trajectory ends the run with the first cause."""
    if source is not None:
        file_with(tmp_path / "reward.py", source)
    ended = train(f"{REWARD}{tmp_path / 'reward.py'}", "reward.timeout_s=0.5")
    ended.must_be_one_message(1, *fragments)
    must_hold_no_checkpoint(tmp_path / "out")


def test_a_reward_that_fails_sometimes_is_said_once(train: Callable[..., Ended], tmp_path: Path) -> None:
    """Failures beside successes are recorded and the run goes on; the cause is shown once, with the user's line."""
    source = f"calls = []\n{SCORE}    calls.append(1)\n    if len(calls) % 2:\n        raise ValueError('odd')\n    return 1.0\n"
    path = file_with(tmp_path / "reward.py", source)
    ended = train(f"{REWARD}{path}", "trainer.min_group_size=1")
    assert ended.status == 0, ended.err
    assert ended.err.count("ValueError: odd") == 1
    assert f"{path}:5" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        (None, ("must exist",)),
        ("a:\n\tb: 1", ("must be YAML", "line 2")),
        ("- a", ("mapping of keys", "list")),
        (b"\xff\xfe\x00", ("must be YAML",)),
        ("data:\n  seed: 1\ndata:\n  seed: 2\n", ("duplicate key", "line 3")),
        ("data:\n  seed: many\n", ("data.seed must be int", "'many'")),
        ("data:\n  sead: 1\n", ("data.sead is not a key", "did you mean data.seed")),
    ],
)
def test_configuration_files(
    ostinato: Callable[..., Ended], tmp_path: Path, content: str | bytes | None, fragments: tuple[str, ...]
) -> None:
    """A file that is no YAML, or holds a wrong key or value, is named with the place."""
    path = tmp_path / "run.yaml"
    if content is not None:
        file_with(path, content)
    ended = ostinato("train", path)
    assert ended.status == 1
    assert ended.err.startswith("error: ")
    assert "Traceback" not in ended.err
    for fragment in (str(path), *fragments):
        assert fragment in ended.err


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("data.seed", ("data.seed", "KEY=VALUE")),
        ("data.seed=many", ("data.seed must be int", "'many'")),
        ("=3", ("must begin with a dotted key",)),
        ("+data.seed=3", ("write data.seed=3",)),
        ("data=3", ("data must be a mapping", "data.KEY=VALUE")),
        ("data.train_batch_size=0", ("int >= 1", "got 0")),
        ("data.train_batch_size=64", ("number of rows", "64 for 16")),
        ("trainer.device=abacus", ("device", "'abacus'", "auto")),
        ("algorithm.adv_estimator=grpoo", ("adv_estimator", "'grpoo'", "rloo")),
        ("actor_rollout_ref.rollout.multi_turn.format=xml", ("hermes", "'xml'")),
    ],
)
def test_overrides(train: Callable[..., Ended], tmp_path: Path, override: str, fragments: tuple[str, ...]) -> None:
    """A wrong override is quoted and told how to be written, and no step is made."""
    sampled = file_with(
        tmp_path / "reward.py", f"{SCORE}    open({str(tmp_path / 'sampled')!r}, 'w').close()\n    return 1.0\n"
    )
    train(f"{REWARD}{sampled}", override).must_be_one_message(1, *fragments)
    assert not (tmp_path / "sampled").exists()


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("train",), "CONFIG.yaml"),
        (("train", "--fast"), "--fast"),
        (("dance",), "dance"),
        (("quickstart", "--seed", "x"), "--seed"),
        (("chat",), "path"),
    ],
)
def test_wrong_usage(ostinato: Callable[..., Ended], arguments: tuple[str, ...], fragment: str) -> None:
    """Wrong options and arguments end with status 2 and the way to the help."""
    ended = ostinato(*arguments)
    ended.must_be_one_message(2, "--help")
    assert fragment.lower() in ended.err.lower()


def test_folders_that_cannot_be_written(
    ostinato: Callable[..., Ended], train: Callable[..., Ended], base: Path
) -> None:
    """An output that is a file, lies below a file, or is occupied is refused before anything is computed."""
    for folder in (base / "config.yaml", base / "config.yaml" / "below"):
        train(f"trainer.default_local_dir={folder}").must_be_one_message(1, str(folder), "default_local_dir")
        ostinato("quickstart", "--output", folder).must_be_one_message(1, str(folder), "--output")
    ostinato("quickstart", "--output", base).must_be_one_message(1, str(base), "new or empty")
    ostinato("chat", base).must_be_one_message(1, str(base), "config.json")


@pytest.fixture(params=["limit", "disk"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder to which no file of the model's size can be written: by a limit of the process, or on a disk of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if request.param == "limit":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
        yield folder
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(
    small: tuple[str, ...],
    must_hold_no_checkpoint: Callable[[Path], None],
    ostinato: Callable[..., Ended],
    base: Path,
    full_disk: Path,
) -> None:
    """A checkpoint that does not fit leaves nothing behind, hidden or not, and the message says where and what to do."""
    out = full_disk / "out"
    ended = ostinato("train", base / "config.yaml", *small, f"trainer.default_local_dir={out}")
    ended.must_be_one_message(1, "checkpoint of step 1", str(out), "make room")
    must_hold_no_checkpoint(out)
    ended = ostinato("quickstart", "--output", full_disk / "quickstart")
    ended.must_be_one_message(1, str(full_disk / "quickstart"), "make room")


def test_a_checkpoint_that_does_not_fit_harms_no_earlier_one(
    train: Callable[..., Ended], ostinato: Callable[..., Ended], base: Path, tmp_path: Path
) -> None:
    """After a full disk the earlier checkpoint is complete and is still the latest."""
    assert train().status == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        train("trainer.total_training_steps=2").must_be_one_message(1, "earlier checkpoints are unharmed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out = tmp_path / "out"
    with CheckpointManager(out) as manager:
        assert manager.latest() == out / "global_step_1"
    assert check_complete(out / "global_step_1").step == 1
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
