"""A few tokens that every replica samples of its own weights: where all that is trained on is of earlier policies, nothing else tells whether an
engine has the current one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from ostinato_agent_loop import Trajectory
from ostinato_engines import AsyncServerBase, SamplingParams
from ostinato_engines.types import as_token_output
from ostinato_trainer.batch import Batch
from ostinato_trainer.segments import Segment

logger = logging.getLogger(__name__)

_NUM_TOKENS: Final = 16
_PATIENCE_S: Final = 30.0
"""Longest wait for an engine that has much to do; another step asks again."""


async def sample_probe(
    servers: Sequence[AsyncServerBase], trajectories: Sequence[Trajectory], *, version: int, temperature: float
) -> Batch | None:
    """A short continuation by each replica, with its own log-probabilities; None where nobody gives one of this version in time.

    Args:
        servers: In service.
        trajectories: The first prompt of one of them is continued.
        version: Of the policy that is asked for.
        temperature: At which the policy is sampled.
    """
    prompts = (list(segment.prompt_ids) for each in trajectories for segment in each.segments)
    prompt = next(prompts, None)
    if not prompt:
        return None
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=temperature)
    asked = (_continued(server, prompt, params, version, f"probe-{version}-{at}") for at, server in enumerate(servers))
    found = [segment for segment in await asyncio.gather(*asked) if segment is not None]
    return Batch.from_segments(found) if found else None


async def _continued(
    server: AsyncServerBase, prompt: list[int], params: SamplingParams, version: int, name: str
) -> Segment | None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            try:
                output = as_token_output(await server.generate(prompt, params, name))
            finally:
                await server.release(name)
    # Whatever is wrong with a replica is found out by whoever watches over it; a server may be the user's own.
    except Exception as error:
        logger.info("A replica could not be asked for tokens of its weights: %s: %s", type(error).__name__, error)
        return None
    versions = [span.version for span in output.policy_versions]
    if not output.token_ids or output.logprobs is None or versions != [version]:
        return None
    mask = [1] * len(output.token_ids)
    return Segment(prompt, output.token_ids, mask, output.logprobs, group_id=name, trajectory_id=name, reward=0.0)
