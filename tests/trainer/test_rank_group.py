"""How a batch is dealt out to ranks, and a group of sharded ranks beside one device."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from ostinato_trainer.algorithms.advantages import with_advantages
from ostinato_trainer.algorithms.aggregation import LossAggMode, with_loss_weights
from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn
from ostinato_trainer.algorithms.value_loss import value_loss
from ostinato_trainer.backends.base import EntropyMode
from ostinato_trainer.backends.critic import LocalCritic
from ostinato_trainer.backends.fsdp2 import Fsdp2Factory, Fsdp2Options
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.backends.lora import LoraOptions
from ostinato_trainer.backends.ranks import host
from ostinato_trainer.backends.ranks.base import RankAddress
from ostinato_trainer.backends.ranks.critic import RankGroupCritic
from ostinato_trainer.backends.ranks.group import RankGroup
from ostinato_trainer.backends.ranks.processes import RankProcesses, RankProcessOptions
from ostinato_trainer.backends.ranks.store import listening_store
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError, BatchError, CheckpointError
from ostinato_trainer.partitions import deal_to_ranks
from ostinato_trainer.segments import Segment

OPTIONS = {"dtype": "float64", "lr": 1e-2, "keep_reference": True, "grad_clip": 0.5}
OF_SAMPLING = '{"eos_token_id": [3, 5], "temperature": 0.6}'


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4)), min_size=1, max_size=6), min_size=1, max_size=7
    ),
    st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_every_sequence_goes_to_one_rank_and_ranks_have_equal_rounds(
    parts: list[list[tuple[int, int]]], num_ranks: int
) -> None:
    """All sequences once; as many rounds as parts need, equal for all; an owner's sequences of one part stay in one micro-batch; and no rank idles
    in a round while another's micro-batch could be halved."""
    lengths, owners, places = [], [], []
    for part in parts:
        places.append(list(range(len(lengths), len(lengths) + len(part))))
        lengths += [length for length, _ in part]
        owners += [owner for _, owner in part]
    shares = deal_to_ranks(places, owners, num_ranks, lambda chosen: sum(lengths[place] for place in chosen))
    assert len(shares) == num_ranks
    assert {len(share) for share in shares} == {-(-len(parts) // num_ranks)}
    dealt = [micro_batch for share in shares for micro_batch in share]
    assert sorted(place for micro_batch in dealt for place in micro_batch) == list(range(len(lengths)))
    part_of = {place: number for number, part in enumerate(places) for place in part}
    homes: dict[tuple[int, int], set[int]] = {}
    for number, micro_batch in enumerate(dealt):
        assert len({part_of[place] for place in micro_batch}) <= 1
        for place in micro_batch:
            homes.setdefault((part_of[place], owners[place]), set()).add(number)
    assert all(len(home) == 1 for home in homes.values())
    if any(not micro_batch for micro_batch in dealt):
        assert all(len({owners[place] for place in micro_batch}) <= 1 for micro_batch in dealt)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=40))
@settings(max_examples=100, deadline=None)
def test_two_ranks_share_one_micro_batch_about_evenly(lengths: list[int]) -> None:
    """The costlier half exceeds the other by the longest sequence at most."""
    one, other = deal_to_ranks(
        [list(range(len(lengths)))],
        list(range(len(lengths))),
        2,
        lambda chosen: sum(lengths[place] for place in chosen),
    )
    costs = [sum(lengths[place] for place in share[0]) for share in (one, other)]
    assert abs(costs[0] - costs[1]) <= max(lengths)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary and layers do not divide by the number of ranks, and whose key heads are fewer than ranks."""
    config = Qwen3Config(
        vocab_size=47,
        hidden_size=16,
        intermediate_size=23,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(OF_SAMPLING)
    return folder


@pytest.fixture(scope="module")
def group(model_folder: Path):
    """Two ranks on the CPU."""
    group = RankGroup(
        RankProcesses(RankProcessOptions(num_ranks=2)),
        Fsdp2Factory(str(model_folder), Fsdp2Options(**OPTIONS)),
        max_tokens_per_forward=20,
    )
    yield group
    group.close()


def make_batch(seed: int = 5) -> Batch:
    """Trajectories of unlike length, one with two segments, one without a trained token, one that is only a prompt."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [("a", [1, 1, 0, 0, 1]), ("b", [1] * 9 + [0, 0]), ("c", [1]), ("d", [1, 0, 1, 1]), ("d", [1, 1])]
    segments = []
    for place, (name, mask) in enumerate([*shapes, ("e", [0, 0, 0]), ("f", [])]):
        ids = torch.randint(0, 47, (3 + place % 2 + len(mask),), generator=generator).tolist()
        split = len(ids) - len(mask)
        segments.append(Segment(ids[:split], ids[split:], mask, None, f"g{ord(name) // 2}", name, float(ord(name) % 3)))
    return Batch.from_segments(segments)


def trained(batch: Batch, backend: LocalBackend) -> Batch:
    """The batch with everything that a loss with a divergence reads."""
    batch = batch.with_columns(
        old_log_probs=backend.log_probs(batch, temperature=0.9) - 0.05,
        ref_log_probs=backend.log_probs(batch, temperature=0.9, reference=True),
    )
    return with_loss_weights(with_advantages(batch, "grpo"), LossAggMode.TOKEN_MEAN)


def test_two_ranks_do_what_one_device_does(model_folder: Path, group: RankGroup, tmp_path: Path) -> None:
    """Log-probabilities, losses, metrics, gradient norms and, after five steps, all parameters are those of one device; batches are split in
    uneven ways, down to a single sequence for two ranks. Then a checkpoint of one goes on in the other."""
    local = LocalBackend.from_pretrained(model_folder, LocalBackendOptions(device="cpu", **OPTIONS))
    loss = policy_loss_fn(PolicyLossOptions(kl_loss_coef=0.1, entropy_coeff=0.01))
    assert group.pads_sequences == local.pads_sequences
    for number in range(5):
        batch = trained(make_batch(number), local)
        for reference in (False, True):
            asked = {"temperature": 0.9, "reference": reference}
            torch.testing.assert_close(
                group.log_probs(batch, **asked), local.log_probs(batch, **asked), rtol=1e-12, atol=1e-12
            )
        parts = batch.split_by_count((1, 2, 3, 7, 7)[number])
        if number == 4:
            parts = [batch.select([1])]  # one trajectory: the other rank has nothing to do
        how = {"temperature": 0.9, "entropy": EntropyMode.GRADIENT}
        of_group, of_local = group.forward_backward(parts, loss, **how), local.forward_backward(parts, loss, **how)
        assert of_group.keys() == of_local.keys()
        assert of_group == pytest.approx(of_local, rel=1e-11, abs=1e-14)
        one, other = group.optimizer_step(), local.optimizer_step()
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-12)
        assert (one.lr, one.skipped) == (other.lr, other.skipped) == (1e-2, False)
    assert group.policy_version == local.policy_version == 5
    assert_same_weights(group, local)
    local.save(tmp_path / "of_local")
    group.save(tmp_path / "of_group")
    group.load(tmp_path / "of_local")
    batch = trained(make_batch(9), local)
    for backend in (group, local):
        backend.forward_backward([batch], loss, temperature=0.9, entropy=EntropyMode.VALUE)
        backend.optimizer_step()
    assert_same_weights(group, local)
    for backend in (group, local):
        backend.load(tmp_path / "of_group")
        assert backend.policy_version == 5
    assert_same_weights(group, local)
    assert group.optimizer_step().skipped  # no gradient is left over
    group.save_hf(tmp_path / "hf")
    assert (tmp_path / "hf" / "generation_config.json").read_text() == OF_SAMPLING
    again = LocalBackend.from_pretrained(tmp_path / "hf", LocalBackendOptions(device="cpu", dtype="float64"))
    assert_same_weights(group, again)


def assert_same_weights(group: RankGroup, local: LocalBackend) -> None:
    """Names, shapes, types and values of what engines would get."""
    (of_group, stream), (of_local, expected) = group.weights(version=3), local.weights(version=3)
    assert of_group.tensors == of_local.tensors
    for (name, tensor), (_, other) in zip(stream(), expected(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-11, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True, "reshard_after_forward": False, "optimizer_offload": True},
        {"param_offload": True, "use_remove_padding": False},
    ],
)
def test_ways_to_save_memory_change_no_number(model_folder: Path, options: dict[str, bool]) -> None:
    """Recomputed layers, layers that stay gathered, moments or weights in the host's memory, and padding: two steps are those of one device. A
    gradient that is not finite is skipped by both, and the weights are as before."""
    workers = RankProcesses(RankProcessOptions(num_ranks=2))
    group = RankGroup(workers, Fsdp2Factory(str(model_folder), Fsdp2Options(**OPTIONS, **options)))
    try:
        local = LocalBackend.from_pretrained(model_folder, LocalBackendOptions(device="cpu", **OPTIONS))
        loss = policy_loss_fn(PolicyLossOptions(kl_loss_coef=0.1))
        for number in range(2):
            batch = trained(make_batch(number), local)
            for backend in (group, local):
                backend.forward_backward(batch.split_by_count(2), loss, temperature=0.9)
            assert group.optimizer_step().grad_norm == pytest.approx(local.optimizer_step().grad_norm, rel=1e-11)
        wrong = dataclasses.replace(batch, loss_weights=batch.loss_weights * float("inf"))
        for backend in (group, local):
            backend.forward_backward([wrong], loss, temperature=0.9)
            assert backend.optimizer_step().skipped
        assert group.policy_version == 2
        assert_same_weights(group, local)
    finally:
        group.close()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_ranks_exchange_what_lies_in_the_memory_of_the_host(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloaded gradients do, on whatever device ranks compute: with NCCL alone the first step with them fails."""
    asked: list[str] = []
    monkeypatch.setattr(host, "set_device", lambda device: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: asked.append(backend))
    store = listening_store("127.0.0.1", 30.0)
    host.join(RankAddress(rank=0, world_size=1, store_host="127.0.0.1", store_port=store.port, device=device))
    backends = dist.BackendConfig(dist.Backend(asked[0])).get_device_backend_map()
    assert backends["cpu"] == "gloo"
    assert backends[torch.device(device).type] == ("gloo" if device == "cpu" else "nccl")


@pytest.mark.slow
def test_an_error_of_one_rank_is_told(model_folder: Path) -> None:
    """A token outside the vocabulary, which only one rank has, ends the group with that error; afterwards it says that it is closed."""
    workers = RankProcesses(RankProcessOptions(num_ranks=2))
    group = RankGroup(workers, Fsdp2Factory(str(model_folder), Fsdp2Options(**OPTIONS)))
    batch = make_batch()
    wrong = batch.token_ids.clone()
    wrong[-1] = 47
    with pytest.raises(BatchError, match="below the model's vocabulary of 47, got 47"):
        group.log_probs(dataclasses.replace(batch, token_ids=wrong), temperature=1.0)
    with pytest.raises(BackendError, match="must be running"):
        group.log_probs(batch, temperature=1.0)
    assert workers.process_ids == []


def test_all_ranks_are_asked_for_their_memory(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank frees its own; none raises."""
    asked: list[tuple[str, list[Any]]] = []
    ask = group._calls.ask

    def noted(method: str, *arguments: Any) -> list[Any]:
        asked.append((method, found := ask(method, *arguments)))
        return found

    monkeypatch.setattr(group._calls, "ask", noted)
    group.free_cached_memory()
    assert asked == [("free_cached_memory", [None, None])]


def test_what_cannot_travel_is_refused(group: RankGroup) -> None:
    """A loss that is made inside a function, and a temperature of 0, are refused before anything is sent; the group goes on."""
    batch = with_loss_weights(make_batch(), LossAggMode.TOKEN_MEAN)
    with pytest.raises(BackendError, match="must be picklable"):
        group.forward_backward([batch], lambda output, part: (output.log_probs.sum(), {}))
    with pytest.raises(BackendError, match="temperature must be above 0"):
        group.log_probs(batch, temperature=0.0)
    assert Counter(group.log_probs(batch, temperature=1.0).isfinite().tolist())[False] == 0


@contextmanager
def ranks(
    folder: Path, num_ranks: int, *, critic: bool = False, factory: type[Fsdp2Factory] = Fsdp2Factory, **options: object
) -> Iterator[RankGroup]:
    """A group that trains what `OPTIONS` say, changed by `options`."""
    of_ranks = Fsdp2Options(**{**OPTIONS, **options})  # pyright: ignore[reportArgumentType]
    of_critic = Fsdp2Options(**{**OPTIONS, "keep_reference": False, **options})  # pyright: ignore[reportArgumentType]
    made = factory(str(folder), of_ranks, critic=(str(folder), of_critic) if critic else None)
    group = RankGroup(RankProcesses(RankProcessOptions(num_ranks=num_ranks)), made, max_tokens_per_forward=20)
    try:
        yield group
    finally:
        group.close()


def take_steps(group: RankGroup, local: LocalBackend, numbers: range) -> None:
    """Steps of both, each of another batch, split into uneven parts or, every fifth, a single sequence; all that both say is compared."""
    loss = policy_loss_fn(PolicyLossOptions(kl_loss_coef=0.1, entropy_coeff=0.01))
    how = {"temperature": 0.9, "entropy": EntropyMode.GRADIENT}
    for number in numbers:
        batch = trained(make_batch(number), local)
        for reference in (False, True):
            asked = {"temperature": 0.9, "reference": reference}
            torch.testing.assert_close(
                group.log_probs(batch, **asked), local.log_probs(batch, **asked), rtol=1e-12, atol=1e-12
            )
        parts = [batch.select([1])] if number % 5 == 4 else batch.split_by_count(1 + 2 * (number % 5))
        of_group, of_local = group.forward_backward(parts, loss, **how), local.forward_backward(parts, loss, **how)
        assert of_group == pytest.approx(of_local, rel=1e-11, abs=1e-14)
        one, other = group.optimizer_step(), local.optimizer_step()
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-11)
    assert_same_weights(group, local)


def take_steps_of_values(critic: RankGroupCritic, local: LocalCritic, numbers: range) -> None:
    """As `take_steps`, of critics; values say whether the weights are still the same."""
    loss = partial(value_loss, cliprange_value=0.5)
    for number in numbers:
        batch = make_batch(number)
        values = local.values(batch)
        torch.testing.assert_close(critic.values(batch), values, rtol=1e-11, atol=1e-12)
        returns = torch.arange(batch.num_tokens, dtype=torch.float64).cos() * 2
        batch = with_loss_weights(batch.with_columns(values=values, returns=returns), LossAggMode.TOKEN_MEAN)
        parts = [batch.select([1])] if number % 5 == 4 else batch.split_by_count(1 + 2 * (number % 5))
        assert critic.forward_backward(parts, loss) == pytest.approx(local.forward_backward(parts, loss), rel=1e-10)
        one, other = critic.optimizer_step(), local.optimizer_step()
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-11)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_that_share_tokens_and_a_critic_on_them(model_folder: Path, tmp_path: Path) -> None:
    """Two ranks with halves of each micro-batch's tokens do what one device does, and so does the critic that they hold; then four ranks, pairs of
    which share tokens, go on from their checkpoints, and from one device's."""
    local = LocalBackend.from_pretrained(model_folder, LocalBackendOptions(device="cpu", **OPTIONS))
    local_critic = LocalCritic.from_pretrained(model_folder, LocalBackendOptions(device="cpu", **OPTIONS))
    shared = {"ulysses_sequence_parallel_size": 2, "gradient_checkpointing": True}
    with ranks(model_folder, 2, critic=True, **shared) as group:
        critic = group.critic(max_tokens_per_forward=20)
        take_steps(group, local, range(5))
        take_steps_of_values(critic, local_critic, range(5))
        group.save(tmp_path / "policy")
        critic.save(tmp_path / "critic")
    with ranks(model_folder, 4, critic=True, ulysses_sequence_parallel_size=2) as group:
        critic = group.critic(max_tokens_per_forward=20)
        group.load(tmp_path / "policy")
        critic.load(tmp_path / "critic")
        local_critic.load(tmp_path / "critic")
        take_steps(group, local, range(5, 6))
        take_steps_of_values(critic, local_critic, range(5, 7))
        local_critic.save(tmp_path / "local_critic")
        take_steps_of_values(critic, local_critic, range(7, 8))
        critic.load(tmp_path / "local_critic")
        local_critic.load(tmp_path / "local_critic")
        take_steps_of_values(critic, local_critic, range(8, 9))
        with pytest.raises(CheckpointError, match="checkpoint must"):
            critic.load(tmp_path / "policy")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_on_ranks_are_those_of_one_device(model_folder: Path, tmp_path: Path) -> None:
    """Adapters of a rank below the number of ranks: five steps, merged weights for engines and the model folder as of one device; the model without
    them is the reference. A single rank goes on from the checkpoint, and from a folder of adapters."""
    pytest.importorskip("peft", reason="the extra lora is not installed")
    lora = LoraOptions(rank=1, alpha=4, seed=3)
    local = LocalBackend.from_pretrained(model_folder, LocalBackendOptions(device="cpu", **OPTIONS, lora=lora))
    with ranks(model_folder, 2, lora=lora, reshard_after_forward=False) as group:
        take_steps(group, local, range(5))
        assert group.weights(version=3)[0] == local.weights(version=3)[0]
        group.save(tmp_path / "state")
        group.save_hf(tmp_path / "hf")
    merged = LocalBackend.from_pretrained(tmp_path / "hf", LocalBackendOptions(device="cpu", dtype="float64"))
    stored = LoraOptions(adapter_path=str(tmp_path / "hf" / "lora_adapter"))
    with ranks(model_folder, 1, lora=stored) as group:
        assert_same_weights(group, merged)
        group.load(tmp_path / "state")
        take_steps(group, local, range(5, 6))


TRACING = '''
from dataclasses import dataclass
from functools import partial

import torch

from ostinato_trainer.backends.fsdp2 import Fsdp2Factory


@dataclass(frozen=True)
class Traced(Fsdp2Factory):
    """Ranks whose layers are traced and differentiated as for any compiler, but run by torch's own operators."""

    def __call__(self, address, device):
        torch.compile = partial(torch.compile, backend="aot_eager")
        return super().__call__(address, device)
'''


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fsdp2Factory]]:
    """A factory of ranks that compile without a compiler, importable here and in processes started from here."""
    (tmp_path / "traced_ranks.py").write_text(TRACING)
    monkeypatch.syspath_prepend(tmp_path)
    from traced_ranks import Traced  # pyright: ignore[reportMissingImports]  written above

    yield Traced
    del sys.modules["traced_ranks"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True, "reshard_after_forward": False},
        {"param_offload": True, "use_remove_padding": False},
        {"ulysses_sequence_parallel_size": 2, "gradient_checkpointing": True},
    ],
    ids=["recomputed", "offloaded", "shared"],
)
def test_compiled_layers_of_ranks_change_no_number(
    model_folder: Path, traced: type[Fsdp2Factory], options: dict[str, object]
) -> None:
    """Two ranks whose layers are compiled do what one device does without, and so does their critic: recomputed, offloaded, padded, and with
    halves of each micro-batch's tokens."""
    local = LocalBackend.from_pretrained(model_folder, LocalBackendOptions(device="cpu", **OPTIONS))
    local_critic = LocalCritic.from_pretrained(model_folder, LocalBackendOptions(device="cpu", **OPTIONS))
    options = {**options, "use_torch_compile": True}
    with ranks(model_folder, 2, critic=True, factory=traced, **options) as group:
        take_steps(group, local, range(3))
        take_steps_of_values(group.critic(max_tokens_per_forward=20), local_critic, range(2))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_layers_with_adapters_in_bfloat16(model_folder: Path, traced: type[Fsdp2Factory]) -> None:
    """Mixed precision and adapters: two steps of ranks with compiled layers are those of ranks without, within bfloat16's rounding, and names of
    weights are the same."""
    pytest.importorskip("peft", reason="the extra lora is not installed")
    how = {"dtype": "bfloat16", "lora": LoraOptions(rank=2, alpha=4, seed=3)}
    found = []
    for compiled in (True, False):
        with ranks(model_folder, 2, factory=traced, use_torch_compile=compiled, **how) as group:
            batch = make_batch(3)
            before = group.log_probs(batch, temperature=0.9)
            without = group.log_probs(batch, temperature=0.9, reference=True)
            batch = batch.with_columns(old_log_probs=before, ref_log_probs=without)
            batch = with_loss_weights(with_advantages(batch, "grpo"), LossAggMode.TOKEN_MEAN)
            group.forward_backward(
                batch.split_by_count(3), policy_loss_fn(PolicyLossOptions(kl_loss_coef=0.1)), temperature=0.9
            )
            norm = group.optimizer_step().grad_norm
            after = group.log_probs(batch, temperature=0.9)
            found.append((before, without, after, norm, [spec.name for spec in group.weights()[0].tensors]))
    compiled, plain = found
    for one, other in zip(compiled[:3], plain[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.1)
    assert compiled[3] == pytest.approx(plain[3], rel=0.1)
    assert compiled[4] == plain[4]
    assert not torch.equal(plain[0], plain[2])
