"""A resources server of NeMo Gym as an environment: its tools answer the policy's calls, its `/verify` gives the reward.

Needs nothing but Python. NEMO_GYM_URL is where the server listens, one for all trajectories; each has a session of its own there.

    python nemo_gym_agent.py rows DATA.jsonl > rows.jsonl      # a dataset of NeMo Gym as rows, for data.train_files
    python nemo_gym_agent.py < row.json                        # one rollout; what `agent.gateway.command` runs
"""

import json
import os
import sys
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

MAX_STEPS = 50
session = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))


def rows(lines):
    """Each line of a dataset as a row: its prompt for people and lengths, and the line as it is."""
    for line in filter(str.strip, lines):
        asked = json.loads(line)["responses_create_params"]["input"]
        prompt = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        extra = {"nemo_gym": line.strip()}
        yield {"data_source": "nemo_gym", "prompt": prompt, "agent_name": "gateway_agent", "extra_info": extra}


def post(url, content, **headers):
    """The text of the answer to some JSON."""
    headers = {"Content-Type": "application/json", **headers}
    with session.open(urllib.request.Request(url, json.dumps(content).encode(), headers), timeout=600) as answer:
        return answer.read().decode()


def ask(path, content):
    """What the policy's address answers; its refusal ends the rollout with the reason."""
    key = f"Bearer {os.environ['OPENAI_API_KEY']}"
    try:
        return json.loads(post(os.environ["OPENAI_BASE_URL"] + path, content, Authorization=key))
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())


def called(server, call):
    """What a tool answers; its refusal, and arguments that are no JSON, are answers as well."""
    try:
        return post(f"{server}/{call['name']}", json.loads(call["arguments"]))
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except ValueError as error:
        return json.dumps({"error": f"the arguments must be JSON, got {error}"})


def rollout(server, row):
    """Let the policy call tools until it answers; return the response that is to be verified."""
    params = row["responses_create_params"]
    asked = params["input"]
    asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    # A policy is not constrained to a schema, so `strict` is not asked for; servers check what they get.
    tools = [{**tool, "strict": False} for tool in params.get("tools") or []]
    done = []
    for _ in range(MAX_STEPS):
        response = ask("/responses", {"model": "policy", "input": asked + done, "tools": tools})
        done += response["output"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        done += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": called(server, call)}
            for call in calls
        ]
        if not calls or response["status"] != "completed":
            break
    return response | {"output": done}


if __name__ == "__main__":
    if sys.argv[1:2] == ["rows"]:
        for row in rows(Path(sys.argv[2]).read_text().splitlines()):
            print(json.dumps(row))
    else:
        server = os.environ["NEMO_GYM_URL"].rstrip("/")
        row = json.loads(json.load(sys.stdin)["extra_info"]["nemo_gym"])
        post(f"{server}/seed_session", row)
        verified = json.loads(post(f"{server}/verify", row | {"response": rollout(server, row)}))
        measured = {name: value for name, value in verified.items() if isinstance(value, bool | int | float)}
        reward = measured.pop("reward")
        ask("/rl/set_reward", {"reward": reward, "extra": measured})
