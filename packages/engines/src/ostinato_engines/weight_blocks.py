"""Which tensors of a model belong together: engines keep some of them as one, and can replace that only as a whole.

What engines join (query, key and value; gate and up; the experts of a layer) lies within one attention, one feed-forward network or one set of
experts, which is what the names of checkpoints are made of.
"""

from collections.abc import Iterable, Sequence

_EXPERTS = ".experts."


def block_of(name: str) -> str:
    """The block that a tensor belongs to: what holds its layer, so `a.mlp` for `a.mlp.up_proj.weight`; the experts of a layer are one."""
    before, experts, _ = name.partition(_EXPERTS)
    return before + experts if experts else name.rpartition(".")[0].rpartition(".")[0]


def whole_blocks(names: Iterable[str], all_names: Sequence[str]) -> tuple[str, ...]:
    """All that belongs together with one of `names`, out of `all_names`, in their order."""
    blocks = {block_of(name) for name in names}
    return tuple(name for name in all_names if block_of(name) in blocks)
