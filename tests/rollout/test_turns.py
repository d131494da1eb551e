"""Messages made of turns."""

import json

import pytest

from ostinato_rollout.turns import assistant_message
from ostinato_tools import ToolCall
from ostinato_tools.parsers import ParsedTurn


@pytest.mark.parametrize(
    ("raw", "arguments", "written"),
    [
        ('{"a":  1}', {"a": 1}, '{"a":  1}'),
        ("<parameter=a>1</parameter>", {"a": 1, "b": "é"}, '{"a": 1, "b": "é"}'),
        ('{"a": 1', None, '{"a": 1'),
    ],
)
def test_arguments_of_a_message_are_json(raw: str, arguments: dict | None, written: str) -> None:
    """A message has the arguments as they were written if that is JSON, else as JSON; malformed ones stay as they are."""
    call = ToolCall(
        name="f", arguments=arguments, raw_arguments=raw, id="call_0", error=None if arguments else "broken"
    )
    message = assistant_message(ParsedTurn("", None, (call,), ()), raw)
    text = message["tool_calls"][0]["function"]["arguments"]
    assert text == written
    assert arguments is None or json.loads(text) == arguments
