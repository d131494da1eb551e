"""Log-probabilities where ranks split the vocabulary, beside those of the whole one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ostinato_trainer.backends.base import EntropyMode
from ostinato_trainer.backends.token_log_probs import VocabularyShard, chosen_log_probs, chosen_log_probs_of_shard

HIDDEN, VOCABULARY, TOKENS = 8, 30, 13


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # else the host's own name is looked up


def on_ranks(work: Callable[[int, Any], Any], count: int) -> list[Any]:
    """What each of several threads, each with its place in a gloo group, makes of a rank and the group."""
    store = dist.HashStore()
    groups: list[Any] = []  # none ends while another may still read from it

    def run(rank: int) -> Any:
        group = dist.ProcessGroupGloo(store, rank, count, timedelta(seconds=60))
        groups.append(group)
        return work(rank, group)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


@pytest.mark.parametrize("entropy", list(EntropyMode))
@pytest.mark.parametrize(("count", "chunk_tokens"), [(1, None), (2, None), (3, 4)])
def test_shares_of_a_vocabulary_answer_like_the_whole(
    entropy: EntropyMode, count: int, chunk_tokens: int | None
) -> None:
    """Values and gradients in float64 are those of the whole output layer, on every rank, whatever the chunks and where targets stand."""
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64) * 3
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    targets[:2] = torch.tensor([0, VOCABULARY - 1])
    of_chosen, of_spread = torch.randn(2, TOKENS, dtype=torch.float64)

    def total(chosen: torch.Tensor, spread: torch.Tensor | None) -> torch.Tensor:
        loss = (chosen * of_chosen).sum()
        return loss + (spread * of_spread).sum() if spread is not None and entropy is EntropyMode.GRADIENT else loss

    states = hidden.clone().requires_grad_()
    expected = chosen_log_probs(states, targets, head, vocab_size=VOCABULARY, temperature=0.7, entropy=entropy)
    total(*expected).backward()
    width = VOCABULARY // count

    def answer(rank: int, group: Any) -> tuple[Any, ...]:
        mine = hidden.clone().requires_grad_()
        weight = head.weight.detach()[rank * width : (rank + 1) * width].clone().requires_grad_()
        shard = VocabularyShard(group, rank * width)
        values = chosen_log_probs_of_shard(
            mine, targets, weight, shard=shard, temperature=0.7, entropy=entropy, chunk_tokens=chunk_tokens
        )
        total(*values).backward()
        return (*values, mine.grad, weight.grad)

    answers = on_ranks(answer, count)
    for chosen, spread, of_hidden, _ in answers:
        torch.testing.assert_close(chosen, expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_hidden, states.grad, rtol=1e-11, atol=1e-12)
        assert (spread is None) is (entropy is EntropyMode.OFF)
        if spread is not None:
            torch.testing.assert_close(spread, expected[1], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.cat([each[3] for each in answers]), head.weight.grad, rtol=1e-11, atol=1e-12)


def test_extreme_logits_and_no_tokens_are_answered() -> None:
    """A logit of thousands in another rank's part neither overflows nor underflows to a NaN; no targets give no values."""
    weight = torch.zeros(4, 1)
    weight[3] = 1.0
    hidden = torch.tensor([[5000.0], [-5000.0]])

    def answer(rank: int, group: Any) -> tuple[Any, Any]:
        part = weight[2 * rank : 2 * rank + 2].clone().requires_grad_()
        shard = VocabularyShard(group, 2 * rank)
        values = chosen_log_probs_of_shard(hidden, torch.tensor([3, 0]), part, shard=shard, entropy=EntropyMode.VALUE)
        empty = chosen_log_probs_of_shard(hidden[:0], torch.zeros(0, dtype=torch.int64), part, shard=shard)
        return values, empty

    for (chosen, spread), (empty, _) in on_ranks(answer, 2):
        torch.testing.assert_close(chosen, torch.tensor([0.0, -torch.log(torch.tensor(3.0))]))
        assert spread is not None
        torch.testing.assert_close(spread, torch.tensor([0.0, torch.log(torch.tensor(3.0))]))
        assert empty.shape == (0,)
