"""`RankGroupCritic`: the critic of a group of ranks, which hold it beside the policy.

Invariants: as `RankGroup`'s. Its calls and the policy's reach the ranks one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from ostinato_trainer.backends.base import LossOutput, OptimizerStats
from ostinato_trainer.backends.model_passes import merge_metrics
from ostinato_trainer.backends.ranks.calls import RankCalls
from ostinato_trainer.batch import Batch


class RankGroupCritic:
    """See `ostinato_trainer.loop.parts.Critic` for the methods' contract.

    Args:
        calls: To ranks that have a critic.
        max_tokens_per_forward: Tokens of one forward pass in `values`.

    Raises:
        BackendError: the ranks have none.
    """

    def __init__(self, calls: RankCalls, *, max_tokens_per_forward: int) -> None:
        self._calls, self._max_tokens = calls, max_tokens_per_forward
        self._pads: bool = calls.ask("critic_pads_sequences")[0]

    @property
    def pads_sequences(self) -> bool:
        """See `Critic.pads_sequences`."""
        return self._pads

    def values(self, batch: Batch) -> Tensor:
        """See `Critic.values`.

        Raises:
            BackendError: a rank failed or died.
            BatchError: a token id lies outside the vocabulary.
        """
        return self._calls.by_token("critic_values", batch, max_tokens=self._max_tokens, padded=self._pads)

    def forward_backward(
        self, micro_batches: Sequence[Batch], loss_fn: Callable[[Tensor, Batch], LossOutput]
    ) -> dict[str, float]:
        """See `Critic.forward_backward`. The loss travels, so it must be something that can be pickled.

        Raises:
            BackendError: a rank failed or died, or the loss cannot travel.
            BatchError: a token id lies outside the vocabulary.
        """
        trained = [micro_batch for micro_batch in micro_batches if micro_batch.num_loss_tokens]
        if not trained:
            return {}
        shares = self._calls.dealt(trained, padded=self._pads)
        totals: dict[str, float] = {}
        for answer in self._calls.with_data("critic_forward_backward", shares, loss_fn).values():
            merge_metrics(totals, answer)
        return totals

    def optimizer_step(self) -> OptimizerStats:
        """See `Critic.optimizer_step`.

        Raises:
            BackendError: a rank failed or died, or the ranks did not do the same.
        """
        return self._calls.step("critic_optimizer_step")

    def save(self, directory: str | Path) -> None:
        """See `Critic.save`. All ranks write into the directory, which they must share.

        Raises:
            OSError: the directory cannot be written.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._calls.ask("critic_save", Path(directory).absolute())

    def load(self, directory: str | Path) -> None:
        """See `Critic.load`; the group that wrote it may have had another number of ranks.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model; nothing has changed then.
        """
        self._calls.ask("critic_load", Path(directory).absolute())
