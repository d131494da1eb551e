"""`ostinato export`: the model of a checkpoint as a folder of its own, in the Hugging Face format.

Invariant: what is exported is what was saved, checked by its checksums and without what has come to lie beside it, and the output is there
whole or not at all. A conversion rounds weights and touches nothing else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.markup import escape
from safetensors import safe_open
from safetensors.torch import save_file

from ostinato_trainer.checkpoints.inventory import check_files, read_inventory
from ostinato_trainer.checkpoints.manager import BEST, LATEST
from ostinato_trainer.checkpoints.resume import MODEL_FOLDER
from ostinato_trainer.checkpoints.whole_folder import folder_made_whole
from ostinato_trainer.errors import CheckpointError
from ostinato_trainer.home_paths import home_path

__all__ = ["DTYPES", "export_model"]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_model(source: Path, output: Path, *, best: bool, dtype: str | None, console: Console) -> None:
    """Copy the model of a checkpoint to a new folder.

    Args:
        source: A checkpoint, `global_step_N`, or the folder of a run.
        output: A folder that does not exist yet, or is empty.
        best: Of a run's folder take the best checkpoint, not the newest.
        dtype: A name in `DTYPES` to convert weights to; None keeps them.
        console: Where it is said what was written.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, `dtype` is unknown or too narrow, or `output` is occupied or cannot be written.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(
            f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; leave it out to keep the weights"
        )
    output = home_path(output, "--output", CheckpointError)
    checkpoint = _checkpoint(home_path(source, "the checkpoint", CheckpointError), best=best)
    inventory = read_inventory(checkpoint)
    names = [name for name in inventory.files if name.startswith(f"{MODEL_FOLDER}/")]
    if not names:
        raise CheckpointError(f"{checkpoint} must hold {MODEL_FOLDER}, got a checkpoint without; export another one")
    check_files(checkpoint, inventory, names)
    if checkpoint.resolve() in (place := output.resolve(), *place.parents):
        raise CheckpointError(
            f"the output must lie outside of the checkpoint, got {output}, which would be removed with it; choose another folder"
        )
    with folder_made_whole(output) as unfinished:
        for name in names:
            copy = unfinished / Path(name).relative_to(MODEL_FOLDER)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / name, copy)
        if dtype is not None:
            _convert(unfinished, dtype)
    console.print(f"the model of step {inventory.step} is in {escape(str(output))}", highlight=False, soft_wrap=True)


def _checkpoint(source: Path, *, best: bool) -> Path:
    if (source / "checkpoint.json").is_file():
        if best:
            raise CheckpointError(f"--best must go with the folder of a run, got the checkpoint {source}; leave it out")
        return source
    if not source.is_dir():
        raise CheckpointError(
            f"{source} must be a checkpoint or a run's folder, got no folder of that name; check the path"
        )
    pointer = source / (BEST if best else LATEST)
    try:
        step = int(pointer.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        cure = (
            "a run writes it where trainer.best_metric is set"
            if best
            else "give a folder global_step_N, or that of a run"
        )
        raise CheckpointError(f"{source} must be a checkpoint or hold {pointer.name}, got {error}; {cure}") from error
    return source / f"global_step_{step}"


def _convert(folder: Path, dtype: str) -> None:
    """Rounds the weights of a model folder, a file at a time, and says so in its JSON files."""
    num_bytes = 0
    for path in sorted(folder.glob("*.safetensors")):
        converted = path.with_suffix(".converted")  # the tensors may be views of the file that they were read from
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: _rounded(name, file.get_tensor(name), DTYPES[dtype]) for name in file.keys()}  # noqa: SIM118  (no mapping)
        save_file(tensors, converted, metadata=metadata)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        converted.replace(path)
    _edit_json(folder / "config.json", lambda config: (config.pop("torch_dtype", None), config.update(dtype=dtype)))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        _edit_json(index, lambda content: content["metadata"].update(total_size=num_bytes))


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    rounded = tensor.to(dtype)
    if tensor.isfinite().all() and not rounded.isfinite().all():
        raise CheckpointError(
            f"--dtype must hold every weight, got {dtype}, in which {name} overflows; use bfloat16, whose range is that of float32"
        )
    return rounded
