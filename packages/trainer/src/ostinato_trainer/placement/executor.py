"""`trainer.executor`: what is different where a run's parts are actors. Imports Ray only for such a run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

from ostinato_agent_loop import RolloutManager
from ostinato_agent_loop.config import RolloutConfig
from ostinato_rollout import ServerPool, SessionBudget
from ostinato_tokenization import ContinuousTokens
from ostinato_trainer.config import Config

if TYPE_CHECKING:
    from ostinato_trainer.placement.places import Places

__all__ = ["AgentWorkers", "cluster_of", "manager_and_workers", "places_of"]


class AgentWorkers(Protocol):
    """Agent-loop workers in processes of their own."""

    async def start(self) -> None:
        """Start them, once the pool serves."""
        ...

    async def shutdown(self) -> None:
        """End them, before the pool ends."""
        ...


def cluster_of(config: Config) -> contextlib.AbstractContextManager[None]:
    """The cluster of the run, for as long as it lasts; nothing for a run in this process.

    Raises:
        ClusterError: There is none, or Ray does not take the settings.
    """
    if config.trainer.executor == "local":
        return contextlib.nullcontext()
    from ostinato_trainer.placement import places

    return places.cluster_of(config)


def places_of(config: Config) -> contextlib.AbstractAsyncContextManager[Places | None]:
    """Where the run's actors go; None for a run in this process. Errors as `reserved`."""
    if config.trainer.executor == "local":
        return contextlib.nullcontext()
    from ostinato_trainer.placement.places import reserved

    return reserved(config)


def manager_and_workers(
    config: Config,
    rollout: RolloutConfig,
    tokens: ContinuousTokens,
    budget: SessionBudget,
    pool: ServerPool,
    places: Places,
) -> tuple[RolloutManager, AgentWorkers]:
    """The manager of trajectories that run in workers, and these, not started.

    Args:
        config: The whole tree.
        rollout: Its node of that name, completed.
        tokens: How messages become token ids.
        budget: How long a trajectory may get.
        pool: The replicas.
        places: Where workers go.
    """
    from ostinato_trainer.placement.agent_workers import build_workers, manager_of

    workers = build_workers(config, rollout, tokens, budget, pool, places)
    return manager_of(config, rollout, tokens, budget, pool, workers), workers
