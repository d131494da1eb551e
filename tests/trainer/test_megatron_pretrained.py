"""What Megatron's ranks read of a model folder; needs no Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ostinato_trainer.backends.megatron.mapping import EMBEDDING, HEAD, Block, Part, Split
from ostinato_trainer.backends.megatron.pretrained import PretrainedTensors
from ostinato_trainer.errors import BackendError

WEIGHT, BIAS = "score.weight", "score.bias"


def end_of(*names: str, width: int = 8) -> Block:
    """The block of a critic's head."""
    shapes = {WEIGHT: (1, width), BIAS: (1,)}
    return Block("end", 0, tuple(Part(name, (name,), (shapes[name],), Split.WHOLE) for name in names))


def folder_with(folder: Path, **tensors: Tensor) -> PretrainedTensors:
    """A model folder that holds nothing but these."""
    save_file({"model.norm.weight": torch.ones(8), **tensors}, folder / "model.safetensors")
    return PretrainedTensors(folder, key="critic.model.path")


def test_a_critic_begins_at_zero(tmp_path: Path) -> None:
    """Where a folder has no scalar head, there is one of zeros."""
    pretrained = folder_with(tmp_path)
    assert pretrained.value_head(8) == (WEIGHT, BIAS)
    found = pretrained.of_block(end_of(WEIGHT, BIAS))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {WEIGHT: [[0.0] * 8], BIAS: [0.0]}


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_head_of_the_folder_is_kept(tmp_path: Path, has_bias: bool) -> None:
    """A scalar head that a folder brings is the critic's, with its bias where it has one."""
    head = {WEIGHT: torch.arange(8.0).unsqueeze(0), **({BIAS: torch.ones(1)} if has_bias else {})}
    pretrained = folder_with(tmp_path, **head)
    names = pretrained.value_head(8)
    assert names == tuple(head)
    found = pretrained.of_block(end_of(*names))
    assert all(torch.equal(found[name], tensor) for name, tensor in head.items())


def test_a_head_of_several_numbers_is_refused(tmp_path: Path) -> None:
    """A classifier's head is none of a critic: both shapes and the key are said."""
    pretrained = folder_with(tmp_path, **{WEIGHT: torch.zeros(3, 8)})
    with pytest.raises(BackendError, match=r"score\.weight of shape \[1, 8\], got shape \[3, 8\].*critic\.model\.path"):
        pretrained.of_block(end_of(*pretrained.value_head(8)))


def test_an_output_layer_beside_the_embedding_that_it_should_be_is_refused(tmp_path: Path) -> None:
    """Where both are stored and differ, nobody can say which is meant; a copy of the embedding, or nothing, is taken."""
    rows = torch.arange(32.0).view(4, 8)
    folder_with(tmp_path, **{EMBEDDING: rows}).tie()
    folder_with(tmp_path, **{EMBEDDING: rows, HEAD: rows.clone()}).tie()
    pretrained = folder_with(tmp_path, **{EMBEDDING: rows, HEAD: rows + 1.0})
    with pytest.raises(
        BackendError, match=r"embed_tokens\.weight and lm_head\.weight.*got two that differ.*critic\.model\.path"
    ):
        pretrained.tie()


def test_an_embedding_that_is_stored_as_the_output_layer_is_found(tmp_path: Path) -> None:
    """A tied model may store its one tensor under either name, as `transformers` loads it; one that is not tied must have both."""
    rows = torch.arange(32.0).view(4, 8)
    block = Block("embedding", 0, (Part("embedding", (EMBEDDING,), ((4, 8),), Split.ROWS),))
    pretrained = folder_with(tmp_path, **{HEAD: rows})
    with pytest.raises(BackendError, match=r"embed_tokens\.weight of shape \[4, 8\], got none"):
        pretrained.of_block(block)
    pretrained.tie()
    assert torch.equal(pretrained.of_block(block)[EMBEDDING], rows)


@pytest.mark.parametrize("index", ["[]", "null", '{"weight_map": []}', '{"weight_map": {"model.norm.weight": 1}}', "{"])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    """Whatever stands in it, it is an error with the key."""
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BackendError, match=r"must hold readable weights.*check critic\.model\.path"):
        PretrainedTensors(tmp_path, key="critic.model.path")
