"""The update of the policy, beside TRL's: `uv run python -m benchmarks.trainer [--rounds N] [--threads N]`.

A batch of GRPO trajectories (groups of four; lengths as of dialogues with tools, tool tokens masked) with old and reference
log-probabilities is recorded once. From the same weights, TRL's `GRPOTrainer` and our backend then take turns making optimizer steps on
it, in float32 on the CPU: clipped policy loss, KL term, entropy as a metric, clipping of the gradient, AdamW. TRL runs in an
environment of its own (`uv run python -m benchmarks.peers trl`), the batch whole and padded, as it does by default; ours in
one packed micro-batch. Nothing is generated, and log-probabilities before the update are left out on both sides.

- `cpu_ratio_vs_trl`: TRL's seconds over ours, the median over rounds, for trajectories of unlike length; at least 1 is as fast;
- `cpu_ratio_equal_lengths`: the same where every trajectory has the same length, so that TRL pads nothing;
- `loss_difference`: the largest difference of the two losses over all steps of both, each side having made all steps before.

Where there is a GPU, `benchmarks.trainer_gpu` runs too and its figures are in the line.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.peers import PeerProcess, python_of
from ostinato_trainer.algorithms.advantages import with_advantages
from ostinato_trainer.algorithms.aggregation import with_loss_weights
from ostinato_trainer.algorithms.policy_losses import PolicyLossOptions, policy_loss_fn
from ostinato_trainer.backends.base import EntropyMode
from ostinato_trainer.backends.local import LocalBackend, LocalBackendOptions
from ostinato_trainer.batch import Batch
from ostinato_trainer.segments import Segment

GROUPS, GROUP_SIZE = 4, 4
VOCAB = 4096
OPTIONS = {"lr": 1e-6, "kl_loss_coef": 0.05, "clip_ratio": 0.2, "grad_clip": 1.0}


def make_model() -> Qwen3ForCausalLM:
    """Qwen3's architecture, small: 1.3M parameters."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def make_batch(*, equal: bool) -> Batch:
    """Trajectories of a prompt, an answer, and for half of them a tool's reply and another answer."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    segments = []
    for group in range(GROUPS):
        num_prompt = 64 if equal else draw(24, 128)
        prompt = torch.randint(3, VOCAB, (num_prompt,), generator=generator).tolist()
        for place in range(GROUP_SIZE):
            mask = [1] * (128 if equal else draw(16, 192))
            if place % 2:
                mask += [0] * (32 if equal else draw(8, 64)) + [1] * (32 if equal else draw(8, 64))
            elif equal:
                mask += [1] * 64
            ids = torch.randint(3, VOCAB, (len(mask),), generator=generator).tolist()
            reward = float(draw(0, 100)) / 100
            segments.append(Segment(prompt, ids, mask, None, f"g{group}", f"g{group}/{place}", reward))
    return with_advantages(Batch.from_segments(segments), "grpo")


def record(backend: LocalBackend, batch: Batch) -> Batch:
    """The batch with log-probabilities of policies near to the one at the start."""
    start = backend.log_probs(batch, temperature=1.0)
    wave = torch.sin(torch.arange(batch.num_tokens, dtype=torch.float32))
    return batch.with_columns(old_log_probs=start + 0.15 * wave, ref_log_probs=start + 0.3 * wave.flip(0))


def rows_of(batch: Batch) -> list[dict[str, Any]]:
    """The same batch for TRL, a row a trajectory."""
    assert batch.old_log_probs is not None
    assert batch.ref_log_probs is not None
    assert batch.advantages is not None
    rows = []
    for place in range(batch.num_sequences):
        start, stop = batch.cu_seqlens[place : place + 2].tolist()
        split = start + int(batch.prompt_lengths[place])
        mask = batch.loss_mask[split:stop]
        rows.append(
            {
                "prompt_ids": batch.token_ids[start:split].tolist(),
                "response_ids": batch.token_ids[split:stop].tolist(),
                "response_mask": mask.int().tolist(),
                "old_log_probs": batch.old_log_probs[split:stop].tolist(),
                "ref_log_probs": batch.ref_log_probs[split:stop].tolist(),
                "advantage": float(batch.advantages[split:stop][mask][0]),
            }
        )
    return rows


class Ours:
    """Our backend on the batch."""

    def __init__(self, backend: LocalBackend, batch: Batch) -> None:
        self.backend = backend
        self._batch = with_loss_weights(batch, "token-mean")
        coefficients = {name: OPTIONS[name] for name in ("kl_loss_coef", "clip_ratio")}
        self._loss_fn = policy_loss_fn(PolicyLossOptions(**coefficients), "vanilla")

    def step(self) -> dict[str, float]:
        """Seconds of one optimizer step, and its loss."""
        started = time.perf_counter()
        parts = self._batch.split_by_tokens(self._batch.num_tokens, padded=self.backend.pads_sequences)
        metrics = self.backend.forward_backward(parts, self._loss_fn, entropy=EntropyMode.VALUE)
        self.backend.optimizer_step()
        seconds = time.perf_counter() - started
        loss = metrics["actor/pg_loss"] + OPTIONS["kl_loss_coef"] * metrics["actor/kl_loss"]
        return {"seconds": seconds, "loss": loss}


def compare(peer: PeerProcess, folder: Path, *, equal: bool, rounds: int, threads: int) -> tuple[float, float, str]:
    """The median ratio of TRL's seconds to ours, the largest difference of losses, and what was compared."""
    model = make_model()
    model.save_pretrained(folder / "model")
    options = LocalBackendOptions(
        device="cpu", lr=OPTIONS["lr"], weight_decay=0.0, grad_clip=OPTIONS["grad_clip"], max_tokens_per_forward=8192
    )
    backend = LocalBackend(model, options)
    batch = record(backend, make_batch(equal=equal))
    (folder / "batch.json").write_text(json.dumps(rows_of(batch)), encoding="utf-8")
    load = {
        "model": str(folder / "model"),
        "batch": str(folder / "batch.json"),
        "options": OPTIONS,
        "group_size": GROUP_SIZE,
        "threads": threads,
    }
    if error := peer.ask({"load": load}).get("error"):
        raise SystemExit(f"TRL must make a step, but it cannot: {error}")
    ours, ratios, differences = Ours(backend, batch), [], []
    for round_number in range(rounds + 1):
        mine, theirs = ours.step(), peer.ask({"step": 1})
        if "error" in theirs:
            raise SystemExit(f"TRL must make a step, but it cannot: {theirs['error']}")
        differences.append(abs(mine["loss"] - theirs["loss"]))
        if round_number:  # the first warms both
            ratios.append(theirs["seconds"] / mine["seconds"])
        print(
            f"  ours {mine['seconds']:.3f} s, loss {mine['loss']:.6f}; "
            f"TRL {theirs['seconds']:.3f} s, loss {theirs['loss']:.6f}",
            flush=True,
        )
    longest = int(batch.sequence_lengths.max())
    what = f"{batch.num_sequences} trajectories, {batch.num_tokens} tokens, {batch.num_sequences * longest} when padded"
    return statistics.median(ratios), max(differences), what


def main() -> int:
    """Prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer", type=Path, help="an interpreter with TRL; by default that of its environment")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    python = arguments.peer or python_of("trl")
    if python is None:
        print("TRL's environment is missing; run `python -m benchmarks.peers trl`", file=sys.stderr)
    else:
        torch.set_num_threads(arguments.threads)
        differences = []
        for name, equal in (("cpu_ratio_vs_trl", False), ("cpu_ratio_equal_lengths", True)):
            peer = PeerProcess("trl", python, "trainer_peer.py")
            with tempfile.TemporaryDirectory() as folder:
                ratio, difference, what = compare(
                    peer, Path(folder), equal=equal, rounds=arguments.rounds, threads=arguments.threads
                )
            peer.close()
            print(f"{name}: {what}: {ratio:.2f}, losses differ by {difference:.1e} at most", flush=True)
            figures[name] = round(ratio, 3)
            differences.append(difference)
        figures["loss_difference"] = max(differences)
    if torch.cuda.is_available():
        from benchmarks.trainer_gpu import measure_all

        figures |= measure_all()
    print(json.dumps(figures))
    return 0 if figures else 1


if __name__ == "__main__":
    sys.exit(main())
