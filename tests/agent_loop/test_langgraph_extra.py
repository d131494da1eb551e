"""The extra langgraph: who does not ask for it does not need it, and who does learns how to install it."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from ostinato_agent_loop import AgentLoopError, TrajectoryEnd
from ostinato_agent_loop.errors import GraphInputError, GraphStateError, TurnLimitError


def printed(program):
    """What a Python program prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_the_agent_loop_needs_no_langgraph():
    """Importing the package, and asking for another agent, loads neither LangGraph nor LangChain."""
    program = """
import sys
from ostinato_agent_loop import agent_loop_class
agent_loop_class("tool_agent")
print([name for name in ("langgraph", "langchain_core", "pydantic") if name in sys.modules])
"""
    assert printed(program) == "[]"


@pytest.mark.parametrize("missing", ["langgraph", "langchain_core"])
def test_a_missing_extra_says_how_to_install_it(missing):
    """Where one of the packages is missing, asking for react_agent is an error of the tree that names the command."""
    program = f"""
import sys
sys.modules[{missing!r}] = None
from ostinato_agent_loop import agent_loop_class
from ostinato_engines import MissingDependencyError
try:
    agent_loop_class("react_agent")
except MissingDependencyError as error:
    print(error)
"""
    assert "pip install 'ostinato-agent-loop[langgraph]'" in printed(program)


def test_errors_are_of_one_tree_and_survive_pickling():
    """Errors of graphs are errors of the package and of the standard library, and keep what they carry."""
    limit = TurnLimitError("m", end=TrajectoryEnd.TURN_LENGTH)
    for error, standard in (
        (GraphInputError("m"), ValueError),
        (GraphStateError("m"), RuntimeError),
        (limit, RuntimeError),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, AgentLoopError)
        assert isinstance(again, standard)
        assert (type(again), str(again), vars(again)) == (type(error), "m", vars(error))
