"""`MegatronRank`: one rank of a policy trained with Megatron-core: tensor, pipeline and data parallel, sequences packed.

Invariants: ranks of one share of the data get the same micro-batches and do the same; gradients of a step are summed over data ranks once, in
`optimizer_step`; and weights, moments and names are those of the Hugging Face model, whatever the layout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from ostinato_engines import TensorSpec, WeightManifest
from ostinato_engines.device import HOST
from ostinato_trainer.backends.base import EntropyMode, LossFn, MicroBatchOutput, OptimizerStats
from ostinato_trainer.backends.causal_lm import copy_tokenizer
from ostinato_trainer.backends.megatron import core, files
from ostinato_trainer.backends.megatron.mapping import Block
from ostinato_trainer.backends.megatron.optimizer import MASTER, STATE_KEYS, ShardedOptimizer
from ostinato_trainer.backends.megatron.options import MegatronOptions
from ostinato_trainer.backends.megatron.pretrained import PretrainedTensors, model_config, rotary_frequencies
from ostinato_trainer.backends.megatron.shape import DecoderShape
from ostinato_trainer.backends.megatron.tensors import ModelTensors
from ostinato_trainer.backends.memory import (
    HeldMemory,
    MemoryOwner,
    StateSize,
    check_state_fits,
    held_memory,
    out_of_memory_named,
)
from ostinato_trainer.backends.model_passes import (
    check_ids,
    check_temperature,
    merge_metrics,
    tokens_to_score,
)
from ostinato_trainer.backends.ranks.agreement import raise_alike
from ostinato_trainer.backends.ranks.base import RankCritic, RankPlace
from ostinato_trainer.backends.state import BackendState, check_frozen, fingerprint
from ostinato_trainer.backends.token_log_probs import VocabularyShard, chosen_log_probs_of_shard
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError, BatchError, CheckpointError, OutOfMemoryError
from ostinato_trainer.home_paths import home_path

_BATCH_CURES: Final = (
    "lower ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu, or data.max_response_length, write "
    "model.enable_gradient_checkpointing=true, or split the model over more ranks"
)
_PASS_CURES: Final = "lower ppo_max_token_len_per_gpu, or data.max_response_length"
_STATE_CURES: Final = (
    "split the model over more ranks (actor.megatron.tensor_model_parallel_size, pipeline_model_parallel_size) or give it more devices "
    "(trainer.nnodes, trainer.n_gpus_per_node)"
)


class MegatronRank:
    """See `RankBackend` for the methods' contract."""

    critic: RankCritic | None = None
    """There is none."""

    def __init__(
        self, path: str | Path, options: MegatronOptions, *, device: torch.device, timeout_s: float = 600.0
    ) -> None:
        """
        Args:
            path: Folder or hub id of the model, which all ranks read.
            options: See `MegatronOptions`.
            device: Of this rank; the default process group stands.
            timeout_s: How long a collective may wait.

        Raises:
            BackendError: an option is out of range, the device is none for Megatron, the model is not mapped, it or the ranks do not divide, or its
                weights cannot be read.
        """
        options.check()
        core.check_device(device)
        folder = home_path(path, "actor_rollout_ref.model.path", BackendError)
        path = folder if folder.is_dir() else path
        config = model_config(path)
        self._shape = DecoderShape.from_config(config.to_dict())
        options.layout.check(self._shape, dist.get_world_size())
        self.options, self._path, self._config, self._device = options, path, config, device
        self._groups = core.join_groups(options.layout, timeout_s=timeout_s)
        self._tensors = ModelTensors(self._shape, options.layout, self._groups, device)
        pretrained = PretrainedTensors(path)
        self._check_memory()
        with out_of_memory_named("the model's weights", _STATE_CURES):
            self._model = self._loaded(pretrained)
            self._reference, self._frozen = None, None
            if options.keep_reference:
                self._reference = self._loaded(pretrained).requires_grad_(False)
                self._frozen = self._fingerprint(pretrained)
            names = {part.parameter: part.names[0] for block in self._tensors.own_blocks for part in block.parts}
            self.optimizer = ShardedOptimizer(self._model, options, self._groups, names)
        if options.parameter_dtype is not torch.float32:
            self._set_exact_weights(pretrained)
        self.memory = MemoryOwner(device, self._held_memory)
        """Whose memory messages speak of."""
        self.policy_version = 0
        """Optimizer steps that changed the weights."""

    def _check_memory(self) -> None:
        """Refuses, on all ranks alike, a share of the model that no device of this size holds."""
        options, groups = self.options, self._groups
        size = sum(math.prod(shape) for block in self._tensors.own_blocks for _, shape in block.tensors)
        size //= options.layout.tensor_model_parallel_size
        num_sharded = (
            2 if options.parameter_dtype == torch.float32 else 3
        )  # the moments, and the float32 weights where others compute
        state = StateSize(
            parameters=size * options.parameter_dtype.itemsize * (2 if options.keep_reference else 1),
            gradients=4 * size,
            moments=4 * size * num_sharded // groups.data_size,
        )
        error: Exception | None = None
        try:
            check_state_fits(state, self._device, cures=_STATE_CURES)
        except OutOfMemoryError as failure:
            error = failure
        raise_alike(error)

    def _held_memory(self) -> HeldMemory:
        return held_memory(
            self._device,
            self._model.parameters(),
            optimizer=self.optimizer.state_tensors(),
            reference=() if self._reference is None else self._reference.parameters(),
        )

    @property
    def place(self) -> RankPlace:
        """See `RankBackend.place`; the last stage has the results."""
        return RankPlace(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            data_index=self._groups.data_rank,
            data_size=self._groups.data_size,
            reports=self._groups.is_last_stage and self._groups.tensor_rank == 0,
        )

    @property
    def pads_sequences(self) -> bool:
        """Sequences are packed."""
        return False

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = EntropyMode.OFF,
    ) -> dict[str, float]:
        """See `RankBackend.forward_backward`. A micro-batch without a trained token costs nothing: nothing waits for it, because data ranks meet
        in `optimizer_step` only.

        Raises:
            OutOfMemoryError: memory ran out.
            BackendError: the loss has no gradient, or the temperature is not positive.
            BatchError: a token id lies outside the vocabulary, or positions are given.
        """
        check_temperature(temperature)
        trained = [self._checked(each) for each in micro_batches if each.num_loss_tokens]
        if not trained:
            return {}

        def step(stage: nn.Module, micro_batch: Batch) -> tuple[Tensor, Callable[[Tensor], Any]]:
            on_device = micro_batch.to(self._device, torch.float32)

            def loss_of(states: Tensor) -> tuple[Tensor, Tensor, Any]:
                log_probs, spread = self._log_probs(
                    self._model, states, on_device, on_device.loss_mask, temperature, entropy
                )
                loss, metrics = loss_fn(MicroBatchOutput(log_probs, spread), on_device)
                if not loss.requires_grad:
                    raise BackendError(
                        "loss must depend on the log-probabilities or values, got a constant; do not detach them in the loss"
                    )
                kept = {name: value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}
                return loss, torch.ones((), dtype=torch.int, device=self._device), kept

            return core.states_of(stage, on_device), loss_of

        totals: dict[str, Any] = {}
        try:
            with out_of_memory_named("an update", _BATCH_CURES, owner=self.memory, batches=trained):
                for metrics in core.run_schedule(self.optimizer.model, trained, step, forward_only=False):
                    merge_metrics(totals, metrics)
        except BaseException:
            self.optimizer.clear_gradients()
            raise
        self.optimizer.mark_gradient()
        return {name: float(value) for name, value in totals.items()}

    @torch.no_grad()
    def log_probs(
        self,
        micro_batches: Sequence[Batch],
        *,
        temperature: float,
        reference: bool = False,
        loss_tokens_only: bool = False,
    ) -> list[Tensor]:
        """See `RankBackend.log_probs`; the last stage answers, the others with nothing.

        Raises:
            OutOfMemoryError: memory ran out.
            BackendError: no reference is kept, or the temperature is not positive.
            BatchError: a token id lies outside the vocabulary, or positions are given.
        """
        check_temperature(temperature)
        model = self._reference if reference else self._model
        if model is None:
            raise BackendError(
                "keep_reference must be true for log-probabilities of the reference, got false; set use_kl_loss"
            )
        if not micro_batches:
            return []

        def step(stage: nn.Module, micro_batch: Batch) -> tuple[Tensor, Callable[..., Tensor]]:
            on_device = micro_batch.to(self._device)
            wanted = tokens_to_score(on_device, loss_tokens_only=loss_tokens_only)

            def answer(states: Tensor, non_loss_data: bool = True) -> Tensor:
                return self._log_probs(model, states, on_device, wanted, temperature, EntropyMode.OFF)[0].cpu()

            return core.states_of(stage, on_device), answer

        with out_of_memory_named("log-probabilities", _PASS_CURES, owner=self.memory, batches=micro_batches):
            return core.run_schedule(model, [self._checked(each) for each in micro_batches], step, forward_only=True)

    def optimizer_step(self) -> OptimizerStats:
        """See `RankBackend.optimizer_step`."""
        with out_of_memory_named("an optimizer step", _STATE_CURES, owner=self.memory):
            stats = self.optimizer.step()
        if not stats.skipped:
            self.policy_version += 1
        return stats

    def manifest(self, version: int) -> WeightManifest:
        """See `RankBackend.manifest`."""
        return WeightManifest(
            version,
            tuple(
                TensorSpec(name, shape, self.options.dtype)
                for block in self._tensors.blocks
                for name, shape in block.tensors
            ),
        )

    def weights(self) -> Iterator[list[tuple[str, Tensor]]]:
        """See `RankBackend.weights`: a layer at a time."""
        parameters = self.optimizer.parameters
        for block in self._tensors.blocks:
            yield self._tensors.on_first_rank(
                block, lambda part: parameters[part.parameter], self.options.parameter_dtype
            )

    def save(self, directory: Path) -> None:
        """See `RankBackend.save` and `ostinato_trainer.backends.megatron.files`; each stage writes its own layers.

        Raises:
            OSError: the directory cannot be written; on all ranks alike.
        """
        keys = STATE_KEYS if self.optimizer.num_updates else STATE_KEYS[:1]
        error: Exception | None = None
        for block in self._tensors.own_blocks:
            state = {key: self._on_host(block, key) for key in keys}
            if self._tensors.speaks_for_stage and error is None:
                try:
                    files.write_block(directory, block, state)
                except (OSError, SafetensorError) as failure:
                    error = OSError(f"{block.name} could not be written to {directory}: {failure}")
        raise_alike(error)
        if dist.get_rank() == 0:
            try:
                files.write_counters(directory, self._counters())
            except OSError as failure:
                error = failure
        raise_alike(error)

    def load(self, directory: Path) -> None:
        """See `RankBackend.load`. Any layout reads what any other wrote; the reference stays the model that the rank was made with, which must be
        the one of that run.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model; nothing has changed then, on any rank.
        """
        error: Exception | None = None
        try:
            counters = files.read_counters(directory)
            check_frozen(directory, counters.frozen, self._frozen)
            for block in self._tensors.blocks:
                files.check_block(directory, block, has_moments=_num_updates(counters) > 0)
        except (CheckpointError, OSError) as failure:
            error = failure
        raise_alike(error)
        counters = files.read_counters(directory)
        num_updates = _num_updates(counters)
        for block in self._tensors.own_blocks:
            for part in block.parts:
                source = self._tensors.blocks[0] if part.alias else block  # an alias is a copy of the embedding
                whole = files.read_block(directory, source, part.names, has_moments=num_updates > 0)
                state = {key: self._tensors.own_share(part, tensors) for key, tensors in whole.items()}
                self.optimizer.set_state(part.parameter, state, num_updates)
        self.optimizer.set_counters(num_steps=counters.num_steps, num_skipped=counters.num_skipped)
        self.policy_version = counters.policy_version

    def save_hf(self, directory: Path) -> None:
        """See `RankBackend.save_hf`; weights are of the type that is computed in.

        Raises:
            OSError: the directory cannot be written; on all ranks alike.
        """
        tensors, error = self.weights(), None
        if dist.get_rank() == 0:
            try:
                self._write_hf(directory, tensors)
            except (OSError, SafetensorError) as failure:
                error = OSError(f"the model could not be written to {directory}: {failure}")
        for _ in tensors:  # the ranks walk the blocks together, whoever has use for them
            pass
        raise_alike(error)

    def _write_hf(self, directory: Path, tensors: Iterator[list[tuple[str, Tensor]]]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        size = self.options.parameter_dtype.itemsize
        files.write_hf_weights(
            directory, tensors, sum(size * math.prod(spec.shape) for spec in self.manifest(0).tensors)
        )
        self._config.dtype = self.options.parameter_dtype
        self._config.save_pretrained(directory)
        files.copy_generation_config(self._path, directory)
        copy_tokenizer(self._path, directory)

    def _on_host(self, block: Block, key: str) -> list[tuple[str, Tensor]]:
        """The whole tensors of one of `STATE_KEYS` of a block, on the rank that speaks for the stage; nothing elsewhere."""
        shares = {part: self.optimizer.state_of(part.parameter, key) for part in block.parts if not part.alias}
        if self._groups.data_rank != 0:
            return []
        return [(name, tensor.to(HOST)) for name, tensor in self._tensors.gathered(block, shares.__getitem__)]

    def _fingerprint(self, pretrained: PretrainedTensors) -> str:
        """Of the weights of the whole model, whatever the layout; see `state.fingerprint`."""
        own = {}
        for block in self._tensors.own_blocks:
            whole = pretrained.of_block(block)
            own[block.name] = fingerprint(
                {name: whole[name].to(self.options.parameter_dtype) for name, _ in block.tensors}
            )
        found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, own)
        lines = sorted({f"{name} {digest}\n" for each in found for name, digest in each.items()})
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()

    def _loaded(self, pretrained: PretrainedTensors) -> Any:
        """This rank's part of the model with its weights."""
        model = core.build_model(
            self._shape,
            self.options.layout,
            self._groups,
            dtype=self.options.parameter_dtype,
            device=self._device,
            frequencies=rotary_frequencies(self._config),
            recompute=self.options.enable_gradient_checkpointing,
        )
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for block in self._tensors.own_blocks:
                whole = pretrained.of_block(block)
                for part in block.parts:
                    parameters.pop(part.parameter).copy_(self._tensors.own_share(part, whole))
        assert not parameters, f"unmapped parameters: {sorted(parameters)}"
        return model

    def _set_exact_weights(self, pretrained: PretrainedTensors) -> None:
        """Gives the optimizer the weights as the folder has them. Rounded to 16 bits they would all lie on that type's grid, where steps shorter
        than half its spacing change nothing that is computed."""
        for block in self._tensors.own_blocks:
            whole = pretrained.of_block(block)
            for part in block.parts:
                self.optimizer.set_state(part.parameter, {MASTER: self._tensors.own_share(part, whole)}, 0)

    def _log_probs(
        self,
        model: Any,
        states: Tensor,
        batch: Batch,
        wanted: Tensor,
        temperature: float,
        entropy: EntropyMode,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies, float32 [T], of the tokens wanted; 0 without a gradient elsewhere."""
        tokens = wanted.nonzero().squeeze(-1)
        weight = core.output_weight(model)
        chosen, spread = chosen_log_probs_of_shard(
            states.squeeze(1).index_select(0, tokens - 1),
            batch.token_ids[tokens],
            weight,
            shard=VocabularyShard(self._groups.tensor_group, self._groups.tensor_rank * weight.shape[0]),
            temperature=temperature,
            entropy=entropy,
        )
        blank = chosen.new_zeros(batch.num_tokens)
        return blank.index_copy(0, tokens, chosen), None if spread is None else blank.index_copy(0, tokens, spread)

    def _checked(self, batch: Batch) -> Batch:
        check_ids(batch, self._shape.vocab_size)
        if batch.position_ids is not None:
            raise BatchError(
                "position_ids must be absent to be trained on with Megatron, where positions count from 0 in every sequence, got some; "
                "use actor_rollout_ref.actor.strategy=fsdp2 or local"
            )
        return batch

    def _counters(self) -> BackendState:
        return BackendState(
            num_steps=self.optimizer.num_steps,
            num_skipped=self.optimizer.num_skipped,
            policy_version=self.policy_version,
            frozen=self._frozen,
        )


def _num_updates(counters: BackendState) -> int:
    return counters.num_steps - counters.num_skipped
