"""`gateway_agent`: runs a program against an address of its own and takes what it was answered as the trajectory.

Knows rows, programs and functions; what is said goes through the recording.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ostinato_agent_loop.base import AgentLoopBase
from ostinato_agent_loop.config import RolloutConfig
from ostinato_agent_loop.errors import AgentConfigError, AgentProgramError, AgentRowError
from ostinato_agent_loop.gateway.address import GatewayAddress, open_address
from ostinato_agent_loop.gateway.program import check_command, run_program
from ostinato_agent_loop.gateway.recording import Recording
from ostinato_agent_loop.output import AgentLoopOutput, TrajectoryEnd
from ostinato_agent_loop.registry import register
from ostinato_engines import SamplingParams
from ostinato_tools.loading import execute_file

_SECRET = ("reward_model",)
"""Fields that the reward reads and no agent should see."""
_NO_PROXY = "127.0.0.1,localhost"


@register("gateway_agent")
class GatewayAgentLoop(AgentLoopBase):
    """Runs `agent.gateway.command` or `agent.gateway.function` for each trajectory.

    Derive from it and override `act` for an agent that is not configured; its other methods stay as they are.
    """

    @classmethod
    def check_config(cls, config: RolloutConfig, name: str) -> None:
        """See AgentLoopBase."""
        super().check_config(config, name)
        gateway = config.agent.gateway
        if cls.act is not GatewayAgentLoop.act:
            return
        if gateway.function is not None:
            load_function(gateway.function)
        elif not gateway.command:
            raise AgentConfigError(
                f"agent.gateway.command or agent.gateway.function must be set for agent {name!r}, got neither;"
                " name the program that it runs"
            )
        else:
            check_command(gateway)

    @classmethod
    def gives_reward(cls, config: RolloutConfig) -> bool:
        """See AgentLoopBase."""
        return config.agent.gateway.own_reward

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """See AgentLoopBase. `extra_fields` holds `program_output` (what the program wrote, or the function returned; None of one
        that failed when it was refused for a limit of the trajectory) and `messages` (the conversation that was answered
        last)."""
        gateway = self.context.agent.gateway
        recording = Recording(
            self.context,
            row,
            sampling_params,
            max_segments=gateway.max_segments,
            own_reward=gateway.own_reward,
        )
        # A copy, since the row is that of other trajectories and of the reward, too.
        seen = copy.deepcopy({name: value for name, value in row.items() if name not in _SECRET})
        async with open_address(recording.app, recording.api_key) as address:
            try:
                output = await self.act(address, seen)
            except (Exception, SystemExit) as error:
                if recording.engine_error is not None:
                    raise recording.engine_error from error
                if recording.end is TrajectoryEnd.PROGRAM_ENDED or recording.own_reward.missing() is not None:
                    if isinstance(error, SystemExit):  # it would end the whole run
                        raise AgentProgramError(
                            f"an agent in this process must return or raise, got exit({error.code!r}); raise an error"
                        ) from error
                    raise
                # It was refused for a limit of the trajectory, and few programs expect that: an end like any other, unless
                # the program owes a reward.
                output = None
            return await recording.outputs({"program_output": output})

    async def act(self, address: GatewayAddress, row: Mapping[str, Any]) -> Any:
        """Do what the agent does, asking the model at `address`; by default run the program or function of the settings.

        Args:
            address: Where the model is asked.
            row: The dataset's row, without what only the reward may know.

        Returns:
            What the reward may read as `program_output`.

        Raises:
            Exception: The trajectory's failure.
        """
        gateway = self.context.agent.gateway
        if gateway.function is not None:
            function = load_function(gateway.function)
            return await function(base_url=address.base_url, api_key=address.api_key, row=row)
        result = await run_program(
            gateway.command,
            stdin=_as_json(row),
            env={
                "NO_PROXY": _NO_PROXY,
                "no_proxy": _NO_PROXY,
                **gateway.env,
                "OPENAI_BASE_URL": address.base_url,
                "OPENAI_API_KEY": address.api_key,
            },
            pass_env=gateway.pass_env,
            cwd=gateway.cwd,
        )
        result.check()
        return result.stdout


@cache
def load_function(target: str) -> Callable[..., Any]:
    """Import a coroutine function by `module:name` or `file.py:name`.

    Raises:
        AgentConfigError: There is none.
    """
    where, _, name = target.rpartition(":")
    try:
        module = execute_file(Path(where).expanduser()) if where.endswith(".py") else importlib.import_module(where)
        function = getattr(module, name)
    except (Exception, SystemExit) as error:
        raise AgentConfigError(
            f"agent.gateway.function must be importable, got {type(error).__name__} for {target!r}: {error}; check the path"
        ) from error
    if not inspect.iscoroutinefunction(function):
        raise AgentConfigError(
            f"agent.gateway.function must be a coroutine function, got {function!r}; write `async def {name}`"
        )
    try:
        inspect.signature(function).bind(base_url="", api_key="", row={})
    except TypeError as error:
        raise AgentConfigError(
            f"agent.gateway.function must take base_url, api_key and row by name, got {error}; mend {name}"
        ) from None
    return function


def _as_json(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise AgentRowError(
            f"a row must be JSON to be read by a program, got {error}; keep such fields out of the dataset"
        ) from error
