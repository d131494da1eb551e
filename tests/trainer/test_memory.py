"""Memory that does not suffice: refused before anything is on the device where that is certain, else reported with what held it."""

import logging
import pickle
import re

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ostinato_engines import EngineStartError
from ostinato_engines.device import DeviceMemory, device_memory
from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.backends import memory
from ostinato_trainer.backends.critic import LocalCritic
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions, state_size
from ostinato_trainer.backends.memory import (
    EngineShare,
    HeldMemory,
    MemoryOwner,
    StateSize,
    check_state_fits,
    held_memory,
    out_of_memory_named,
)
from ostinato_trainer.backends.value_model import ValueModel
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError, OutOfMemoryError
from ostinato_trainer.segments import Segment
from ostinato_trainer.sft.steps import sft_loss

GIB = 2**30
DEVICE = torch.device("cuda:3")
STATE = StateSize(parameters=6 * GIB, gradients=6 * GIB, moments=12 * GIB)


def device_of(total, *, free=None, allocated=0, reserved=0):
    free = total if free is None else free
    return DeviceMemory(
        total=int(total * GIB), free=int(free * GIB), allocated=int(allocated * GIB), reserved=int(reserved * GIB)
    )


def make_model(layers=1):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def make_batch():
    segments = [Segment([5, 6], [7, 8, 9], [1, 1, 1], None, "g", f"t{place}", 1.0) for place in range(3)]
    return with_loss_weights(Batch.from_segments(segments), "token-mean")


def test_a_state_that_no_device_of_the_size_holds_is_refused():
    """24 GiB of parameters, gradients and moments are refused on 23 GiB, with all numbers and the cure, and admitted on 24."""
    with pytest.raises(OutOfMemoryError) as refused:
        check_state_fits(STATE, DEVICE, cures="use more devices", look=lambda _: device_of(23))
    message = str(refused.value)
    for part in (
        "6.00 GiB of parameters",
        "12.00 GiB of the optimizer",
        "cuda:3, which has 23.00 GiB",
        "use more devices",
    ):
        assert part in message
    check_state_fits(STATE, DEVICE, cures="use more devices", look=lambda _: device_of(24))


def test_an_engine_that_stays_awake_counts_and_one_that_sleeps_does_not():
    """With 40 GiB, an engine that keeps half of them is refused by its key beside a state of 24 GiB; one that sleeps meanwhile is not."""
    with pytest.raises(OutOfMemoryError, match=r"keeps 20\.00 GiB.*or lower .*gpu_memory_utilization"):
        check_state_fits(
            STATE, DEVICE, cures="x", engine=EngineShare(fraction=0.5, sleeps=False), look=lambda _: device_of(40)
        )
    check_state_fits(STATE, DEVICE, cures="x", engine=EngineShare(fraction=0.5), look=lambda _: device_of(40))


def test_what_is_likely_to_run_out_is_said(caplog):
    """An engine that cannot wake beside what stays between steps, and a device that others use, are warnings with the numbers."""
    with caplog.at_level(logging.WARNING):
        check_state_fits(STATE, DEVICE, cures="x", engine=EngineShare(fraction=0.7), look=lambda _: device_of(40))
        assert "lower actor_rollout_ref.rollout.gpu_memory_utilization to 0.55" in caplog.text
        caplog.clear()
        elsewhere = msgspec.structs.replace(STATE, moments_stay=False)
        check_state_fits(elsewhere, DEVICE, cures="x", engine=EngineShare(fraction=0.7), look=lambda _: device_of(40))
        assert not caplog.records
        check_state_fits(STATE, DEVICE, cures="x", look=lambda _: device_of(40, free=10))
        assert "of which 10.00 GiB is free" in caplog.text
        caplog.clear()
        check_state_fits(STATE, DEVICE, cures="x", look=lambda _: device_of(40, free=10, allocated=20, reserved=30))
        assert "of which 20.00 GiB is free" in caplog.text
        caplog.clear()
        check_state_fits(STATE, DEVICE, cures="x", look=lambda _: device_of(40))
        check_state_fits(STATE, DEVICE, cures="x", look=lambda _: None)
        assert not caplog.records


@pytest.mark.parametrize(
    ("options", "parameters", "gradients"),
    [({}, 1, 1), ({"keep_reference": True}, 2, 1), ({"dtype": "bfloat16"}, 1, 1), ({"dtype": "float64"}, 2, 2)],
)
def test_the_state_is_what_a_backend_really_holds(options, parameters, gradients):
    """The size that is known before equals what parameters, reference, gradients and moments take after a step, but for the counts of steps."""
    model = make_model()
    numel = sum(value.numel() for value in model.parameters())
    settings = LocalBackendOptions(device="cpu", **options)
    size = state_size(model, settings)
    assert size == StateSize(
        parameters=4 * numel * parameters, gradients=4 * numel * gradients, moments=8 * numel * gradients
    )
    backend = LocalBackend(model, settings)
    backend.forward_backward([make_batch()], sft_loss)
    held = backend.memory.held()
    assert held.parameters + held.reference == size.parameters
    assert held.gradients == size.gradients
    backend.optimizer_step()
    counts = 4 * len(backend.optimizer.parameters)
    assert backend.memory.held().optimizer == size.moments + counts
    assert backend.memory.held().gradients == 0


def test_shared_memory_counts_once_and_other_devices_do_not():
    """Views of one buffer, such as Megatron's gradients, are one piece of memory; a tensor without memory is none."""
    buffer = torch.zeros(10)
    first, second = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(6))
    first.main_grad, second.main_grad = buffer[:4], buffer[4:]
    held = held_memory(torch.device("cpu"), [first, second], optimizer=[first.detach(), torch.zeros(3, device="meta")])
    assert held == HeldMemory(parameters=40, gradients=40, optimizer=0, reference=0)


def test_a_report_says_what_held_the_memory():
    """Phase, state by part, activations, what torch keeps, others with the engine's key, the micro-batch and torch's own words."""
    held = HeldMemory(parameters=6 * GIB, gradients=5 * GIB, optimizer=4 * GIB, reference=3 * GIB)
    owner = MemoryOwner(DEVICE, lambda: held, lambda _: device_of(80, free=1, allocated=38, reserved=39))
    batch = make_batch()
    with (
        pytest.raises(OutOfMemoryError) as raised,
        out_of_memory_named("an update", "lower some_key", owner=owner, batches=[batch.select([0]), batch]),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    message = str(raised.value)
    for part in (
        "memory must suffice for an update, but it ran out; lower some_key, or lower actor_rollout_ref.rollout.gpu_memory_utilization",
        "of 80.00 GiB on cuda:3: parameters 6.00 GiB, gradients 5.00 GiB, the optimizer's state 4.00 GiB, the reference 3.00 GiB",
        "activations and all else of this process 20.00 GiB",
        "kept by torch without use 1.00 GiB",
        "(an engine takes actor_rollout_ref.rollout.gpu_memory_utilization) 40.00 GiB, free 1.00 GiB",
        "the largest of 2 micro-batches has 15 tokens in 3 sequences, the longest 5",
        "what was raised: CUDA out of memory. Tried to allocate 2 GiB.",
    ):
        assert part in message
    assert isinstance(raised.value, BackendError | MemoryError)
    assert str(pickle.loads(pickle.dumps(raised.value))) == message


def test_other_errors_pass_and_a_report_is_not_reported_again():
    """An error that has nothing to do with memory goes through as it is, and so do an engine's own words about it and a report from within."""
    with pytest.raises(RuntimeError, match="shape mismatch"), out_of_memory_named("x", "y"):
        raise RuntimeError("shape mismatch")
    with pytest.raises(EngineStartError, match=r"^the engine says: CUDA out of memory$"), out_of_memory_named("x", "y"):
        raise EngineStartError("the engine says: CUDA out of memory")
    inner, outer = out_of_memory_named("the inner", "z"), out_of_memory_named("the outer", "y")
    with pytest.raises(OutOfMemoryError, match="for the inner"), outer, inner:
        raise MemoryError


class _Starved(torch.nn.Module):
    """Stands in for a part of a model for which no memory is left."""

    def forward(self, *_arguments, **_named):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_each_phase_of_the_policy_reports():
    """Passes with and without gradients, a step and the loading of weights all end in the one error, and leave no gradient."""
    backend, batch = LocalBackend(make_model(), LocalBackendOptions(device="cpu")), make_batch()
    backend.forward_backward([batch], sft_loss)

    def no_memory():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    optimizer = backend.optimizer.step
    backend.optimizer.step = no_memory
    with pytest.raises(OutOfMemoryError, match=r"an optimizer step.*lora_rank=16(.|\n)*on cpu: parameters 0\.00 GiB"):
        backend.optimizer_step()
    backend.optimizer.step = optimizer
    backend.model.model.layers[0] = _Starved()
    with pytest.raises(
        OutOfMemoryError, match=r"an update.*ppo_micro_batch_size_per_gpu(.|\n)*micro-batch has 15 tokens"
    ):
        backend.forward_backward([batch], sft_loss)
    assert all(parameter.grad is None for parameter in backend.model.parameters())
    with pytest.raises(OutOfMemoryError, match=r"log-probabilities.*ppo_max_token_len_per_gpu"):
        backend.log_probs(batch, temperature=1.0)
    model = make_model()
    model.to = lambda *_: no_memory()
    with pytest.raises(OutOfMemoryError, match="the model's weights"):
        LocalBackend(model, LocalBackendOptions(device="cpu"))


def test_the_critic_reports_by_its_own_keys():
    """Values, an update and a step of the critic that run out of memory name the critic's keys."""
    critic = LocalCritic(ValueModel(make_model().model), LocalBackendOptions(device="cpu"))
    critic.model.base_model.layers[0] = _Starved()
    with pytest.raises(OutOfMemoryError, match=r"values.*critic\.ppo_max_token_len_per_gpu"):
        critic.values(make_batch())
    with pytest.raises(OutOfMemoryError, match=r"an update.*critic\.ppo_micro_batch_size_per_gpu"):
        critic.forward_backward([make_batch()], lambda values, _: (values.sum(), {}))


def test_a_backend_refuses_before_it_moves_a_model(monkeypatch):
    """On a device that is too small, making a backend raises before the model is moved there."""
    monkeypatch.setattr(memory, "device_memory", lambda _: device_of(1e-6))
    model = make_model()
    model.to = lambda *_: pytest.fail("the model was moved")
    with pytest.raises(OutOfMemoryError, match="for one step of training"):
        LocalBackend(model, LocalBackendOptions(device="cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_device_that_is_full_is_reported():
    """On a GPU of which nearly nothing is left a pass runs out: the parts of the report add up to the device, and with room it goes on."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8
    )
    backend = LocalBackend(LlamaForCausalLM(config), LocalBackendOptions(device="cuda", dtype="bfloat16"))
    segment = Segment([5], [7] * 8191, [1] * 8191, None, "g", "t", 1.0)
    batch = with_loss_weights(Batch.from_segments([segment]), "token-mean")
    torch.cuda.empty_cache()
    filler = torch.empty(device_memory("cuda").free - 64 * 2**20, dtype=torch.uint8, device="cuda")
    with pytest.raises(OutOfMemoryError) as raised:
        backend.forward_backward([batch], sft_loss)
    head, line, *_ = str(raised.value).splitlines()
    assert "for an update" in head
    total, *parts = (float(number) for number in re.findall(r"([\d.]+) GiB", line))
    assert sum(parts) == pytest.approx(total, abs=0.1)
    del filler
    torch.cuda.empty_cache()
    assert backend.forward_backward([batch], sft_loss)
