"""A manager of one's own in forty lines, which derives from nothing: it asks each row once and scores the answer.

`actor_rollout_ref.rollout.agent.agent_loop_manager_class=own_manager.OwnManager`, with this file in the working directory or its folder
in PYTHONPATH. Whatever runs trajectories elsewhere fits in the same way, as long as it returns the ids that were sampled.
"""

import asyncio

import msgspec

from ostinato_agent_loop import AgentLoopOutput, RolloutBatch, Trajectory, batch_metrics
from ostinato_rollout import Failure, derive_seed


class OwnManager:
    """One turn a trajectory, without agents, tools or streams."""

    def __init__(self, config, *, tokens, budget, pool, tools, reward_fn, seed):
        self._client, self._tokenizer = pool.client(seed=seed), tokens.tokenizer
        self._budget, self._reward_fn, self._seed = budget, reward_fn, seed

    def check_agents(self, names):
        """Rows may name agents; they all get the same turn."""

    async def close(self):
        """There is nothing to free."""

    async def generate_sequences(self, rows, *, n, sampling_params, step, validate=False):
        """`n` answers to each row."""
        kind = "val" if validate else "train"
        params = msgspec.structs.replace(sampling_params, max_tokens=self._budget.max_response_tokens)
        trajectories = await asyncio.gather(
            *(
                self._answer(
                    row, f"{kind}-{step}-{index}", number, params, derive_seed(self._seed, step, index, number)
                )
                for index, row in enumerate(rows)
                for number in range(n)
            )
        )
        return RolloutBatch(trajectories, batch_metrics(trajectories))

    async def _answer(self, row, group, number, params, seed):
        trajectory = Trajectory(group_id=group, trajectory_id=f"{group}/{number}", row=row)
        prompt_ids = self._tokenizer.encode_chat(row["raw_prompt"])
        try:
            params = msgspec.structs.replace(params, seed=seed)
            said = await self._client.generate(trajectory.trajectory_id, prompt_ids, params)
            segment = AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=said.token_ids,
                response_mask=[1] * len(said.token_ids),
                response_logprobs=said.logprobs,
                policy_versions=said.policy_versions,
                num_turns=2,
            )
            trajectory.segments = [segment]
            trajectory.reward = await self._reward_fn(row, [segment])
        except Exception as error:
            trajectory.failure = Failure.from_error(error, trajectory.trajectory_id)
        finally:
            await self._client.release(trajectory.trajectory_id)
        return trajectory
