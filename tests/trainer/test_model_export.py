"""A checkpoint's model becomes a folder of its own, checked, whole, and in another precision on request."""

import filecmp
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ostinato_trainer.checkpoints.export import export_model
from ostinato_trainer.checkpoints.manager import CheckpointManager
from ostinato_trainer.errors import CheckpointError

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two checkpoints, of which the first is the best; the second's weights are in two files."""

    def write(directory: Path) -> None:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))  # pyright: ignore[reportArgumentType]
        model.save_pretrained(directory / "huggingface", max_shard_size="30KB" if "step_2" in str(directory) else "5GB")
        (directory / "huggingface" / "tokenizer.json").write_text("{}")
        (directory / "actor").mkdir()
        (directory / "actor" / "weights.safetensors").write_text("not exported")

    with CheckpointManager(tmp_path / "run", best_metric="val") as manager:
        manager.save(1, write, {"val": 1.0})
        manager.save(2, write, {"val": 0.5})
    return tmp_path / "run"


def export(source: Path, output: Path, *, best: bool = False, dtype: str | None = None) -> str:
    """What the command prints."""
    text = io.StringIO()
    export_model(source, output, best=best, dtype=dtype, console=Console(file=text))
    return text.getvalue()


def test_an_export_is_the_folder_that_was_saved(run: Path, tmp_path: Path) -> None:
    """A checkpoint, the newest of a run or the best of a run: the same files, byte for byte, and nothing of the optimizer."""
    for source, best, step in ((run / "global_step_1", False, 1), (run, False, 2), (run, True, 1)):
        output = tmp_path / f"out-{step}-{best}"
        assert f"step {step}" in export(source, output, best=best)
        saved = run / f"global_step_{step}" / "huggingface"
        names = sorted(path.name for path in saved.iterdir())
        assert sorted(path.name for path in output.iterdir()) == names
        assert not [name for name in names if not filecmp.cmp(saved / name, output / name, shallow=False)]


def test_what_lies_beside_the_saved_files_is_left_out(run: Path, tmp_path: Path) -> None:
    """A file that has come into a checkpoint's folder has no checksum, and does not leave it as if it were the model's."""
    (run / "global_step_1" / "huggingface" / "pytorch_model.bin").write_bytes(b"something else")
    export(run / "global_step_1", tmp_path / "out")
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_an_inventory_of_other_folders_is_refused(run: Path, tmp_path: Path) -> None:
    """A checkpoint made by somebody else cannot name files outside of itself."""
    path = run / "global_step_1" / "checkpoint.json"
    inventory = json.loads(path.read_bytes())
    for name in ("huggingface/../../../secret", "/etc/hostname"):
        path.write_text(json.dumps({**inventory, "files": {name: {"num_bytes": 1, "sha256": ""}}}))
        with pytest.raises(CheckpointError, match=r"must hold its files, got .* in its checkpoint.json"):
            export(run / "global_step_1", tmp_path / "out")


@pytest.mark.parametrize("source", ["global_step_1", "global_step_2"])
def test_weights_are_converted_on_request(run: Path, tmp_path: Path, source: str) -> None:
    """In bfloat16 every weight is the rounded one and transformers loads the folder as such, be it one file or several."""
    export(run / source, tmp_path / "out", dtype="bfloat16")
    exact = {
        name: value
        for path in (run / source / "huggingface").glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    rounded = {
        name: value for path in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(path).items()
    }
    assert exact.keys() == rounded.keys()
    assert all(torch.equal(rounded[name], value.bfloat16()) for name, value in exact.items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (source == "global_step_2")
    if index.exists():
        assert json.loads(index.read_text())["metadata"]["total_size"] == sum(
            value.nbytes for value in rounded.values()
        )


def test_what_cannot_be_exported_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    """A damaged file, a folder without checkpoints, an occupied output or an unknown precision: a message, and no output."""
    weights = run / "global_step_1" / "huggingface" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors must be as it was written, got another checksum"):
        export(run / "global_step_1", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"must be a checkpoint or hold latest_checkpointed_iteration.txt"):
        export(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"best_checkpointed_iteration.txt.*trainer.best_metric"):
        export(tmp_path / "empty", tmp_path / "out", best=True)
    with pytest.raises(CheckpointError, match="the output must be new or an empty folder"):
        export(run, run)
    with pytest.raises(CheckpointError, match="must lie outside of the checkpoint"):
        export(run, run / "global_step_2" / "huggingface" / "bf16")
    with pytest.raises(CheckpointError, match="--best must go with the folder of a run"):
        export(run / "global_step_2", tmp_path / "out", best=True)
    with pytest.raises(CheckpointError, match="must be new or an empty folder, got /"):
        export(run, Path("/"))
    with pytest.raises(CheckpointError, match="--dtype must be one of float32, bfloat16, float16, got 'fp8'"):
        export(run, tmp_path / "out", dtype="fp8")
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_precision_that_overflows_is_refused(tmp_path: Path) -> None:
    """A weight that float16 cannot hold is named instead of becoming infinite."""

    def write(directory: Path) -> None:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))  # pyright: ignore[reportArgumentType]
        with torch.no_grad():
            model.model.norm.weight[3] = 1e6
        model.save_pretrained(directory / "huggingface")

    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, write)
    with pytest.raises(CheckpointError, match=r"model.norm.weight overflows; use bfloat16"):
        export(tmp_path / "run", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
