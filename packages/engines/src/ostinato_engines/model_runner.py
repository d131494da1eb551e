"""A Transformers model and its cache as one function: tokens of some rows in, their last logits out.

Guarantees at start that a chunked forward through our cache gives the logits of the plain forward; models for which
that cannot hold are refused by name. Knows no requests and no sampling parameters beyond their arrays.
"""

import inspect
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ostinato_engines import attention
from ostinato_engines.errors import EngineInputError, EngineLoadError, UnsupportedError
from ostinato_engines.kv_cache import SlotCache, Window
from ostinato_engines.rows import RowTable
from ostinato_engines.sampling import SamplingRows, argmax, penalize, position_keys, sample

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_MASK_BLOCK = 16
"""Masked attention reads a multiple of so many positions: accelerators' kernels would pad the mask in every layer."""


def load_model(model: "str | Path | PreTrainedModel", *, device: str, dtype: str) -> PreTrainedModel:
    """Loads a checkpoint, or takes a model over: it is moved to the device and dtype and no longer trained.

    Raises:
        EngineLoadError: There is no such checkpoint, or transformers cannot load it.
    """
    if dtype not in DTYPES:
        raise EngineInputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; use float32 on a CPU")
    if isinstance(model, PreTrainedModel):
        loaded = model
    else:
        source = str(model)
        try:
            loaded = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype])
        except Exception as error:  # transformers, huggingface_hub and safetensors each raise their own
            reason = " ".join(str(error).split())
            raise EngineLoadError(
                f"model must be a causal language model in the Hugging Face format, got {source!r} "
                f"({type(error).__name__}: {reason[:300]}); check the path, its config.json and its weights"
            ) from error
    torch.nn.Module.to(loaded, device=device, dtype=DTYPES[dtype])
    return loaded.eval().requires_grad_(False)


def check_architecture(model: PreTrainedModel, max_model_len: int) -> None:
    """Refuses models whose state is not one key and value per token and layer.

    Raises:
        UnsupportedError: Naming what the model has instead.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    cure = "serve it with another engine"
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"model must be decoder-only, got the encoder-decoder {name}; {cure}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if getattr(config, "layer_types", None) is None and window is not None and window < max_model_len:
        kinds.add("sliding_attention")
    if kinds != {"full_attention"} or getattr(config, "attention_chunk_size", None):
        others = ", ".join(sorted(kinds - {"full_attention"})) or "chunked_attention"
        raise UnsupportedError(f"every layer must be of full attention, got {others} in {name}; {cure}")
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    if rope_type in ("dynamic", "longrope"):
        raise UnsupportedError(
            f"rotary embedding must not change with length, got rope_type {rope_type} in {name}; {cure}"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedError(f"model must have output embeddings, got {name} without; {cure}")


def max_length_of(model: PreTrainedModel, asked: int | None) -> int:
    """The length limit: what was asked for, at most what the model has positions for."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if asked is None and known is None:
        raise EngineInputError(
            "max_model_len must be given, got None; the model's config names no max_position_embeddings"
        )
    if asked is not None and (asked < 2 or (known is not None and asked > known)):
        raise EngineInputError(f"max_model_len must be in [2, {known}], got {asked}; leave it out for {known}")
    return int(asked if asked is not None else known)  # pyright: ignore[reportArgumentType]


def _vocab_size(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[0])


class ModelRunner:
    """Runs forwards through the slot cache and samples from their logits."""

    def __init__(self, model: PreTrainedModel, *, max_model_len: int) -> None:
        check_architecture(model, max_model_len)
        self.model = model
        self.device = model.device
        self.vocab_size = _vocab_size(model)
        self._plain_logits = self._probe_logits()
        if getattr(model.config, "_attn_implementation", None) != "eager":
            model.set_attn_implementation(attention.NAME)
        self._own_attention = getattr(model.config, "_attn_implementation", None) == attention.NAME
        self.cache = SlotCache(int(model.config.get_text_config().num_hidden_layers))
        # Newer transformers (5.24 does) call the argument `cache` and announce that 5.40 will not know the old name.
        renamed = "cache" in inspect.signature(model.forward).parameters
        self._cache_argument = {("cache" if renamed else "past_key_values"): self.cache}
        self._last: Tensor | None = None
        output_embeddings = model.get_output_embeddings()
        assert output_embeddings is not None
        self._hook = output_embeddings.register_forward_pre_hook(self._keep_last_positions)
        self._columns = torch.arange(0, device=self.device)

    @classmethod
    def probed(cls, model: PreTrainedModel, *, max_model_len: int) -> Self:
        """A runner whose cache is known to fit the model; see `probe`."""
        runner = cls(model, max_model_len=max_model_len)
        try:
            runner.probe()
        except BaseException:
            runner.close()
            raise
        return runner

    def close(self) -> None:
        """Takes our hook off the model and frees the cache."""
        self._hook.remove()
        self.cache.drop()

    def _keep_last_positions(self, module: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Runs before the output embeddings, so that logits exist for one position per row only."""
        if self._last is None:
            return None
        hidden = inputs[0]
        return (hidden[torch.arange(hidden.shape[0], device=hidden.device), self._last][:, None], *inputs[1:])

    def cache_exchange(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Swaps two rows of the cache."""
        with torch.inference_mode():
            self.cache.exchange(first, second, first_length, second_length)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        columns: np.ndarray,
        rows: np.ndarray | slice,
        length: int,
        last: np.ndarray | None,
    ) -> Tensor:
        """Computes new tokens of some rows and stores their states.

        Args:
            token_ids: int64 [n, width], right-padded.
            positions: int64 [n, width], their positions in the sequence.
            columns: int64 [n, width], where in the cache their states go.
            rows: The n rows: indices, or a slice, which costs no copy.
            length: Cache positions that attention reads.
            last: int64 [n], the index within `width` whose logits are wanted; None where width is 1.

        Returns:
            float32 [n, vocab].
        """
        device = self.device
        width = token_ids.shape[1]
        if isinstance(rows, np.ndarray) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            rows = slice(int(rows[0]), int(rows[-1]) + 1)
        first = int(columns[0, 0])
        aligned = bool((columns[:, 0] == first).all())
        # One new token each, at the same place: all see everything, and attention without a mask has fewer kernels.
        unmasked = aligned and (first == 0 if width > 1 else self._own_attention)
        if not unmasked:
            length = min(-(-length // _MASK_BLOCK) * _MASK_BLOCK, self.cache.capacity)
        columns_on_device = torch.from_numpy(columns).to(device)
        in_place = aligned and isinstance(rows, slice)
        row_index: slice | Tensor = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(device)
        write_rows = None
        if not in_place:
            index = torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else row_index
            assert isinstance(index, Tensor)
            write_rows = index[:, None]
        self.cache.window = Window(
            row_index, first if aligned else None, write_rows, None if in_place else columns_on_device, length
        )
        self._last = None if last is None or width == 1 else torch.from_numpy(last).to(device)
        try:
            output = self.model(
                input_ids=torch.from_numpy(token_ids).to(device),
                position_ids=torch.from_numpy(positions).to(device),
                attention_mask=None if unmasked else self._mask(columns_on_device, length),
                use_cache=True,
                **self._cache_argument,
            )
        finally:
            self._last = None
            self.cache.window = None
        return output.logits[:, -1].float()

    def _mask(self, columns: Tensor, length: int) -> Tensor:
        """[n, 1, width, length], to be added to scores: a token attends to all positions up to its own."""
        if len(self._columns) < length:
            self._columns = torch.arange(2 * length, device=self.device)
        hidden = self._columns[:length] > columns[:, None, :, None]
        # Attention functions other than ours add it to scores that they computed, where infinities turn into NaN.
        lowest = -torch.inf if self._own_attention else torch.finfo(self.model.dtype).min
        return torch.zeros_like(hidden, dtype=self.model.dtype).masked_fill_(hidden, lowest)

    @torch.inference_mode()
    def sample(self, logits: Tensor, table: RowTable, rows: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Draws the next token of each row.

        Returns:
            Token ids int64 [n] and logprobs float32 [n].
        """
        if table.penalized[rows].any():
            logits = self._penalized(logits, table, np.arange(table.num_rows)[rows])
        temperature = table.temperature[rows]
        if not temperature.any():
            token_ids, logprobs = argmax(logits)
            return token_ids.cpu().numpy(), logprobs.cpu().numpy()
        token_ids, logprobs = sample(
            logits,
            SamplingRows(
                temperature=temperature,
                keys=position_keys(table.keys[rows], table.num_tokens[rows]),
                filtered=table.filtered[rows],
                top_k=table.top_k[rows],
                top_p=table.top_p[rows],
                min_p=table.min_p[rows],
            ),
        )
        return token_ids.cpu().numpy(), logprobs.cpu().numpy()

    def _penalized(self, logits: Tensor, table: RowTable, rows: np.ndarray) -> Tensor:
        seen = [
            torch.from_numpy(np.unique(table.tokens[row, : table.num_tokens[row]])).to(self.device)
            if table.penalized[row]
            else None
            for row in rows
        ]
        factors = [request.params.repetition_penalty for row in rows if (request := table.requests[row]) is not None]
        logits = logits.clone()
        penalize(logits, seen, factors)
        return logits

    def _probe_ids(self) -> np.ndarray:
        return np.arange(6, dtype=np.int64)[None] * 7 % self.vocab_size

    def _probe_logits(self) -> Tensor:
        """The last logits of a plain forward, under the attention that the model came with."""
        with torch.inference_mode():
            ids = torch.from_numpy(self._probe_ids()).to(self.device)
            return self.model(input_ids=ids, use_cache=False).logits[:, -1].float()

    def probe(self) -> None:
        """Compares a forward in two chunks through our cache with the plain forward, on made-up tokens.

        Raises:
            UnsupportedError: They differ by more than rounding: the model keeps state that our cache does not hold.
        """
        ids, plain = self._probe_ids(), self._plain_logits
        self.cache.reserve(1, 8)
        chunked = plain
        for start, end in ((0, 3), (3, 5), (5, 6)):
            columns = np.arange(start, end)[None]
            chunked = self.forward(ids[:, start:end], columns, columns, np.array([0]), end, np.array([end - start - 1]))
        self.cache.drop()
        difference = float((chunked - plain).abs().max() / plain.abs().max().clamp(min=1.0))
        tolerance = _PROBE_TOLERANCE[self.model.dtype]
        if difference > tolerance:
            raise UnsupportedError(
                f"a forward in pieces must give the logits of the whole within {tolerance}, got a difference of "
                f"{difference:.3g} in {type(self.model).__name__}; serve it with another engine"
            )
