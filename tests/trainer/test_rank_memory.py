"""Memory that does not suffice on sharded ranks: the same error as on one device, before the run or in it."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ostinato_trainer.algorithms.aggregation import LossAggMode, with_loss_weights
from ostinato_trainer.backends.fsdp2 import Fsdp2Factory, Fsdp2Options
from ostinato_trainer.backends.ranks.group import RankGroup
from ostinato_trainer.backends.ranks.processes import RankProcesses, RankProcessOptions
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import OutOfMemoryError
from ostinato_trainer.segments import Segment

MODULE = '''
import dataclasses
import torch
from ostinato_engines.device import DeviceMemory
from ostinato_trainer.backends import memory
from ostinato_trainer.backends.fsdp2 import Fsdp2Factory


def starved(output, batch):
    raise torch.OutOfMemoryError("CUDA out of memory.")


@dataclasses.dataclass(frozen=True)
class OnSmallDevices:
    """Builds ranks on devices that say that they have so many bytes."""

    inner: Fsdp2Factory
    total: int

    def __call__(self, address, device):
        memory.device_memory = lambda _: DeviceMemory(total=self.total, free=self.total, allocated=0, reserved=0)
        return self.inner(address, device)
'''

pytestmark = pytest.mark.slow


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of a loss without memory and of small devices, importable here and in processes started from here."""
    (tmp_path / "small_devices_of_this_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import small_devices_of_this_test  # pyright: ignore[reportMissingImports]  written above

    yield small_devices_of_this_test
    del sys.modules["small_devices_of_this_test"]


@pytest.fixture
def factory(tmp_path: Path) -> Fsdp2Factory:
    """Of ranks of a tiny model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return Fsdp2Factory(str(tmp_path / "model"), Fsdp2Options())


def make_batch() -> Batch:
    segments = [Segment([5, 6], [7, 8, 9], [1, 1, 1], None, "g", f"t{place}", 1.0) for place in range(4)]
    return with_loss_weights(Batch.from_segments(segments), LossAggMode.TOKEN_MEAN)


def test_ranks_that_run_out_of_memory_report_and_go_on(small, factory: Fsdp2Factory) -> None:
    """Where every rank runs out the controller gets the error with what a rank held and the keys, and no gradient is left, so the group goes on."""
    group = RankGroup(RankProcesses(RankProcessOptions(num_ranks=1)), factory)
    try:
        with pytest.raises(OutOfMemoryError) as raised:
            group.forward_backward([make_batch()], small.starved)
        for part in (
            "for an update",
            "fsdp_config.param_offload=true",
            "on cpu: parameters",
            "20 tokens in 4 sequences",
        ):
            assert part in str(raised.value)
        assert group.log_probs(make_batch(), temperature=1.0).isfinite().all()
        assert group.optimizer_step().skipped
    finally:
        group.close()


def test_ranks_on_devices_that_are_too_small_are_refused(small, factory: Fsdp2Factory) -> None:
    """A state that does not fit is an error of the making of the group, with the cure, before a weight is on a device; and no rank is left."""
    workers = RankProcesses(RankProcessOptions(num_ranks=1))
    with pytest.raises(OutOfMemoryError, match=r"one step of training.*share the model out over more devices"):
        RankGroup(workers, small.OnSmallDevices(factory, 2000))
    assert workers.process_ids == []
