"""`MegatronRank`: one rank of a policy trained with Megatron-core: tensor, pipeline and data parallel, sequences packed; beside it a critic, where
there is one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ostinato_engines import TensorSpec, WeightManifest
from ostinato_trainer.backends.base import EntropyMode, LossFn, LossOutput, MicroBatchOutput, OptimizerStats
from ostinato_trainer.backends.megatron import core, files
from ostinato_trainer.backends.megatron.critic import MegatronCritic
from ostinato_trainer.backends.megatron.options import MegatronOptions
from ostinato_trainer.backends.megatron.pretrained import PretrainedTensors, model_config, rotary_frequencies
from ostinato_trainer.backends.megatron.shape import DecoderShape
from ostinato_trainer.backends.megatron.training import MegatronTraining, ModelSource
from ostinato_trainer.backends.model_folder import copy_generation_config, copy_tokenizer
from ostinato_trainer.backends.model_passes import check_temperature, tokens_to_score
from ostinato_trainer.backends.ranks.agreement import raise_alike
from ostinato_trainer.backends.ranks.base import RankCritic, RankPlace
from ostinato_trainer.backends.state import fingerprint
from ostinato_trainer.backends.token_log_probs import VocabularyShard, chosen_log_probs_of_shard
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError
from ostinato_trainer.home_paths import home_path


class MegatronRank:
    """See `RankBackend` for the methods' contract."""

    def __init__(
        self,
        path: str | Path,
        options: MegatronOptions,
        *,
        device: torch.device,
        timeout_s: float = 600.0,
        critic: tuple[str, MegatronOptions] | None = None,
    ) -> None:
        """
        Args:
            path: Folder or hub id of the model, which all ranks read.
            options: See `MegatronOptions`.
            device: Of this rank; the default process group stands.
            timeout_s: How long a collective may wait.
            critic: Folder or hub id and options, of the same layout, of a critic that is trained beside it.

        Raises:
            BackendError: an option is out of range, the device is none for Megatron, the model is not mapped, it or the ranks do not divide, or its
                weights cannot be read.
            OutOfMemoryError: the device is too small for the model's state.
        """
        options.check()
        core.check_device(device)
        folder = home_path(path, "actor_rollout_ref.model.path", BackendError)
        path = folder if folder.is_dir() else path
        config = model_config(path)
        shape = DecoderShape.from_config(config.to_dict())
        options.layout.check(shape, dist.get_world_size())
        self.options, self._path, self._config = options, path, config
        self._groups = core.join_groups(options.layout, timeout_s=timeout_s)
        pretrained = PretrainedTensors(path)
        if shape.tied:
            pretrained.tie()
        source = ModelSource(pretrained, shape, rotary_frequencies(config))
        self.training = MegatronTraining(source, options, self._groups, device)
        """This rank's part of the model."""
        self._frozen = self._fingerprint(pretrained) if options.keep_reference else None
        self.policy_version = 0
        """Optimizer steps that changed the weights."""
        self.critic: RankCritic | None = None
        """This rank's part of the critic, where there is one."""
        if critic is not None:
            self.critic = MegatronCritic(*critic, self._groups, device)

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
        """See `RankBackend.forward_backward`. Errors as `MegatronTraining.accumulate`, and a BackendError where the temperature is not positive."""
        check_temperature(temperature)

        def loss_of(states: Tensor, batch: Batch) -> LossOutput:
            log_probs, spread = self._log_probs(
                self.training.model, states, batch, batch.loss_mask, temperature, entropy
            )
            return loss_fn(MicroBatchOutput(log_probs, spread), batch)

        return self.training.accumulate(micro_batches, loss_of)

    def log_probs(
        self,
        micro_batches: Sequence[Batch],
        *,
        temperature: float,
        reference: bool = False,
        loss_tokens_only: bool = False,
    ) -> list[Tensor]:
        """See `RankBackend.log_probs`. Errors as `MegatronTraining.answers`, and a BackendError where no reference is kept or the temperature is not
        positive."""
        check_temperature(temperature)
        model = self.training.reference if reference else self.training.model
        if model is None:
            raise BackendError(
                "keep_reference must be true for log-probabilities of the reference, got false; set use_kl_loss"
            )

        def answer_of(states: Tensor, batch: Batch) -> Tensor:
            wanted = tokens_to_score(batch, loss_tokens_only=loss_tokens_only)
            return self._log_probs(model, states, batch, wanted, temperature, EntropyMode.OFF)[0]

        return self.training.answers("log-probabilities", model, micro_batches, answer_of)

    def optimizer_step(self) -> OptimizerStats:
        """See `RankBackend.optimizer_step`."""
        stats = self.training.step()
        if not stats.skipped:
            self.policy_version += 1
        return stats

    def manifest(self, version: int) -> WeightManifest:
        """See `RankBackend.manifest`."""
        return WeightManifest(
            version,
            tuple(
                TensorSpec(name, shape, self.options.dtype)
                for block in self.training.tensors.blocks
                for name, shape in block.tensors
            ),
        )

    def weights(self, *, everywhere: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        """See `RankBackend.weights`: a layer at a time."""
        parameters, dtype = self.training.optimizer.parameters, self.options.parameter_dtype
        tensors = self.training.tensors
        for block in tensors.blocks:
            found = tensors.on_first_rank(block, lambda part: parameters[part.parameter], dtype)
            yield tensors.on_all_ranks(block, found, dtype) if everywhere else found
            del found

    def save(self, directory: Path) -> None:
        """See `RankBackend.save`. Errors as `MegatronTraining.save`."""
        self.training.save(directory, version=self.policy_version, frozen=self._frozen)

    def load(self, directory: Path) -> None:
        """See `RankBackend.load`. Errors as `MegatronTraining.load`."""
        self.policy_version = self.training.load(directory, frozen=self._frozen)

    def save_hf(self, directory: Path) -> None:
        """See `RankBackend.save_hf`; weights are of the type that is computed in.

        Raises:
            OSError: the directory cannot be written; on all ranks alike.
        """
        tensors, error = self.weights(), None
        if dist.get_rank() == 0:
            try:
                self._write_hf(directory, tensors)
            except Exception as failure:  # whatever it was, the other ranks must hear of it
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
        copy_generation_config(self._path, directory)
        copy_tokenizer(self._path, directory)

    def _fingerprint(self, pretrained: PretrainedTensors) -> str:
        """Of the weights of the whole model, whatever the layout; see `state.fingerprint`."""
        own = {}
        for block in self.training.tensors.own_blocks:
            whole = pretrained.of_block(block)
            own[block.name] = fingerprint(
                {name: whole[name].to(self.options.parameter_dtype) for name, _ in block.tensors}
            )
        found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, own)
        lines = sorted({f"{name} {digest}\n" for each in found for name, digest in each.items()})
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()

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
