"""`FlatModel`: a `transformers` model that takes flat batches and answers a row a token, however its sequences are laid out.

Packed, the sequences of a batch stand one behind the other in a single row, and attention goes over each of them alone; padded, each has a
row of its own, filled up to the longest. Both give the same numbers. A model is packed where its attention follows the contract of
flash attention and a probe shows that packed and padded answers agree: a convolution, a recurrent state or an attention of the
model's own sees its neighbours in a packed row, and such a model is padded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor, nn

from ostinato_trainer.backends.compiling import compiler_failures_named, prepare_layers
from ostinato_trainer.backends.packed_attention import PACKED_ATTENTION, as_packed, register_packed_attention
from ostinato_trainer.backends.parameter_copies import ParameterCopies
from ostinato_trainer.backends.sequence_ranks import SEQUENCE_KEY, SequenceRanks
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError
from ostinato_trainer.segments import Segment

_logger = logging.getLogger(__name__)

_PROBE_LENGTHS: Final = (5, 2, 7, 1)


class Layout(StrEnum):
    """How sequences stand in the model's input."""

    PACKED = "packed"
    PADDED = "padded"


class FlatModel:
    """Runs a model over batches that lie on its device."""

    def __init__(
        self,
        model: Any,
        *,
        output: str = "last_hidden_state",
        remove_padding: bool = True,
        compute_dtype: torch.dtype | None = None,
        compiled: bool = False,
        recomputed: bool = False,
        sequence_ranks: SequenceRanks | None = None,
    ) -> None:
        """
        Args:
            model: A `transformers` model in evaluation mode, on its device. Where it can be packed, its attention implementation
                is set to `PACKED_ATTENTION`, which does what `sdpa` does for any other caller.
            output: Which of its outputs is asked for, [rows, columns, width].
            remove_padding: Pack where the model can; false pads always.
            compute_dtype: What to compute in, where it is not the parameters' own type: their copies in it are made for each pass, and
                gradients come back, and add up, in the parameters' type.
            compiled: Let torch.compile fuse each of the model's layers.
            recomputed: Keep only each layer's inputs for the backward pass; such a model cannot be copied.
            sequence_ranks: With whom rows are shared; the model must be one that can be packed then.

        Raises:
            BackendError: rows cannot be shared, as the model cannot be packed.
        """
        self._ranks = sequence_ranks
        self._model, self._output = model, output
        self._copies = None if compute_dtype is None else ParameterCopies(model, compute_dtype)
        self.layout = Layout.PADDED
        self.reason = "use_remove_padding is false"
        """Why the layout is what it is."""
        if remove_padding:
            self._pack_if_possible()
        kinds = sorted(_moving_rotations(model))
        if sequence_ranks is not None:
            self._check_shared(kinds)
        prepare_layers(layers_of(model), compiled=compiled, recomputed=recomputed)
        if kinds:
            _logger.warning(
                "%s has rotary positions of kind %s, which depend on the longest sequence of a forward pass: where one is longer than the "
                "model's original context, its neighbours' log-probabilities change with it; keep sequences below it",
                type(model).__name__,
                ", ".join(kinds),
            )
        as_asked = remove_padding is (self.layout is Layout.PACKED)
        level = logging.INFO if as_asked else logging.WARNING
        _logger.log(level, "%s runs %s: %s", type(model).__name__, self.layout, self.reason)

    def __call__(self, batch: Batch) -> Tensor:
        """float [T, width]: a row for each token of the batch, in its order; where rows are shared, for each of this rank's stretch of them."""
        return self._packed(batch) if self.layout is Layout.PACKED else self._padded(batch)

    def _packed(self, batch: Batch) -> Tensor:
        token_ids, positions, starts = batch.token_ids, _positions(batch), batch.cu_seqlens.to(torch.int32)
        lengths = batch.lengths
        shared: dict[str, SequenceRanks] = {}
        if self._ranks is not None:
            token_ids, positions = self._ranks.own(token_ids), self._ranks.own(positions)
            starts = self._ranks.sequences(starts, batch.num_tokens)
            lengths = self._ranks.lengths(lengths)
            shared["sequence_ranks"] = self._ranks
        with as_packed(lengths):
            outputs = self._call(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                cu_seq_lens_q=starts,
                cu_seq_lens_k=starts,
                max_length_q=max(lengths),
                max_length_k=max(lengths),
                **shared,
            )
        return getattr(outputs, self._output).squeeze(0)

    def _padded(self, batch: Batch) -> Tensor:
        rows = batch.token_sequence
        columns = _places(batch)
        input_ids = batch.token_ids.new_zeros(batch.num_sequences, max(batch.lengths))
        input_ids[rows, columns] = batch.token_ids
        attention_mask = torch.zeros_like(input_ids)
        attention_mask[rows, columns] = 1
        position_ids = torch.arange(input_ids.shape[1], device=rows.device).repeat(batch.num_sequences, 1)
        if batch.position_ids is not None:
            position_ids[rows, columns] = batch.position_ids
        outputs = self._call(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        return getattr(outputs, self._output)[rows, columns]

    def _difference(self, batch: Batch) -> str | None:
        """Says how packed and padded answers differ, in the parameters' type and in that of the computation; leaves the model packed."""
        copies, before = self._copies, self._model.config._attn_implementation
        found = None
        try:
            for self._copies in dict.fromkeys((None, copies)):
                with torch.no_grad():
                    self._model.set_attn_implementation(before)
                    expected = self._padded(batch)
                    self._model.set_attn_implementation(PACKED_ATTENTION)
                    rows = self._packed(batch)
                    if self._ranks is not None:
                        rows = self._ranks.gathered(rows, batch.num_tokens)
                    found = found or _difference(expected, rows)
        finally:
            self._copies = copies
        return found

    def _call(self, **inputs: Any) -> Any:
        with compiler_failures_named(), nullcontext() if self._copies is None else self._copies.installed():
            return self._model(**inputs)

    def _check_shared(self, moving_rotations: Sequence[str]) -> None:
        """Raises BackendError where ranks cannot share rows."""
        reason = self.reason if self.layout is Layout.PADDED else None
        if moving_rotations:
            reason = f"it has rotary positions of kind {', '.join(moving_rotations)}, which depend on the longest sequence at hand"
        if reason is not None:
            raise BackendError(
                f"{SEQUENCE_KEY} must be 1 for {type(self._model).__name__}, which cannot share packed rows: {reason}; write {SEQUENCE_KEY}=1"
            )

    def _pack_if_possible(self) -> None:
        """Sets the layout and the reason; leaves the model as it was where it stays padded."""
        obstacle = _obstacle(self._model)
        if obstacle is None:
            before = self._model.config._attn_implementation
            register_packed_attention()
            batch = _probe_batch(self._model)
            try:
                obstacle = self._difference(batch)
            except (
                Exception
            ) as error:  # models are foreign code: whatever keeps one from being packed is the reason why it is padded
                obstacle = f"its forward pass refuses packed rows ({' '.join(str(error).split())[:200]})"
            if obstacle is not None:
                self._model.set_attn_implementation(before)
        self.reason = "its packed and padded answers agree" if obstacle is None else obstacle
        self.layout = Layout.PACKED if obstacle is None else Layout.PADDED


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model's layers: the first list of modules of one kind; none where it has no such list."""
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList) and len({type(layer) for layer in stack}) == 1:
            return list(stack)
    return []


def _places(batch: Batch) -> Tensor:
    """int64 [T]: the place of each token in its sequence."""
    return torch.arange(batch.num_tokens, device=batch.cu_seqlens.device) - batch.cu_seqlens[batch.token_sequence]


def _positions(batch: Batch) -> Tensor:
    return _places(batch) if batch.position_ids is None else batch.position_ids


def _obstacle(model: Any) -> str | None:
    """Why a model cannot be packed, as far as it says so itself."""
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
        return "it is not a model of transformers"
    if not getattr(model, "_supports_flash_attn", False):
        return "its attention does not follow the contract of flash attention"
    kinds = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    return f"it has layers of kind {', '.join(sorted(kinds))}" if kinds else None


def _moving_rotations(model: Any) -> set[str]:
    """Kinds of rotary positions in a model whose frequencies `transformers` chooses by the longest sequence at hand."""
    given = getattr(getattr(model, "config", None), "rope_parameters", None) or {}
    kinds = {str(value.get("rope_type")) for value in (given, *given.values()) if isinstance(value, dict)}
    return kinds & {"dynamic", "longrope"}


def _probe_batch(model: Any) -> Batch:
    """Sequences of unlike length whose neighbours differ."""
    table: Tensor = model.get_input_embeddings().weight
    ids = torch.arange(sum(_PROBE_LENGTHS)).mul(7).add(3).remainder(table.shape[0]).tolist()
    segments, start = [], 0
    for place, length in enumerate(_PROBE_LENGTHS):
        segments.append(
            Segment(
                ids[start : start + 1],
                ids[start + 1 : start + length],
                [1] * (length - 1),
                None,
                "probe",
                f"{place}",
                0.0,
            )
        )
        start += length
    return Batch.from_segments(segments).to(table.device)


def _difference(expected: Tensor, got: Tensor) -> str | None:
    """Says how far two answers are apart, where that is more than rounding."""
    bound = 100 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    if expected.dtype in (torch.float16, torch.bfloat16):
        bound /= 20
    apart = float((expected - got).abs().max())
    return None if apart <= bound else f"its packed and padded answers differ by {apart:.2g}"
