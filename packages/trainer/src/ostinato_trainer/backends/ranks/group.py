"""`RankGroup`: a `TrainingBackend` made of ranks.

Invariants: a batch's results do not depend on the number of ranks beyond the order of sums; every sequence goes to exactly one data rank; all ranks
get equally many micro-batches; and what the ranks say of a step is the same, or the run ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from ostinato_engines import WeightManifest
from ostinato_trainer.backends.base import EntropyMode, LossFn, OptimizerStats
from ostinato_trainer.backends.model_passes import check_temperature, merge_metrics
from ostinato_trainer.backends.ranks.base import RankFactory
from ostinato_trainer.backends.ranks.calls import RankCalls
from ostinato_trainer.backends.ranks.critic import RankGroupCritic
from ostinato_trainer.backends.ranks.weights import Meeting, RankWeights
from ostinato_trainer.backends.ranks.workers import RankWorkers
from ostinato_trainer.batch import Batch


class RankGroup:
    """The ranks as one backend; see `TrainingBackend` for the methods' contract.

    Args:
        workers: Where the ranks run; they are started here, and the group ends them.
        factory: Builds a rank's backend there.
        max_tokens_per_forward: Tokens of one forward pass of one rank in `log_probs`.

    Raises:
        BackendError: a rank could not be started, or the ranks disagree about their layout. None is left running.
    """

    def __init__(self, workers: RankWorkers, factory: RankFactory, *, max_tokens_per_forward: int = 16384) -> None:
        self._workers, self._max_tokens, self._streams = workers, max_tokens_per_forward, itertools.count()
        self._meeting = Meeting(workers.address_for)
        try:
            workers.start(factory)
            self._calls = RankCalls(workers)
            self._pads: bool = self._calls.ask("pads_sequences")[0]
            self.policy_version: int = self._calls.ask("policy_version")[0]
            self._weight_places = self._calls.ask("weight_place")
        except BaseException:
            workers.close()
            raise

    @property
    def num_ranks(self) -> int:
        return len(self._calls.places)

    @property
    def pads_sequences(self) -> bool:
        """See `TrainingBackend.pads_sequences`."""
        return self._pads

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = EntropyMode.OFF,
    ) -> dict[str, float]:
        """See `TrainingBackend.forward_backward`. The loss travels, so it must be something that can be pickled; micro-batches are cut smaller,
        between trajectories, where ranks would have nothing to do.

        Raises:
            BackendError: a rank failed or died, the loss cannot travel, or the temperature is not positive.
            BatchError: a token id lies outside the vocabulary.
        """
        check_temperature(temperature)
        trained = [micro_batch for micro_batch in micro_batches if micro_batch.num_loss_tokens]
        if not trained:
            return {}
        shares = self._calls.dealt(trained, padded=self._pads)
        answers = self._calls.with_data("forward_backward", shares, loss_fn, temperature, entropy)
        totals: dict[str, float] = {}
        for answer in answers.values():
            merge_metrics(totals, answer)
        return totals

    def log_probs(
        self, batch: Batch, *, temperature: float, reference: bool = False, loss_tokens_only: bool = False
    ) -> Tensor:
        """See `TrainingBackend.log_probs`; arguments and errors as `LocalBackend.log_probs`."""
        check_temperature(temperature)
        asked = temperature, reference, loss_tokens_only
        return self._calls.by_token("log_probs", batch, *asked, max_tokens=self._max_tokens, padded=self._pads)

    def optimizer_step(self) -> OptimizerStats:
        """See `TrainingBackend.optimizer_step`.

        Raises:
            BackendError: a rank failed or died, or the ranks did not do the same.
        """
        stats = self._calls.step("optimizer_step")
        if not stats.skipped:
            self.policy_version += 1
        return stats

    def weights(self, *, version: int | None = None) -> tuple[WeightManifest, RankWeights]:
        """See `TrainingBackend.weights`. The ranks send to the engines' workers where those can be reached, and to others through this process:
        they gather a few tensors at a time, when they are asked for; several streams may be read at a time. A tensor is good until the next
        is taken."""
        manifest: WeightManifest = self._calls.ask("manifest", self.policy_version if version is None else version)[0]

        def stream() -> Iterator[tuple[str, Tensor]]:
            number = next(self._streams)
            self._calls.ask("open_weights", number)
            while (tensors := self._calls.ask("next_weights", number)[0]) is not None:
                yield from tensors
                del tensors  # the rank has their memory again before it makes the next ones

        return manifest, RankWeights(self._calls, self._weight_places, self._meeting, stream)

    def save(self, directory: str | Path) -> None:
        """See `TrainingBackend.save`. All ranks write into the directory, which they must share.

        Raises:
            OSError: the directory cannot be written.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._calls.ask("save", Path(directory).absolute())

    def load(self, directory: str | Path) -> None:
        """See `TrainingBackend.load`; the group that wrote it may have had another number of ranks.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model; nothing has changed then.
        """
        self._calls.ask("load", Path(directory).absolute())
        self.policy_version = self._calls.ask("policy_version")[0]

    def save_hf(self, directory: str | Path) -> None:
        """See `TrainingBackend.save_hf`."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._calls.ask("save_hf", Path(directory).absolute())

    def free_cached_memory(self) -> None:
        """See `TrainingBackend.free_cached_memory`."""
        self._calls.ask("free_cached_memory")

    def critic(self, *, max_tokens_per_forward: int) -> RankGroupCritic:
        """The critic that the ranks have beside the policy; it ends with the group. `max_tokens_per_forward` as above, for values."""
        return RankGroupCritic(self._calls, max_tokens_per_forward=max_tokens_per_forward)

    def close(self) -> None:
        """Ends the ranks; may be called twice."""
        self._workers.close()
