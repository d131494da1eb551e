"""The optimizer that policy and critic share: torch's AdamW, with steps that are skipped and a state that is kept by name."""

import logging
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ostinato_trainer.backends.adamw import AdamW, AdamWOptions
from ostinato_trainer.errors import BackendError, CheckpointError


def make(names=("b", "a"), **options):
    generator = torch.Generator().manual_seed(1)
    parameters = {name: torch.nn.Parameter(torch.randn(2, 3, generator=generator)) for name in names}
    return AdamW(parameters, AdamWOptions(**{"lr": 0.1, **options}))


def step(optimizer, factor=1.0):
    for place, parameter in enumerate(optimizer.parameters.values()):
        parameter.grad = factor * torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (place + 1)
    return optimizer.step()


def values(optimizer):
    return {name: parameter.detach().clone() for name, parameter in optimizer.parameters.items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_moments_are_found_by_name_whatever_the_order():
    """Parameters listed in another order get their own moments back, and the next step is the same."""
    first = make()
    step(first)
    other = AdamW({name: first.parameters[name] for name in ("a", "b")}, AdamWOptions(lr=0.1))
    other.load({name: value.clone() for name, value in first.moments().items()}, num_steps=1, num_skipped=0)
    assert same(other.moments(), first.moments())
    assert other.num_steps == 1


def test_an_infinite_gradient_norm_is_skipped_and_counted_even_where_each_gradient_is_finite():
    """Finite gradients whose norm overflows float32 change nothing; the reason says that the sum overflows."""
    optimizer = make()
    step(optimizer)
    before, moments = values(optimizer), {name: value.clone() for name, value in optimizer.moments().items()}
    stats = step(optimizer, 1.5e38)
    assert stats.skipped
    assert stats.reason is not None
    assert "overflows" in stats.reason
    assert same(values(optimizer), before)
    assert same(optimizer.moments(), moments)
    assert (optimizer.num_steps, optimizer.num_skipped) == (2, 1)
    assert all(parameter.grad is None for parameter in optimizer.parameters.values())


def step_of_a_shard(rank: int, folder: Path, wrong: float) -> None:
    """Of two ranks only the second has the wrong number in its rows of `b`; of `a` it has no row."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    mesh = init_device_mesh("cpu", (2,))
    parameters = {}
    for name, rows in {"a": 1 - rank, "b": 2, "c": 2}.items():
        local = torch.full((rows, 3), wrong if (name, rank) == ("b", 1) else 1.0)
        shape = torch.Size([1 if name == "a" else 4, 3])
        gradient = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=(3, 1))
        parameters[name] = torch.nn.Parameter(torch.zeros_like(gradient))
        parameters[name].grad = gradient
    (folder / f"{rank}").write_text(str(AdamW(parameters, AdamWOptions(lr=0.1)).step().reason))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_all_ranks_give_one_reason_for_a_skipped_step(wrong, tmp_path, monkeypatch):
    """The first parameter of the model's order that is wrong on any rank; a rank without a share of one has nothing to say of it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    commands = [[sys.executable, __file__, str(rank), str(tmp_path), str(wrong)] for rank in range(2)]
    ranks = [subprocess.Popen(command) for command in commands]
    assert [rank.wait() for rank in ranks] == [0, 0]
    reasons = {(tmp_path / f"{rank}").read_text() for rank in range(2)}
    assert reasons == {f"gradient norm is {wrong}, first in b"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_would_swallow_steps_are_refused(dtype):
    """Parameters of 16 bits are refused by name with the key that computes in them; that they would lose a usual step is so."""
    weight = torch.nn.Parameter(torch.full((2,), 0.02, dtype=dtype))
    with pytest.raises(BackendError, match=r"float32 or float64, got torch\.\w*16 in w, .*actor\.dtype=bfloat16"):
        AdamW({"w": weight}, AdamWOptions(lr=1e-6))
    assert torch.equal(weight - 1e-6, weight)


@pytest.mark.parametrize(
    ("lr", "dtype", "said"),
    [
        (1e-6, torch.float32, False),
        (1e-10, torch.float32, True),
        (1e-10, torch.float64, False),
        (0.0, torch.float32, False),
    ],
)
def test_a_rate_that_rounding_takes_away_is_said(lr, dtype, said, caplog):
    """A rate that most weights are too large for is a warning with their share, and a step then really changes none of those; usual rates, and the
    rate 0 of whoever wants no step, are none."""
    weights = torch.linspace(0.01, 0.03, 20000, dtype=dtype)
    parameter = torch.nn.Parameter(weights.clone())
    with caplog.at_level(logging.WARNING, logger="ostinato_trainer"):
        optimizer = AdamW({"w": parameter}, AdamWOptions(lr=lr, weight_decay=0.0, grad_clip=1e9))
    assert ("is lost in about 100% of the trained weights" in caplog.text) is said
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(parameter.detach(), weights) is (said or lr == 0)


def test_moments_of_other_parameters_are_refused_and_change_nothing():
    """A name too many, one too few, another shape: refused by name, the state as it was."""
    optimizer = make()
    step(optimizer)
    before = {name: value.clone() for name, value in optimizer.moments().items()}
    wrong_shape = {**before, "a.exp_avg": torch.zeros(7)}
    too_few = {name: value for name, value in before.items() if name != "b.step"}
    too_many = {**before, "c.step": torch.tensor(1.0)}
    for moments, name in ((wrong_shape, "a.exp_avg"), (too_few, "b.step"), (too_many, "c.step")):
        with pytest.raises(CheckpointError, match=rf"{name} must be .* in here"):
            optimizer.load(moments, num_steps=5, num_skipped=0, source="here")
    assert same(optimizer.moments(), before)
    assert optimizer.num_steps == 1


def test_a_parameter_that_no_loss_depended_on_has_no_moments_and_none_are_asked_for():
    """What was saved with one parameter untouched is loaded, and the others have their moments back."""
    optimizer = make()
    optimizer.parameters["a"].grad = torch.ones(2, 3)
    optimizer.step()
    saved = {name: value.clone() for name, value in optimizer.moments().items()}
    assert all(name.startswith("a.") for name in saved)
    other = make()
    step(other)
    other.load(saved, num_steps=1, num_skipped=0)
    assert same(other.moments(), saved)
    assert not step(other).skipped


def test_options_out_of_range_and_nothing_to_train_are_refused():
    """Each bad value is named; so is a model whose parameters are all frozen."""
    for bad in ({"lr": -1.0}, {"lr": float("nan")}, {"grad_clip": 0.0}, {"lr_scheduler_type": "step"}):
        with pytest.raises(BackendError, match=f"{next(iter(bad))} must be"):
            make(**bad)
    with pytest.raises(BackendError, match="must have a parameter to train, got none"):
        make(names=())


if __name__ == "__main__":
    step_of_a_shard(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
