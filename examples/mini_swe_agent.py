"""mini-swe-agent, trained: it solves a row's task in an empty folder, and the task's own test gives the reward.

Runs under an interpreter that has mini-swe-agent 2 (`pip install mini-swe-agent`) and needs nothing else. A row brings in `extra_info`
the `task`, its `files` by path, and a shell command `test` that ends with status 0 where the task is solved.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", str(Path.cwd() / ".mini"))
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")  # a refused request would only be refused again
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
# The commands of the model inherit this environment, and the key opens the reward.
BASE_URL, API_KEY = os.environ.pop("OPENAI_BASE_URL"), os.environ.pop("OPENAI_API_KEY")

import litellm  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.config import get_config_from_spec  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models.litellm_model import LitellmModel  # noqa: E402


def solve(task, step_limit):
    """Let the agent work, and return how it ended."""
    settings = get_config_from_spec("mini.yaml")  # the prompts that come with the package
    asked = {"api_base": BASE_URL, "api_key": API_KEY, "max_retries": 0}
    model = LitellmModel(
        **{**settings["model"], "model_kwargs": asked}, model_name="openai/policy", cost_tracking="ignore_errors"
    )
    prompts = {name: settings["agent"][name] for name in ("system_template", "instance_template")}
    agent = DefaultAgent(model, LocalEnvironment(**settings["environment"]), **prompts, step_limit=step_limit)
    try:
        return agent.run(task)["exit_status"]
    except litellm.exceptions.BadRequestError as error:  # a limit of the trajectory; what was done so far is tested
        return f"refused: {error.message}"


def give_reward(reward, extra):
    """Tell the trajectory's reward, once."""
    body = json.dumps({"reward": reward, "extra": extra}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    urllib.request.urlopen(urllib.request.Request(f"{BASE_URL}/rl/set_reward", body, headers)).close()


if __name__ == "__main__":
    given = json.load(sys.stdin)["extra_info"]
    for path, text in given["files"].items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    exit_status = solve(given["task"], given.get("step_limit", 50))
    try:  # a test that hangs has not passed, like one that fails
        limit = given.get("test_timeout_s", 300)
        passed = subprocess.run(given["test"], shell=True, stdout=sys.stderr, timeout=limit).returncode == 0
    except subprocess.TimeoutExpired:
        passed = False
    give_reward(float(passed), {"exit_status": exit_status[:200], "submitted": exit_status == "Submitted"})
