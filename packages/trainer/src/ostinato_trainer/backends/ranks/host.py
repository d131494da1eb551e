"""`RankHost`: what stands inside a rank's process or actor: it joins the others, builds the backend and answers `RankWorkers.call`.

It knows nothing of how calls arrive. Weights are handed out one list at a time, because a call is what all ranks do together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from ostinato_engines import WeightManifest, WeightPlace
from ostinato_engines.device import CUDA, collect_shared_memory, empty_cache, place_of, set_device
from ostinato_engines.network import interface_towards
from ostinato_trainer.backends.base import EntropyMode, LossFn, LossOutput, OptimizerStats
from ostinato_trainer.backends.ranks.base import RankAddress, RankBackend, RankCritic, RankFactory, RankPlace
from ostinato_trainer.backends.ranks.outlets import SendOrder, WeightOutlets
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError

_INTERFACE: Final = "GLOO_SOCKET_IFNAME"


class RankHost:
    """One rank.

    Args:
        address: Where to join. This process must not have joined a process group before.
        factory: Builds the backend.

    Raises:
        BackendError: the ranks did not meet in time, or what the factory raises.
    """

    def __init__(self, address: RankAddress, factory: RankFactory) -> None:
        self._device = join(address)
        self._backend: RankBackend = factory(address, self._device)
        self._streams: dict[int, Iterator[list[tuple[str, Tensor]]]] = {}
        self._outlets = WeightOutlets(self._device)

    def place(self) -> RankPlace:
        """The rank's part in the layout."""
        return self._backend.place

    def pads_sequences(self) -> bool:
        """See `RankBackend.pads_sequences`."""
        return self._backend.pads_sequences

    def policy_version(self) -> int:
        """Optimizer steps that changed the weights."""
        return self._backend.policy_version

    def forward_backward(
        self, micro_batches: Sequence[Batch], loss_fn: LossFn, temperature: float, entropy: EntropyMode
    ) -> dict[str, float]:
        """See `RankBackend.forward_backward`."""
        return self._backend.forward_backward(micro_batches, loss_fn, temperature=temperature, entropy=entropy)

    def log_probs(
        self, micro_batches: Sequence[Batch], temperature: float, reference: bool, loss_tokens_only: bool
    ) -> list[Tensor]:
        """See `RankBackend.log_probs`; a rank that does not report answers with nothing."""
        results = self._backend.log_probs(
            micro_batches, temperature=temperature, reference=reference, loss_tokens_only=loss_tokens_only
        )
        return results if self._backend.place.reports else []

    def optimizer_step(self) -> OptimizerStats:
        """See `RankBackend.optimizer_step`."""
        self._streams.clear()
        return self._backend.optimizer_step()

    def manifest(self, version: int) -> WeightManifest:
        """See `RankBackend.manifest`."""
        return self._backend.manifest(version)

    def open_weights(self, stream: int) -> None:
        """Begins a stream of the weights under a number; several may be read at a time, each by replicas of its own. Those that nobody has read
        to their end are given up with the next change of the weights."""
        self._streams[stream] = self._backend.weights()

    def next_weights(self, stream: int) -> list[tuple[str, Tensor]] | None:
        """The next tensors of a stream, empty except on rank 0; None after the last, on all ranks alike.

        Raises:
            BackendError: no such stream is open.
        """
        if stream not in self._streams:
            raise BackendError(
                f"weights must be opened before they are read and read before they change, got a read of stream {stream}; open another"
            )
        tensors = next(self._streams[stream], None)
        if tensors is None:
            del self._streams[stream]
            collect_shared_memory(self._device)  # the last were read before this was asked
        return tensors

    def weight_place(self) -> WeightPlace:
        """Where the rank's weights are."""
        return place_of(self._device)

    def listen_for_workers(self, names: Sequence[str]) -> dict[str, str]:
        """See `WeightOutlets.listen`."""
        return self._outlets.listen(names)

    def send_weights(self, order: SendOrder) -> dict[str, str]:
        """See `WeightOutlets.send`."""
        return self._outlets.send(order, lambda everywhere: self._backend.weights(everywhere=everywhere))

    def save(self, directory: Path) -> None:
        """See `RankBackend.save`."""
        self._backend.save(directory)

    def load(self, directory: Path) -> None:
        """See `RankBackend.load`."""
        self._streams.clear()
        self._backend.load(directory)

    def save_hf(self, directory: Path) -> None:
        """See `RankBackend.save_hf`."""
        self._backend.save_hf(directory)

    def free_cached_memory(self) -> None:
        """See `TrainingBackend.free_cached_memory`."""
        empty_cache(self._device)

    def critic_pads_sequences(self) -> bool:
        """See `RankCritic.pads_sequences`."""
        return self._critic.pads_sequences

    def critic_values(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """See `RankCritic.values`; a rank that does not report answers with nothing."""
        results = self._critic.values(micro_batches)
        return results if self._backend.place.reports else []

    def critic_forward_backward(
        self, micro_batches: Sequence[Batch], loss_fn: Callable[[Tensor, Batch], LossOutput]
    ) -> dict[str, float]:
        """See `RankCritic.forward_backward`."""
        return self._critic.forward_backward(micro_batches, loss_fn)

    def critic_optimizer_step(self) -> OptimizerStats:
        """See `RankCritic.optimizer_step`."""
        return self._critic.optimizer_step()

    def critic_save(self, directory: Path) -> None:
        """See `RankCritic.save`."""
        self._critic.save(directory)

    def critic_load(self, directory: Path) -> None:
        """See `RankCritic.load`."""
        self._critic.load(directory)

    @property
    def _critic(self) -> RankCritic:
        if self._backend.critic is None:
            raise BackendError("ranks must have a critic to be asked for it, got none; give the factory one")
        return self._backend.critic


def join(address: RankAddress) -> torch.device:
    """Joins the default process group and returns the device. What lies on a GPU goes by nccl; what lies in the host's memory, such as the
    gradients of offloaded parameters, by gloo.

    Raises:
        BackendError: the others did not come in time.
    """
    device = torch.device(address.device)
    on_cuda = device.type == CUDA
    if on_cuda:
        set_device(device)
    timeout = timedelta(seconds=address.timeout_s)
    try:
        _choose_interface(address)
        store = TCPStore(address.store_host, address.store_port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=PrefixStore("ranks", store),
            rank=address.rank,
            world_size=address.world_size,
            timeout=timeout,
            device_id=device if on_cuda else None,
        )
    except (RuntimeError, ValueError, OSError) as error:  # torch's DistError and DistStoreError are RuntimeErrors
        raise BackendError(
            f"rank {address.rank} of {address.world_size} must meet the others at {address.store_host}:{address.store_port} "
            f"within {address.timeout_s:g} s, got {error}; look at the first error of another rank"
        ) from error
    return device


def _choose_interface(address: RankAddress) -> None:
    """Has gloo say an address to the others that leads here from where they are: by itself it takes what this host's name stands for."""
    chosen = address.interface
    if chosen is None and not os.environ.get(_INTERFACE):
        chosen = interface_towards(address.store_host, address.store_port)
    if chosen is not None:
        os.environ[_INTERFACE] = chosen
