"""One rank of the runs that test_megatron_rank.py looks at: `megatron_ranks.py RANK WORLD_SIZE FOLDER`.

Every scenario runs on every rank in the same order, beside a `LocalBackend` on the same weights, and answers with plain numbers, which go into
`FOLDER/rank-N.json`. Models are tiny, their biases and norms random, so that a part which stands in the wrong place shows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
import megatron_on_cpu  # noqa: E402  what is said of warnings comes first

megatron_on_cpu.install()

from megatron.core import parallel_state  # noqa: E402  what makes it run on a CPU comes first

from ostinato_trainer.algorithms.aggregation import with_loss_weights  # noqa: E402
from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn  # noqa: E402
from ostinato_trainer.algorithms.value_loss import value_loss  # noqa: E402
from ostinato_trainer.backends.base import EntropyMode  # noqa: E402
from ostinato_trainer.backends.critic import LocalCritic  # noqa: E402
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions  # noqa: E402
from ostinato_trainer.backends.megatron import core  # noqa: E402
from ostinato_trainer.backends.megatron.critic import MegatronCritic  # noqa: E402
from ostinato_trainer.backends.megatron.options import MegatronOptions  # noqa: E402
from ostinato_trainer.backends.megatron.rank import MegatronRank  # noqa: E402
from ostinato_trainer.backends.megatron.shape import MegatronLayout  # noqa: E402
from ostinato_trainer.batch import Batch  # noqa: E402
from ostinato_trainer.errors import TrainerError  # noqa: E402
from ostinato_trainer.heartbeat import num_beats  # noqa: E402
from ostinato_trainer.segments import Segment  # noqa: E402

VOCABULARY = 96
TEMPERATURE = 0.7
OPTIMIZER = {
    "lr": 1e-3,
    "eps": 1e-4,
    "grad_clip": 0.5,
    "lr_scheduler_type": "cosine",
    "lr_warmup_steps": 2,
    "total_steps": 8,
}
"""A key's bias has no gradient but rounding; this eps keeps AdamW from making steps of it."""
LOSS = policy_loss_fn(PolicyLossOptions(entropy_coeff=0.01))
PLAIN_LOSS = policy_loss_fn(PolicyLossOptions())
GENERATION = '{"temperature": 0.6, "top_p": 0.9}\n'
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make_models(folder: Path) -> None:
    """Six tiny models as Hugging Face folders."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "pad_token_id": 5,
    }
    kinds = {
        "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config(**sizes, tie_word_embeddings=True)),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config(**sizes, tie_word_embeddings=False)),
        "qwen3_tied": (Qwen3ForCausalLM, Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=False)),
        "llama": (LlamaForCausalLM, LlamaConfig(**sizes, tie_word_embeddings=False)),
        "llama3": (LlamaForCausalLM, LlamaConfig(**sizes, tie_word_embeddings=True, rope_parameters=LLAMA3)),
    }
    for seed, (name, (kind, config)) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        (folder / name / "generation_config.json").write_text(GENERATION)


def mini_batch(seed: int = 0, num_sequences: int = 7) -> Batch:
    """Trajectories of unlike length, ready for a policy loss."""
    generator = torch.Generator().manual_seed(seed)
    segments = []
    for place in range(num_sequences):
        length = 3 + (5 * place) % 17
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        prompt = 1 + place % 2
        mask = [1] * (length - prompt)
        segments.append(Segment(ids[:prompt], ids[prompt:], mask, None, f"g{place // 2}", f"t{place}", 0.0))
    batch = Batch.from_segments(segments)
    advantages = torch.randn(num_sequences, generator=generator, dtype=torch.float64)[batch.token_trajectory]
    return with_loss_weights(batch.with_columns(advantages=advantages * batch.loss_mask), "token-mean")


class Runs:
    """What the scenarios share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def ranks(
        self,
        model: str,
        tensor: int = 1,
        pipeline: int = 1,
        *,
        sequence_parallel: bool = True,
        with_critic: bool = False,
        **options: Any,
    ) -> MegatronRank:
        """This rank of a new layout, a critic of the same model beside the policy where it is asked for."""
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        layout = MegatronLayout(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            sequence_parallel=sequence_parallel,
        )
        of_rank = MegatronOptions(layout=layout, **{**OPTIMIZER, **options})
        critic = (str(self.folder / model), of_rank) if with_critic else None
        return MegatronRank(self.folder / model, of_rank, device=torch.device("cpu"), critic=critic)

    def local(self, model: str | Path, **options: Any) -> LocalBackend:
        """The same model on one device."""
        return LocalBackend.from_pretrained(
            self.folder / model, LocalBackendOptions(device="cpu", **{**OPTIMIZER, **options})
        )


def share_of(rank: MegatronRank, batch: Batch, parts: int = 2) -> list[Batch]:
    """The micro-batches of a rank's share of the data, uneven: the first share takes what is over."""
    size, index = rank.place.data_size, rank.place.data_index
    mine = [place for place in range(batch.num_sequences) if place % size == index]
    cut = -(-len(mine) // parts)
    return [batch.select(mine[start : start + cut]) for start in range(0, len(mine), cut)]


def together(rank: MegatronRank, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of all shares of the data, added up."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dict(metrics) if rank.place.reports else {})
    return {
        name: sum(each.get(name, 0.0) for each in found) for name in sorted({key for each in found for key in each})
    }


def weights_of(rank: MegatronRank) -> dict[str, torch.Tensor]:
    """The whole weights, on every rank."""
    found: list[Any] = [[(name, tensor.clone()) for tensors in rank.weights() for name, tensor in tensors]]
    dist.broadcast_object_list(found, 0)
    return dict(found[0])


def everywhere(rank: MegatronRank, whole: Mapping[str, torch.Tensor]) -> bool:
    """Whether this rank is given every whole tensor in order, bit for bit, where all ranks ask for them."""
    found = {name: tensor.clone() for tensors in rank.weights(everywhere=True) for name, tensor in tensors}
    return list(found) == list(whole) and all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def apart(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of two models; infinite where their names differ."""
    if set(one) != set(other):
        return float("inf")
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def local_weights(backend: LocalBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in backend.weights()[1]()}


def logits(runs: Runs, model: str, tensor: int = 1) -> dict[str, Any]:
    """Logits beside those of `transformers`, and with the rows of one projection in reverse."""
    rank = runs.ranks(model, tensor)
    one = mini_batch(num_sequences=4).select([2])
    expected = runs.local(model).model(input_ids=one.token_ids.unsqueeze(0)).logits[0]

    def whole() -> torch.Tensor:
        with torch.no_grad():
            states = core.states_of(rank.training.model, one).squeeze(1)
            part = states @ core.output_weight(rank.training.model).T
        parts = [torch.empty_like(part) for _ in range(tensor)]
        dist.all_gather(parts, part, group=rank._groups.tensor_group)
        return torch.cat(parts, dim=-1)

    seen: list[int] = []
    hook = rank.training.model.decoder.layers[1].mlp.register_forward_hook(
        lambda _, inputs, __: seen.append(len(inputs[0]))
    )
    difference = float((whole() - expected).abs().max())
    hook.remove()
    weight = rank.training.optimizer.parameters["decoder.layers.0.self_attention.linear_qkv.weight"]
    with torch.no_grad():
        weight.copy_(weight.flip(0))
    return {
        "tokens": [one.num_tokens, *seen],
        "difference": difference,
        "scale": float(expected.abs().max()),
        "turned": float((whole() - expected).abs().max()),
    }


def training(runs: Runs, model: str, tensor: int, pipeline: int, **options: Any) -> dict[str, Any]:
    """Log-probabilities and five steps beside one device; of the third step the last share of the data has nothing to train on."""
    rank, local = runs.ranks(model, tensor, pipeline, **options), runs.local(model)
    batch = mini_batch()
    mine = share_of(rank, batch)
    answers = rank.log_probs(mine, temperature=TEMPERATURE)
    expected = local.log_probs(batch, temperature=TEMPERATURE)
    places = [batch.token_positions(torch.tensor(range(rank.place.data_index, 7, rank.place.data_size)))]
    log_probs = (torch.cat(answers) - expected[places[0]]).abs().max() if rank.place.reports else torch.zeros(())
    steps = []
    for number in range(5):
        batch = mini_batch(number)
        if number == 2 and rank.place.data_size > 1:
            idle = torch.arange(batch.num_sequences) % rank.place.data_size == rank.place.data_size - 1
            batch = dataclasses.replace(batch, loss_mask=batch.loss_mask & ~idle[batch.token_sequence])
            batch = with_loss_weights(batch, "token-mean")
        old = local.log_probs(batch, temperature=TEMPERATURE)
        batch = batch.with_columns(old_log_probs=old + 0.05 * torch.sin(torch.arange(float(batch.num_tokens))))
        ours = rank.forward_backward(share_of(rank, batch), LOSS, temperature=TEMPERATURE, entropy=EntropyMode.GRADIENT)
        theirs = local.forward_backward([batch], LOSS, temperature=TEMPERATURE, entropy=EntropyMode.GRADIENT)
        ours = together(rank, ours)
        mine_stats, their_stats = rank.optimizer_step(), local.optimizer_step()
        sums = [name for name in theirs if not name.endswith(("_max", "_min"))]
        steps.append(
            {
                "metrics": max(abs(ours[name] - theirs[name]) for name in sums),
                "num_metrics": len(sums),
                "grad_norm": abs(mine_stats.grad_norm / their_stats.grad_norm - 1),
                "clipped": their_stats.grad_norm > OPTIMIZER["grad_clip"],
                "same_rate": mine_stats.lr == their_stats.lr,
                "stats": repr(mine_stats),
            }
        )
    before = local_weights(runs.local(model))
    weights = weights_of(rank)
    order = [spec.name for spec in rank.manifest(5).tensors]
    return {
        "log_probs": float(log_probs),
        "steps": steps,
        "weights": apart(weights, local_weights(local)),
        "moved": apart(weights, before),
        "in_order": order == list(weights)
        and [spec.shape for spec in rank.manifest(5).tensors] == [tuple(each.shape) for each in weights.values()],
        "everywhere": everywhere(rank, weights),
        "version": rank.policy_version,
        "place": msgspec.structs.asdict(rank.place),
    }


def values_batch(number: int, values: torch.Tensor) -> Batch:
    """A mini-batch for a loss of values, which are those before the step."""
    batch = mini_batch(number)
    returns = torch.sin(torch.arange(float(batch.num_tokens))) * batch.loss_mask
    return batch.with_columns(values=values, returns=returns)


def of_values(predicted: torch.Tensor, batch: Batch) -> Any:
    return value_loss(predicted, batch, cliprange_value=0.1)


def critics(runs: Runs, first: tuple[int, int], second: tuple[int, int], **options: Any) -> dict[str, Any]:
    """Four steps of a critic beside one device, a checkpoint, and from it two more in another layout."""
    model = "qwen3_tied"
    local_options = LocalBackendOptions(device="cpu", **{**OPTIMIZER, **options})
    local = LocalCritic.from_pretrained(runs.folder / model, local_options)

    def critic_of(layout: tuple[int, int]) -> tuple[MegatronRank, MegatronCritic]:
        rank = runs.ranks(model, *layout, with_critic=True, **options)
        assert isinstance(rank.critic, MegatronCritic)
        return rank, rank.critic

    def go_on(rank: MegatronRank, critic: MegatronCritic, numbers: range) -> dict[str, float]:
        worst = {"values": 0.0, "metrics": 0.0, "grad_norm": 0.0, "largest": 0.0}
        for number in numbers:
            expected = local.values(mini_batch(number))
            batch = values_batch(number, expected)
            mine = batch.token_positions(torch.tensor(range(rank.place.data_index, 7, rank.place.data_size)))
            got = critic.values(share_of(rank, batch))
            if rank.place.reports:
                worst["values"] = max(worst["values"], float((torch.cat(got) - expected[mine]).abs().max()))
            worst["largest"] = max(worst["largest"], float(expected.abs().max()))
            ours = together(rank, critic.forward_backward(share_of(rank, batch), of_values))
            theirs = local.forward_backward([batch], of_values)
            worst["metrics"] = max(worst["metrics"], *(abs(ours[name] - theirs[name]) for name in theirs))
            mine_stats, their_stats = critic.optimizer_step(), local.optimizer_step()
            worst["grad_norm"] = max(worst["grad_norm"], abs(mine_stats.grad_norm / their_stats.grad_norm - 1))
        return worst

    directory = runs.folder / f"critic {first}-{second}"
    directory.mkdir(exist_ok=True)
    rank, critic = critic_of(first)
    begun = go_on(rank, critic, range(4))
    critic.save(directory)
    rank.log_probs(share_of(rank, mini_batch()), temperature=TEMPERATURE)  # the policy beside it is another model
    other_rank, other = critic_of(second)
    other.load(directory)
    return {
        "begun": begun,
        "gone_on": go_on(other_rank, other, range(4, 6)),
        "policy_moved": apart(weights_of(rank), local_weights(runs.local(model))),
        "is_policy": refusal(lambda: other_rank.load(directory)),
    }


def checkpoints(runs: Runs, first: tuple[int, int], second: tuple[int, int]) -> dict[str, Any]:
    """Two steps, a checkpoint, two more; then from the checkpoint in another layout the same two; a damaged one; a folder for others."""
    model, name = "qwen2_tied", f"{first}-{second}"
    directory, folder = runs.folder / f"checkpoint {name}", runs.folder / f"huggingface {name}"
    directory.mkdir(exist_ok=True)

    def go_on(rank: MegatronRank, seeds: range) -> list[str]:
        stats = []
        for seed in seeds:
            rank.forward_backward(
                share_of(rank, mini_batch(seed)), LOSS, temperature=TEMPERATURE, entropy=EntropyMode.GRADIENT
            )
            stats.append(rank.optimizer_step())
        return [f"{each.lr:.12g} {each.grad_norm:.4f}" for each in stats]

    rank = runs.ranks(model, *first, keep_reference=True)
    nothing = runs.folder / f"new {name}"
    nothing.mkdir(exist_ok=True)
    rank.save(nothing)
    at_start = weights_of(rank)
    go_on(rank, range(2))
    rank.save(directory)
    saved = weights_of(rank)
    expected = go_on(rank, range(2, 4))
    final = weights_of(rank)
    rank.save_hf(folder)
    dist.barrier()
    exported = local_weights(runs.local(folder))
    unexported = refusal(lambda: export_badly(rank, runs.folder / f"bad {name}"))
    rank.load(nothing)
    back_at_start = apart(weights_of(rank), at_start)

    other = runs.ranks(model, *second)
    other.load(directory)
    loaded = apart(weights_of(other), saved)
    got = go_on(other, range(2, 4))
    damaged = runs.folder / f"damaged {name}"
    if runs.rank == 0:
        shutil.copytree(directory, damaged, dirs_exist_ok=True)
        (damaged / "layer_00001.safetensors").write_bytes((damaged / "layer_00001.safetensors").read_bytes()[:-8])
    dist.barrier()
    refused = refusal(lambda: other.load(damaged))
    unchanged = apart(weights_of(other), final)
    missing = refusal(lambda: other.load(runs.folder))
    blocked = runs.folder / f"blocked {name}"
    (blocked / "embedding.safetensors").mkdir(parents=True, exist_ok=True)
    unwritable = refusal(lambda: other.save(blocked))
    begun_elsewhere = runs.ranks(folder.name, *second, keep_reference=True)
    begun_here = runs.ranks(model, *second, keep_reference=True)
    begun_here.load(directory)
    return {
        "unwritable": unwritable,
        "unexported": unexported,
        "generation": (folder / "generation_config.json").read_text() == GENERATION,
        "other_reference": refusal(lambda: begun_elsewhere.load(directory)),
        "same_reference": apart(weights_of(begun_here), saved),
        "expected": expected,
        "got": got,
        "loaded": loaded,
        "final": apart(weights_of(other), final),
        "exported": apart(exported, final),
        "back_at_start": back_at_start,
        "refused": refused,
        "missing": missing,
        "unchanged": unchanged,
        "version": other.policy_version,
        "files": sorted(path.name for path in directory.iterdir()),
    }


def export_badly(rank: MegatronRank, folder: Path) -> None:
    """An export in which the first rank meets an error that is none of the disk's."""
    with mock.patch(
        "ostinato_trainer.backends.megatron.rank.copy_generation_config", side_effect=ValueError("top_p is 7")
    ):
        rank.save_hf(folder)


def skipping(runs: Runs, tensor: int, pipeline: int) -> dict[str, Any]:
    """A gradient that is not finite on one share of the data, then a step without any, then a sound one; and what is refused."""
    model = "qwen3_tied"
    rank, local = runs.ranks(model, tensor, pipeline, keep_reference=True), runs.local(model)
    before = weights_of(rank)
    batch = mini_batch(1)
    advantages = batch.advantages
    assert advantages is not None
    spoiled = batch.with_columns(
        advantages=advantages.clone().index_fill_(0, batch.loss_mask.nonzero()[0], float("nan"))
    )
    rank.forward_backward(share_of(rank, spoiled), PLAIN_LOSS, temperature=TEMPERATURE)
    not_finite = rank.optimizer_step()
    nothing = rank.optimizer_step()
    unchanged = apart(weights_of(rank), before)
    idle = dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    empty = rank.forward_backward([idle], PLAIN_LOSS, temperature=TEMPERATURE)
    for backend, parts in ((rank, share_of(rank, batch)), (local, [batch])):
        backend.forward_backward(parts, PLAIN_LOSS, temperature=TEMPERATURE)
    local.optimizer.num_steps = 2
    sound, expected = rank.optimizer_step(), local.optimizer_step()
    rank.forward_backward(share_of(rank, batch), PLAIN_LOSS, temperature=TEMPERATURE)
    beyond = dataclasses.replace(batch, token_ids=batch.token_ids + VOCABULARY)
    vocabulary = refusal(lambda: rank.forward_backward([beyond], PLAIN_LOSS))
    after_refusal = str(rank.optimizer_step().reason)
    reference = rank.log_probs(share_of(rank, batch), temperature=TEMPERATURE, reference=True)
    policy = rank.log_probs(share_of(rank, batch), temperature=TEMPERATURE, loss_tokens_only=True)
    first = runs.local(model).log_probs(batch, temperature=TEMPERATURE)
    mine = batch.token_positions(torch.tensor(range(rank.place.data_index, 7, rank.place.data_size)))
    reports = rank.place.reports
    return {
        "not_finite": [not_finite.skipped, str(not_finite.reason)],
        "nothing": [nothing.skipped, str(nothing.reason)],
        "unchanged": unchanged,
        "empty": empty,
        "sound": abs(sound.grad_norm / expected.grad_norm - 1),
        "same_rate": sound.lr == expected.lr,
        "weights": apart(weights_of(rank), local_weights(local)),
        "reference": float((torch.cat(reference) - first[mine]).abs().max()) if reports else 0.0,
        "moved": float((torch.cat(policy) - torch.cat(reference))[batch.loss_mask[mine]].abs().max())
        if reports
        else 1.0,
        "outside_mask": float(torch.cat(policy)[~batch.loss_mask[mine]].abs().max()) if reports else 0.0,
        "no_reference": refusal(
            lambda: runs.ranks(model, tensor, pipeline).log_probs([], temperature=1.0, reference=True)
        ),
        "temperature": refusal(lambda: rank.log_probs([batch], temperature=0.0)),
        "positions": refusal(
            lambda: rank.log_probs(
                [batch.with_columns(position_ids=torch.zeros_like(batch.token_ids))], temperature=1.0
            )
        ),
        "vocabulary": vocabulary,
        "after_refusal": after_refusal,
    }


def one_rank(runs: Runs) -> dict[str, Any]:
    """What one rank shows: 16 bits, layers computed again, a loss without a gradient, layouts and folders that are refused."""
    batch = mini_batch()
    half = runs.ranks("qwen3", dtype="bfloat16")
    exact = runs.local("qwen3").log_probs(batch, temperature=1.0)
    of_half = half.log_probs([batch], temperature=1.0)[0]
    before = half.training.optimizer.state_of("decoder.final_layernorm.weight", "weights")
    in_folder = local_weights(runs.local("qwen3"))["model.norm.weight"]
    half.forward_backward([batch], PLAIN_LOSS)
    half.optimizer_step()
    after = half.training.optimizer.state_of("decoder.final_layernorm.weight", "weights")
    directory = runs.folder / "half"
    directory.mkdir(exist_ok=True)
    half.save(directory)
    other = runs.ranks("qwen3", dtype="bfloat16")
    other.load(directory)
    kept = other.training.optimizer.state_of("decoder.final_layernorm.weight", "weights")
    full = runs.ranks("qwen3")
    constant = refusal(lambda: full.forward_backward([batch], lambda output, _: (torch.zeros(()), {})))
    return {
        "half": float((of_half - exact).abs().max()),
        "half_dtypes": sorted(
            {spec.dtype for spec in half.manifest(0).tensors} | {str(t.dtype) for t in weights_of(half).values()}
        ),
        "master_is_exact": bool(torch.equal(before, in_folder)) and not torch.equal(before, before.bfloat16().float()),
        "master_moved": float((after - before).abs().max()),
        "master_kept": bool(torch.equal(kept, after)),
        "constant": constant,
        "after_constant": str(full.optimizer_step().reason),
        "layout": refusal(lambda: runs.ranks("qwen3", 2)),
        "no_model": refusal(lambda: runs.ranks("absent")),
        "rate": refusal(lambda: runs.ranks("qwen3", lr=-1.0)),
        "pads": full.pads_sequences,
    }


def far(runs: Runs, model: str) -> dict[str, float]:
    """Log-probabilities of the last tokens of 20,000, beside one device."""
    ids = torch.randint(0, VOCABULARY, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = Batch.from_segments([Segment(ids[:-100], ids[-100:], [1] * 100, None, "g", "t", 0.0)])
    (ours,) = runs.ranks(model).log_probs([batch], temperature=TEMPERATURE, loss_tokens_only=True)
    theirs = runs.local(model).log_probs(batch, temperature=TEMPERATURE, loss_tokens_only=True)
    return {"difference": float((ours - theirs).abs().max()), "spread": float(theirs[-100:].std())}


def memory(runs: Runs) -> dict[str, Any]:
    """Bytes a parameter that a rank says it holds after a step, by type and part, and what is said where memory runs out."""
    batch, answer = mini_batch(), {}

    def starved(output: Any, _: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for dtype in ("float32", "bfloat16"):
        rank = runs.ranks("qwen3", dtype=dtype, keep_reference=True)
        numel = sum(value.numel() for value in rank.training.optimizer.parameters.values())
        beats = num_beats()
        rank.forward_backward([batch.select([0]), batch], PLAIN_LOSS)
        answer["beats"] = num_beats() - beats
        rank.optimizer_step()
        held = msgspec.structs.asdict(rank.training.memory.held())
        answer[dtype] = {part: size / numel for part, size in held.items()}
        answer["starved"] = refusal(lambda rank=rank: rank.forward_backward([batch.select([0]), batch], starved))
    return answer


def refusal(action: Callable[[], Any]) -> str:
    """What an action is refused with."""
    try:
        action()
    except (TrainerError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


MODELS = ("qwen2_tied", "qwen2", "qwen3_tied", "qwen3", "llama", "llama3")
SCENARIOS: dict[int, dict[str, Callable[[Runs], dict[str, Any]]]] = {
    1: {
        **{f"logits {model}": (lambda runs, model=model: logits(runs, model)) for model in MODELS},
        "training": lambda runs: training(runs, "qwen3", 1, 1),
        "training again": lambda runs: training(runs, "qwen3", 1, 1, enable_gradient_checkpointing=True),
        "one rank": one_rank,
        "critic in 16 bits": lambda runs: critics(runs, (1, 1), (1, 1), dtype="bfloat16"),
        "memory": memory,
        "far": lambda runs: far(runs, "llama3"),
    },
    2: {
        **{f"logits {model}": (lambda runs, model=model: logits(runs, model, 2)) for model in MODELS},
        "training tp2": lambda runs: training(runs, "qwen3_tied", 2, 1),
        "training tp2 whole": lambda runs: training(runs, "llama", 2, 1, sequence_parallel=False),
        "training tp2 whole norms": lambda runs: training(runs, "qwen3", 2, 1, sequence_parallel=False),
        "training pp2": lambda runs: training(runs, "qwen2_tied", 1, 2),
        "training dp2": lambda runs: training(runs, "llama3", 1, 1),
        "checkpoint tp2 to dp2": lambda runs: checkpoints(runs, (2, 1), (1, 1)),
        "checkpoint dp2 to pp2": lambda runs: checkpoints(runs, (1, 1), (1, 2)),
        "checkpoint pp2 to tp2": lambda runs: checkpoints(runs, (1, 2), (2, 1)),
        "critic tp2 to pp2": lambda runs: critics(runs, (2, 1), (1, 2)),
        "critic dp2 to tp2": lambda runs: critics(runs, (1, 1), (2, 1)),
        "skipping tp2": lambda runs: skipping(runs, 2, 1),
        "skipping pp2": lambda runs: skipping(runs, 1, 2),
        "skipping dp2": lambda runs: skipping(runs, 1, 1),
    },
    4: {
        "training tp2 pp2": lambda runs: training(runs, "qwen2", 2, 2),
        "training tp2 dp2": lambda runs: training(runs, "qwen3_tied", 2, 1, enable_gradient_checkpointing=True),
        "training pp2 dp2 tied": lambda runs: training(runs, "qwen2_tied", 1, 2),
        "training pp2 dp2": lambda runs: training(runs, "llama", 1, 2, enable_gradient_checkpointing=True),
    },
}


def main(rank: int, world_size: int, folder: Path) -> None:
    """Runs the scenarios of a number of ranks."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240))
    if rank == 0:
        make_models(folder)
    dist.barrier()
    results: dict[str, Any] = {}
    for name, scenario in SCENARIOS[world_size].items():
        try:
            results[name] = scenario(Runs(folder))
        except Exception:  # what one scenario shows is kept, whatever another does
            results[name] = {"error": traceback.format_exc()}
            if world_size > 1:  # the others wait in a collective: nothing that follows would be in step
                break
    (folder / f"rank-{rank}.json").write_text(json.dumps(results, default=str))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
