"""Agents by name."""

from __future__ import annotations

import pickle

import pytest

from ostinato_agent_loop import (
    AgentConfigError,
    AgentLoopBase,
    SingleTurnAgentLoop,
    ToolAgentLoop,
    UnknownAgentError,
    agent_loop_class,
    load_agent_loops,
    register,
)
from ostinato_tools import load_tools


def test_the_built_in_agents_are_known():
    """single_turn_agent and tool_agent are registered by importing the package."""
    assert agent_loop_class("single_turn_agent") is SingleTurnAgentLoop
    assert agent_loop_class("tool_agent") is ToolAgentLoop


def test_an_unknown_agent_lists_those_known():
    """The error names the unknown agent and all known ones, and survives pickling."""
    with pytest.raises(
        UnknownAgentError, match=r"single_turn_agent, .*tool_agent.*got 'tool_agnet'; did you mean tool_agent\?"
    ) as caught:
        agent_loop_class("tool_agnet")
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_a_name_belongs_to_one_class():
    """Registering another class under a known name is refused; the same class again is not."""

    class Mine(AgentLoopBase):
        async def run(self, sampling_params, **row):
            raise NotImplementedError

    register("registry_test_agent")(Mine)
    assert register("registry_test_agent")(Mine) is Mine
    with pytest.raises(AgentConfigError, match="'tool_agent' must be registered once"):
        register("tool_agent")(Mine)
    with pytest.raises(AgentConfigError, match="must be a subclass of AgentLoopBase"):
        register("other")(int)
    with pytest.raises(AgentConfigError, match="name must be a text"):
        register("")


def test_yaml_adds_agents(tmp_path):
    """A list of name and _target_ registers classes by their dotted path; loading it twice is harmless."""
    path = tmp_path / "agents.yaml"
    path.write_text("- name: yaml_test_agent\n  _target_: ostinato_agent_loop.single_turn.SingleTurnAgentLoop\n")
    assert load_agent_loops(path) == load_agent_loops(str(path)) == ("yaml_test_agent",)
    assert agent_loop_class("yaml_test_agent") is SingleTurnAgentLoop


FILE = """
from ostinato_agent_loop import SingleTurnAgentLoop, register
from ostinato_tools import function_tool

@function_tool(schema={"type": "function", "function": {"name": "dice", "parameters": {"type": "object", "properties": {}}}})
def dice(): return "4"

@register("file_test_agent")
class Mine(SingleTurnAgentLoop): pass
"""


def test_a_python_file_is_tools_and_agents_at_once(tmp_path):
    """The classes that a file registers are known by their names, and the file's tools come from the same run of it."""
    path = tmp_path / "agent.py"
    path.write_text(FILE)
    assert load_agent_loops(path) == load_agent_loops(str(path)) == ("file_test_agent",)
    agent = agent_loop_class("file_test_agent")
    assert issubclass(agent, SingleTurnAgentLoop)
    assert load_tools(function_tool_path=path).names == ("dice",)
    assert pickle.loads(pickle.dumps(agent)) is agent


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"must register an agent, got none in '.*agent\.py'; write @register"),
        (
            "from ostinato_agent_loop import AgentLoopBase, register\n@register('x')\nclass Open(AgentLoopBase): pass\n",
            r"agent 'x' must be a whole class, got Open without run; write it$",
        ),
        ("1 / 0\n", "must run as Python, got ZeroDivisionError"),
        (
            "from ostinato_agent_loop import register\nregister('x')(int)\n",
            "agent.py: agent 'x' must be a subclass of AgentLoopBase",
        ),
    ],
)
def test_a_python_file_without_agents_says_why(tmp_path, text, message):
    """A file that registers nothing, or does not run, is an error that names it."""
    path = tmp_path / "agent.py"
    path.write_text(text)
    with pytest.raises(AgentConfigError, match=message) as caught:
        load_agent_loops(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x", "must be a list of agents, got dict"),
        ("", "must be a list of agents, got NoneType"),
        ("[", "must hold YAML"),
        ("- name: x\n", "entry 0 must have exactly the keys name and _target_"),
        ("- name: x\n  _target_: a.B\n  extra: 1\n", "exactly the keys"),
        ("- name: 3\n  _target_: a.B\n", "name must be a text, got 3"),
        ("- name: x\n  _target_: NoDots\n", "dotted path, got 'NoDots'"),
        ("- name: x\n  _target_: no.such.module.X\n", "must be importable, got ModuleNotFoundError"),
        ("- name: x\n  _target_: ostinato_agent_loop.nothing\n", "must be importable, got AttributeError"),
        ("- name: x\n  _target_: collections.OrderedDict\n", "must be a subclass of AgentLoopBase"),
        (
            "- name: x\n  _target_: ostinato_agent_loop.ToolAgentLoop\n" * 2,
            "entry 1: name must be unique, got 'x' twice",
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_registers_nothing(tmp_path, text, message):
    """Each mistake names the file, the entry and the cure, and no entry of that file is registered."""
    path = tmp_path / "agents.yaml"
    path.write_text(text)
    with pytest.raises(AgentConfigError, match=message) as caught:
        load_agent_loops(path)
    assert "agents.yaml" in str(caught.value)
    with pytest.raises(UnknownAgentError):
        agent_loop_class("x")


def test_a_missing_file_is_named():
    """A path that does not exist is an error with that path."""
    with pytest.raises(AgentConfigError, match=r"'/no/such/agents\.yaml' \(No such file"):
        load_agent_loops("/no/such/agents.yaml")
