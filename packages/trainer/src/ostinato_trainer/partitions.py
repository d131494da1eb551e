"""How sequences are dealt out to micro-batches: pure functions over lengths, which know nothing of tensors or models.

Every function returns lists of positions that together hold each position exactly once. Gradients do not depend on
the split (see `ostinato_trainer.algorithms.aggregation`), so these functions look at cost alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from ostinato_trainer.errors import BatchError

_ATTENTION_EQUALS_REST = 32_768
"""Length in tokens at which attention costs as much as everything else."""


def even_chunks(count: int, max_size: int) -> list[range]:
    """Cuts `range(count)` into as few consecutive chunks of at most `max_size` as possible, sizes differing by one at
    most.

    Raises:
        BatchError: `max_size` is below 1.
    """
    if max_size < 1:
        raise BatchError(f"max_size must be at least 1, got {max_size}; raise the (micro-)batch size")
    num_chunks = -(-count // max_size)
    return [range(count * chunk // num_chunks, count * (chunk + 1) // num_chunks) for chunk in range(num_chunks)]


def chunks_by_count(lengths: Sequence[int], max_sequences: int) -> list[list[int]]:
    """Micro-batches of at most `max_sequences`, neighbours in length together so that padding is small.

    Args:
        lengths: Tokens of each sequence.
        max_sequences: Upper bound of sequences in a micro-batch, at least 1.
    """
    order = _longest_first(lengths)
    return [[order[place] for place in chunk] for chunk in even_chunks(len(order), max_sequences)]


def chunks_by_padded_tokens(lengths: Sequence[int], max_tokens: int, *, allow_longer: bool = False) -> list[list[int]]:
    """Micro-batches whose padded size (sequences x longest) stays within `max_tokens`, evened out.

    As few micro-batches as cutting the length-sorted sequences allows; among such cuts, the one whose largest
    micro-batch is smallest.

    Args:
        lengths: Tokens of each sequence.
        max_tokens: Upper bound of the padded tokens of one micro-batch.
        allow_longer: A sequence above the bound gets a micro-batch of its own instead of an error.

    Raises:
        BatchError: a sequence is longer than `max_tokens`.
    """
    order = _longest_first(lengths)
    if not order:
        return []
    if not allow_longer:
        check_longest(lengths[order[0]], max_tokens)
    ordered = [lengths[place] for place in order]
    limit = max(max_tokens, ordered[0])
    cuts = _cut_padded(ordered, limit)
    low, high = ordered[0], limit
    while low < high:
        middle = (low + high) // 2
        tighter = _cut_padded(ordered, middle)
        if len(tighter) <= len(cuts):
            cuts, high = tighter, middle
        else:
            low = middle + 1
    return [order[start:stop] for start, stop in cuts]


def chunks_by_tokens(lengths: Sequence[int], max_tokens: int, *, allow_longer: bool = False) -> list[list[int]]:
    """Micro-batches whose tokens without padding stay within `max_tokens`, balanced by giving the costliest to the
    one that costs least.

    A sequence costs its tokens and, as attention goes over all pairs, their square: see `cost_of`. Where balancing costs
    would take more micro-batches than balancing tokens, tokens are balanced.

    Args:
        lengths: Tokens of each sequence.
        max_tokens: Upper bound of the tokens of one micro-batch.
        allow_longer: A sequence above the bound gets a micro-batch of its own instead of an error.

    Raises:
        BatchError: a sequence is longer than `max_tokens`.
    """
    order = _longest_first(lengths)
    if not order:
        return []
    if not allow_longer:
        check_longest(lengths[order[0]], max_tokens)
    limit = max(max_tokens, lengths[order[0]])
    num_chunks = max(1, -(-sum(lengths) // limit))
    costs = [cost_of(length) for length in lengths]
    while True:
        for weights in (costs, lengths):
            chunks = _deal(order, weights, num_chunks)
            if all(sum(lengths[place] for place in chunk) <= limit for chunk in chunks):
                return chunks
        num_chunks += max(1, num_chunks // 16)


def cost_of(length: int) -> float:
    """What a forward pass over a sequence costs, in tokens of a short one.

    Attention takes `12 x layers x width x length / 2` operations a token, everything else `2 x parameters`; they are equal at
    a length of `parameters / (3 x layers x width)`, which `_ATTENTION_EQUALS_REST` is near to for models of a few billion.
    """
    return length * (1 + length / _ATTENTION_EQUALS_REST)


def chunks_of_owners(
    lengths: Sequence[int], owners: Sequence[int], fits: Callable[[Sequence[int]], bool]
) -> list[list[int]]:
    """Micro-batches in which all sequences of an owner stand together: filled one after the other, the longest first.

    Args:
        lengths: Tokens of each sequence.
        owners: Whose each sequence is.
        fits: Whether sequences of these lengths may be one micro-batch; an owner that does not fit gets one of its own.
    """
    belongings: dict[int, list[int]] = {}
    for place in _longest_first(lengths):
        belongings.setdefault(owners[place], []).append(place)
    chunks: list[list[int]] = []
    for places in belongings.values():
        if chunks and fits([lengths[place] for place in (*chunks[-1], *places)]):
            chunks[-1] += places
        else:
            chunks.append(places)
    return chunks


def deal_to_ranks(
    parts: Sequence[Sequence[int]],
    owners: Sequence[int],
    num_ranks: int,
    cost: Callable[[Sequence[int]], float],
) -> list[list[list[int]]]:
    """Deals micro-batches out to ranks that work in rounds, one micro-batch each and all at the same time.

    As few rounds as the parts need; where ranks would stand idle in one, the costliest part is halved, between owners. A round holds parts of like
    cost, the costliest come first, and who gets the costliest of a round alternates.

    Args:
        parts: The sequences of each micro-batch, by position; none of them empty.
        owners: Whose each sequence is; an owner's sequences of one part stay together.
        num_ranks: At least 1.
        cost: Of a micro-batch of these sequences.

    Returns:
        For each rank its micro-batches in order, equally many for all ranks; an empty one where there was nothing left to halve.
    """
    num_rounds = -(-len(parts) // num_ranks)
    ordered = [(-cost(part), place, list(part)) for place, part in enumerate(parts)]
    heapq.heapify(ordered)
    whole: list[tuple[float, int, list[int]]] = []
    while ordered and len(ordered) + len(whole) < num_rounds * num_ranks:
        entry = heapq.heappop(ordered)
        halves = _halves(entry[2], owners, cost)
        if len(halves) == 1:
            whole.append(entry)
            continue
        for half in halves:
            heapq.heappush(ordered, (-cost(half), len(parts) + len(ordered) + len(whole), half))
    queue = [part for _, _, part in sorted([*ordered, *whole])]
    queue += [[] for _ in range(num_rounds * num_ranks - len(queue))]
    shares: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for number in range(num_rounds):
        turn = queue[number * num_ranks : (number + 1) * num_ranks]
        for share, part in zip(shares, turn if number % 2 == 0 else reversed(turn), strict=True):
            share.append(part)
    return shares


def _halves(part: Sequence[int], owners: Sequence[int], cost: Callable[[Sequence[int]], float]) -> list[list[int]]:
    """Two parts of about the same cost, or one where all of it has one owner."""
    belongings: dict[int, list[int]] = {}
    for place in part:
        belongings.setdefault(owners[place], []).append(place)
    if len(belongings) < 2:
        return [list(part)]
    groups = list(belongings.values())
    weights = [cost(group) for group in groups]
    order = sorted(range(len(groups)), key=lambda place: (-weights[place], place))
    return [sorted(place for group in chunk for place in groups[group]) for chunk in _deal(order, weights, 2)]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))


def check_longest(longest: int, max_tokens: int) -> None:
    """Refuse a budget that one sequence exceeds.

    Raises:
        BatchError: naming what to change.
    """
    if longest > max_tokens:
        raise BatchError(
            f"max_tokens must be at least the longest sequence ({longest} tokens), got {max_tokens}; "
            "raise ppo_max_token_len_per_gpu or lower data.max_prompt_length / data.max_response_length"
        )


def _cut_padded(ordered: list[int], limit: int) -> list[tuple[int, int]]:
    """Greedy cut of lengths sorted downwards; every cut's first entry is its longest."""
    cuts, start = [], 0
    while start < len(ordered):
        stop = min(len(ordered), start + max(1, limit // max(1, ordered[start])))
        cuts.append((start, stop))
        start = stop
    return cuts


def _deal(order: list[int], weights: Sequence[float], num_chunks: int) -> list[list[int]]:
    """Longest-processing-time rule: each sequence goes to the chunk with the least weight so far."""
    chunks: list[list[int]] = [[] for _ in range(num_chunks)]
    heap = [(0.0, chunk) for chunk in range(num_chunks)]
    for place in order:
        weight, chunk = heapq.heappop(heap)
        chunks[chunk].append(place)
        heapq.heappush(heap, (weight + weights[place], chunk))
    return [chunk for chunk in chunks if chunk]
