"""`LocalBackend`: a `TrainingBackend` on one device.

Invariants: gradients depend on the mini-batch alone, not on how it was split; a step whose gradient norm is not
finite changes nothing; and on the CPU the same calls give the same bits, because nothing here draws a random number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ostinato_engines import WeightManifest
from ostinato_engines.device import HOST, empty_cache, pick_device
from ostinato_trainer.backends.adamw import AdamW, AdamWOptions
from ostinato_trainer.backends.base import EntropyMode, LossFn, LossOutput, MicroBatchOutput, OptimizerStats
from ostinato_trainer.backends.causal_lm import CausalLM, load_causal_lm
from ostinato_trainer.backends.compiling import resolve_compile
from ostinato_trainer.backends.lora import LORA_FOLDER, LoraAdapters, LoraOptions
from ostinato_trainer.backends.memory import (
    EngineShare,
    HeldMemory,
    MemoryOwner,
    StateSize,
    check_state_fits,
    held_memory,
    out_of_memory_named,
)
from ostinato_trainer.backends.model_passes import (
    accumulate_gradients,
    check_ids,
    check_temperature,
    tokens_to_score,
)
from ostinato_trainer.backends.packing import Layout
from ostinato_trainer.backends.ranks.state import read_whole
from ostinato_trainer.backends.state import (
    BackendState,
    ModelState,
    check_frozen,
    check_matches,
    fingerprint,
)
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class MemoryCures(msgspec.Struct, frozen=True, kw_only=True):
    """What to change where memory does not suffice, by the names that the configuration has for it."""

    batches: str = "lower ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu, or data.max_response_length"
    """For passes with gradients."""
    passes: str = "lower ppo_max_token_len_per_gpu, or data.max_response_length"
    """For passes without."""
    state: str = "train adapters alone (actor_rollout_ref.model.lora_rank=16) or share the model out (actor_rollout_ref.actor.strategy=fsdp2)"
    """For weights, gradients and moments."""


class LocalBackendOptions(AdamWOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the backend needs to know besides the model; names follow `actor_rollout_ref.actor`."""

    device: str = "auto"
    """Resolved by `ostinato_engines.device.pick_device`."""
    dtype: str = "float32"
    """What the model computes in. With bfloat16 the weights, their gradients' sums and moments stay float32: 8 bits of mantissa
    would swallow small steps. float64 is for verification."""
    keep_reference: bool = False
    """Keep the model as it is at construction, the reference of a KL term: a frozen copy, or with adapters the model without them."""
    lora: LoraOptions | None = None
    """Train adapters only and leave the model's own weights as they are."""
    max_tokens_per_forward: int = 16384
    """Tokens of one forward pass in `log_probs`, which needs no gradient; a longer sequence goes alone."""
    use_remove_padding: bool = True
    """Pack sequences into one row where the model's attention can; false pads them."""
    use_torch_compile: bool | None = False
    """Let torch.compile fuse the model's layers and what happens to logits; see `resolve_compile`."""
    engine: EngineShare = EngineShare()
    """What an engine takes of the same device."""
    cures: MemoryCures = MemoryCures()
    """What messages about memory say."""
    path_key: str = "actor_rollout_ref.model.path"
    """What messages about the model's files name."""

    def check(self) -> None:
        """Raises BackendError where a value is out of range."""
        if self.dtype not in _DTYPES:
            raise BackendError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}; float32 is safe")
        super().check()

    @property
    def autocast(self) -> torch.dtype | None:
        """What the model computes in where that is not its parameters' type."""
        return torch.bfloat16 if self.dtype == "bfloat16" else None

    @property
    def parameter_dtype(self) -> torch.dtype:
        """What weights and moments are kept in."""
        return torch.float32 if self.autocast else _DTYPES[self.dtype]


class LocalBackend:
    """AdamW on a Hugging Face causal language model; see `TrainingBackend` for the methods' contract."""

    def __init__(
        self, model: Any, options: LocalBackendOptions | None = None, *, tokenizer_source: str | Path | None = None
    ) -> None:
        """
        Args:
            model: A `transformers` causal language model; it is moved to the device and trained in place.
            options: See `LocalBackendOptions`.
            tokenizer_source: Folder or hub id whose tokenizer files `save_hf` copies.

        Raises:
            BackendError: an option is out of range, or layers are to be compiled where they cannot be.
            OutOfMemoryError: the device is too small for the model's state.
        """
        self.options = options or LocalBackendOptions()
        self.options.check()
        self._device = torch.device(pick_device(self.options.device))
        self._compiled = resolve_compile(self.options.use_torch_compile, self._device)
        cures = self.options.cures
        check_state_fits(state_size(model, self.options), self._device, cures=cures.state, engine=self.options.engine)
        with out_of_memory_named("the model's weights", cures.state):
            model = model.to(self._device, self.options.parameter_dtype)
            self._lora = None if self.options.lora is None else LoraAdapters(model, self.options.lora)
            self._lm = self._wrapped(model)
            self._reference: CausalLM | None = None
            if self.options.keep_reference:
                without_adapters = self._lora is None
                self._reference = (
                    self._wrapped(copy.deepcopy(model).requires_grad_(False)) if without_adapters else self._lm
                )
        self._frozen = self._frozen_fingerprint()
        self._tokenizer_source = tokenizer_source
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.optimizer = AdamW(trained, self.options)
        self.memory = MemoryOwner(self._device, self._held_memory)
        """Whose memory messages speak of."""
        self.policy_version = 0
        """Optimizer steps that changed the weights."""

    @classmethod
    def from_pretrained(cls, path: str | Path, options: LocalBackendOptions | None = None) -> LocalBackend:
        """Loads the model of a folder or hub id; its tokenizer files travel into what `save_hf` writes.

        Raises:
            BackendError: the path holds no model that can be loaded, or an option is out of range.
            OutOfMemoryError: the device is too small for the model's state.
        """
        options = options or LocalBackendOptions()
        options.check()
        model = load_causal_lm(path, dtype=options.parameter_dtype, device=torch.device(HOST), key=options.path_key)
        return cls(model, options, tokenizer_source=path)

    def _wrapped(self, model: Any) -> CausalLM:
        return CausalLM(
            model,
            autocast=self.options.autocast,
            remove_padding=self.options.use_remove_padding,
            compiled=self._compiled,
        )

    @property
    def model(self) -> Any:
        """The `transformers` model under training."""
        return self._lm.model

    @property
    def pads_sequences(self) -> bool:
        """See `TrainingBackend.pads_sequences`."""
        return self._lm.layout is Layout.PADDED

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = EntropyMode.OFF,
    ) -> dict[str, float]:
        """See `TrainingBackend.forward_backward`. A micro-batch without a trained token costs nothing.

        Raises:
            OutOfMemoryError: memory ran out.
            BackendError: the loss has no gradient, or the temperature is not positive.
            BatchError: a token id lies outside the vocabulary.
        """
        check_temperature(temperature)

        def loss_of(micro_batch: Batch) -> LossOutput:
            check_ids(micro_batch, self._lm.vocab_size)
            on_device = micro_batch.to(self._device, self._lm.dtype)
            log_probs, spread = self._lm.log_probs(
                on_device, micro_batch.loss_mask, temperature=temperature, entropy=entropy
            )
            return loss_fn(MicroBatchOutput(log_probs, spread), on_device)

        cures = self.options.cures.batches
        return accumulate_gradients(micro_batches, loss_of, self.optimizer, cures=cures, owner=self.memory)

    @torch.no_grad()
    def log_probs(
        self, batch: Batch, *, temperature: float, reference: bool = False, loss_tokens_only: bool = False
    ) -> Tensor:
        """See `TrainingBackend.log_probs`.

        Args:
            batch: Any sequences.
            temperature: What the tokens were sampled at.
            reference: Ask the frozen copy instead of the policy.
            loss_tokens_only: Leave 0 outside the loss mask, which spares the output layer's work there.

        Raises:
            OutOfMemoryError: memory ran out.
            BackendError: no reference is kept, or the temperature is not positive.
            BatchError: a token id lies outside the vocabulary.
        """
        check_temperature(temperature)
        check_ids(batch, self._lm.vocab_size)
        model = self._reference if reference else self._lm
        if model is None:
            raise BackendError(
                "keep_reference must be true for log-probabilities of the reference, got false; set use_kl_loss"
            )
        wanted = tokens_to_score(batch, loss_tokens_only=loss_tokens_only)
        result = torch.zeros(batch.num_tokens, dtype=torch.promote_types(self._lm.dtype, torch.float32))
        base_only = self._lora.off() if reference and self._lora is not None else nullcontext()
        cures = self.options.cures.passes
        with base_only:
            for chosen in batch.token_chunks(self.options.max_tokens_per_forward, padded=self.pads_sequences):
                part, tokens = batch.select(chosen), batch.token_positions(chosen)
                with out_of_memory_named("log-probabilities", cures, owner=self.memory, batches=[part]):
                    log_probs, _ = model.log_probs(part.to(self._device), wanted[tokens], temperature=temperature)
                    result[tokens] = log_probs.to(result)
        return result

    def optimizer_step(self) -> OptimizerStats:
        """See `TrainingBackend.optimizer_step`. The schedule moves on even where the step is skipped, so step k
        always has rate k.

        Raises:
            OutOfMemoryError: memory ran out.
        """
        with out_of_memory_named("an optimizer step", self.options.cures.state, owner=self.memory):
            stats = self.optimizer.step()
        if not stats.skipped:
            self.policy_version += 1
        return stats

    def weights(
        self, *, version: int | None = None
    ) -> tuple[WeightManifest, Callable[[], Iterable[tuple[str, Tensor]]]]:
        """See `TrainingBackend.weights`. The stream shows the tensors as they are while it is read: take no step
        meanwhile.

        Args:
            version: What to call these weights; the policy version by default.
        """
        tensors, lora = self._lm.named_tensors(), self._lora
        named = tensors if lora is None else lora.base_tensors(tensors)
        manifest = WeightManifest.from_tensors(self.policy_version if version is None else version, named.items())
        if lora is not None and self._frozen is not None:
            manifest = lora.manifest_of(manifest, self._frozen)

        def stream() -> Iterator[tuple[str, Tensor]]:
            if lora is not None:
                yield from lora.merged(tensors)
                return
            for name, tensor in tensors.items():
                yield name, tensor.detach()

        return manifest, stream

    def save(self, directory: str | Path) -> None:
        """See `TrainingBackend.save`. Safetensors and JSON: nothing in it can run code.

        Raises:
            OSError: the directory cannot be written.
        """
        self._state().save(directory)

    def snapshot(self) -> LocalSnapshot:
        """The state of now in memory of the host, three times the weights, to be written while training goes on."""
        return self._snapshot(self._state().copied())

    def load(self, directory: str | Path) -> None:
        """See `TrainingBackend.load`. The reference stays the model that the backend was made with, which must be the one of that run.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model; nothing has changed then.
        """
        weights, moments, state = read_whole(Path(directory))
        tensors = self._trained_tensors()
        check_matches(directory, weights, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        check_frozen(directory, state.frozen, self._frozen)
        self.optimizer.load(moments, num_steps=state.num_steps, num_skipped=state.num_skipped, source=directory)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(weights[name])
        self.policy_version = state.policy_version

    def save_hf(self, directory: str | Path) -> None:
        """See `TrainingBackend.save_hf`."""
        self._snapshot(self._state()).save_hf(directory)

    def free_cached_memory(self) -> None:
        """See `TrainingBackend.free_cached_memory`."""
        empty_cache(self._device)

    def close(self) -> None:
        """See `TrainingBackend.close`: there is nothing to end."""

    def _held_memory(self) -> HeldMemory:
        kept = None if self._reference is None or self._reference is self._lm else self._reference
        return held_memory(
            self._device,
            self._lm.model.parameters(),
            optimizer=self.optimizer.moments().values(),
            reference=() if kept is None else kept.model.parameters(),
        )

    def _trained_tensors(self) -> Mapping[str, Tensor]:
        """What training may change: all tensors of the model, or the adapters alone."""
        return self._lm.named_tensors() if self._lora is None else self._lora.parameters()

    def _frozen_fingerprint(self) -> str | None:
        """Of the model as it was loaded, where adapters or a reference need it to stay."""
        if self._lora is None and self._reference is None:
            return None
        tensors = self._lm.named_tensors()
        return fingerprint(tensors if self._lora is None else self._lora.base_tensors(tensors))

    def _snapshot(self, state: ModelState) -> LocalSnapshot:
        return LocalSnapshot(state, self._lm, self._tokenizer_source, self._lora, self._lm.named_tensors())

    def _state(self) -> ModelState:
        counters = BackendState(
            num_steps=self.optimizer.num_steps,
            num_skipped=self.optimizer.num_skipped,
            policy_version=self.policy_version,
            frozen=self._frozen,
        )
        return ModelState(self._trained_tensors(), self.optimizer.moments(), counters)


def state_size(model: Any, options: LocalBackendOptions, *, num_shares: int = 1) -> StateSize:
    """The least that a model's state takes on each device, from a model that may be without memory.

    Args:
        model: As it is loaded; of adapters, which come later, nothing is known.
        options: What it will be kept in.
        num_shares: Devices that share it out evenly.
    """
    size = sum(value.numel() for value in model.parameters()) * options.parameter_dtype.itemsize // num_shares
    if options.lora is not None:
        return StateSize(parameters=size, gradients=0, moments=0)
    return StateSize(parameters=size * (2 if options.keep_reference else 1), gradients=size, moments=2 * size)


@dataclass(frozen=True)
class LocalSnapshot:
    """A `LocalBackend` as it was at one moment; it is saved by the same names, in whatever thread."""

    state: ModelState
    lm: CausalLM
    tokenizer_source: str | Path | None
    lora: LoraAdapters | None
    tensors: Mapping[str, Tensor]
    """The model's own, of which adapters leave those of the base as they are; the model has others in their stead while it computes."""

    def save(self, directory: str | Path) -> None:
        """See `TrainingBackend.save`."""
        self.state.save(directory)

    def save_hf(self, directory: str | Path) -> None:
        """See `TrainingBackend.save_hf`. With adapters the weights are merged, and the adapters alone lie in `lora_adapter` below."""
        weights = self.state.weights
        if self.lora is not None:
            merged = self.lora.merged(self.tensors, adapters=weights)
            weights = {name: tensor.cpu() for name, tensor in merged}  # the device holds one merged tensor at a time
            self.lora.save(Path(directory) / LORA_FOLDER, adapters=self.state.weights)
        self.lm.save_hf(Path(directory), tokenizer_source=self.tokenizer_source, weights=weights)
