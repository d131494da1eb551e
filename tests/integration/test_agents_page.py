"""The page about agents: its configurations load and can run, its links and examples are there."""

import re
import sys
from pathlib import Path

import pytest

from ostinato_agent_loop import agent_loop_class, load_manager_class
from ostinato_trainer.config.loading import load_config

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "agents.md").read_text()
CONFIGURATIONS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", CONFIGURATIONS, ids=range(len(CONFIGURATIONS)))
def test_its_configurations_load(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every YAML block, beside the examples, is what a run reads, and names an agent, a program or a manager that can be started."""
    (tmp_path / "examples").symlink_to(REPO / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(REPO / "examples"))
    (tmp_path / "config.yaml").write_text(re.sub(r"/opt/[\w-]+/bin/python", sys.executable, text))
    rollout = load_config(tmp_path / "config.yaml").actor_rollout_ref.rollout
    name = rollout.agent.default_agent_loop
    if name == "gateway_agent":
        pytest.importorskip("starlette", reason="the gateway needs the extra gateway")
        assert Path(rollout.agent.gateway.command[-1]).is_file()
    agent_loop_class(name).check_config(rollout, name)
    load_manager_class(rollout.agent)


def test_it_has_a_configuration_for_each_framework() -> None:
    """None was lost: three programs and a manager."""
    assert len(CONFIGURATIONS) == 4


def test_its_links_lead_somewhere() -> None:
    """Every relative link names a file of the repository."""
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert links
    assert [link for link in links if not (REPO / "docs" / link).exists()] == []
