"""An environment of `verifiers` as an agent: its harness asks the policy, its task's rewards score what came of it.

Runs under an interpreter that has verifiers 0.4 (`pip install verifiers`) and needs nothing else.

    python verifiers_agent.py rows CONFIG.json > rows.jsonl      # the tasks of an environment as rows, for data.train_files
    python verifiers_agent.py < row.json                         # one rollout; what `agent.gateway.command` runs

CONFIG.json is the environment's own configuration, as `[env]` has it in verifiers: taskset, agent, harness, runtime.
"""

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


def rows(config):
    """Each task of the environment as a row: its prompt for people and lengths, and what is needed to make it again."""
    environment = vf.load_environment(vf.resolve_env_config(config))
    for task in environment.taskset:
        prompt, system = task.data.prompt or [], task.data.system_prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        yield {
            "data_source": config["taskset"]["id"],
            "prompt": [*([{"role": "system", "content": system}] if system else []), *messages],
            "agent_name": "gateway_agent",
            "extra_info": {"verifiers": json.dumps({"env": config, "task": task.data.model_dump(mode="json")})},
        }


async def rollout(config, data):
    """Play one task against the policy, and return the trace of it."""
    environment = vf.load_environment(vf.resolve_env_config(config))
    task_class = type(environment.taskset).task_type()
    task = task_class(task_class.data_type().model_validate(data), environment.config.taskset.task)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        (slot,) = environment.slots(task)
        episode = await environment.run_slot(slot, vf.ModelContext(model="policy", client=client))
    if len(episode.traces) != 1:
        raise ValueError(f"an episode must have one trace, whose reward it is, got {len(episode.traces)}")
    if not episode.ok:
        error = episode.traces[0].last_error or episode.last_error
        raise RuntimeError(f"the episode must end well, got {error.type}: {error.message}")
    return episode.traces[0]


def give_reward(trace):
    """Tell the trajectory's reward, with its parts and metrics by name."""
    parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    measured = {name: value for name, value in trace.metrics.items() if value is not None}
    extra = {**measured, **parts, "stop_condition": str(trace.stop_condition)}
    body = json.dumps({"reward": trace.reward, "extra": extra}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/rl/set_reward"
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rows"]:
        for row in rows(json.loads(Path(sys.argv[2]).read_text())):
            print(json.dumps(row))
    else:
        given = json.loads(json.load(sys.stdin)["extra_info"]["verifiers"])
        give_reward(asyncio.run(rollout(given["env"], given["task"])))
