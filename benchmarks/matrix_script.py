"""The conversations of the template matrix: what every kind of template is asked to continue."""

from collections.abc import Collection
from typing import Any, NamedTuple

HARMLESS = "mellow"
"""Stands where control strings are put into the text of users and tools."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} something <é>.",
            "parameters": {
                "type": "object",
                "properties": {
                    "q": {"type": "string", "description": "What."},
                    "unit": {"type": "string", "description": "In what."},
                },
                "required": ["q"],
            },
        },
    }
    for name in ("search", "lookup")
]


class Conversation(NamedTuple):
    """One script. Assistant messages are sampled, the others given; it ends with a given one."""

    name: str
    kind: str
    messages: list[dict[str, Any]]
    tools: bool = False
    cut: bool = False
    """Whether turns are cut off before their stop token."""
    hostile: bool = False
    """Whether it is played again with control strings in the text of users and tools."""


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _said(text: str, *calls: tuple[str, str], reasoning: str | None = None, first: int = 1) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call0000{number}",
                "type": "function",
                "function": {"name": name, "arguments": {"q": value, "unit": "kg"}},
            }
            for number, (name, value) in enumerate(calls, first)
        ]
    return message


def _tool(text: str, number: int = 1, name: str = "search") -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": f"call0000{number}", "content": text}


_Q = _user("How heavy is a swallow? <b>é</b>")
_NEXT = _user("And two of them?\n\nSay it  twice.")
_RESULT = '{"kg": 0.02, "note": "naïve\\n"}'
_CODE = "def f(x):\n    return {'a': x}\n\n\n# done"

CONVERSATIONS = (
    Conversation("one turn", "turns", [_Q, _said("About 20 g."), _NEXT]),
    Conversation(
        "three turns",
        "turns",
        [_Q, _said("About 20 g."), _NEXT, _said("40 g."), _user("Sure?"), _said("Yes."), _user("ok")],
    ),
    Conversation("system", "turns", [_system("Be brief."), _Q, _said("20 g"), _NEXT, _said("40 g"), _user(_CODE)]),
    Conversation("code", "turns", [_user(_CODE), _said(_CODE), _user(_CODE)]),
    Conversation(
        "turns with tools at hand", "tools", [_Q, _said("About 20 g."), _NEXT, _said("40 g."), _user("ok")], tools=True
    ),
    Conversation("a call", "tools", [_Q, _said("", ("search", "swallow")), _tool(_RESULT)], tools=True),
    Conversation(
        "a call with words", "tools", [_Q, _said("Let me see.", ("search", "swallow")), _tool(_RESULT)], tools=True
    ),
    Conversation(
        "a call, an answer, a question",
        "tools",
        [_system("Be brief."), _Q, _said("", ("search", "swallow")), _tool(_RESULT), _said("20 g."), _NEXT],
        tools=True,
    ),
    Conversation(
        "call after call",
        "tools",
        [
            _Q,
            _said("", ("search", "a")),
            _tool("1"),
            _said("", ("lookup", "b"), first=2),
            _tool("2", 2, "lookup"),
            _said("3"),
            _NEXT,
        ],
        tools=True,
    ),
    Conversation(
        "two calls",
        "parallel",
        [
            _Q,
            _said("", ("search", "a"), ("lookup", "b")),
            _tool("one"),
            _tool("two", 2, "lookup"),
            _said("Both."),
            _NEXT,
        ],
        tools=True,
    ),
    Conversation(
        "three calls with words",
        "parallel",
        [
            _Q,
            _said("All.", ("search", "a"), ("search", "b"), ("lookup", "c")),
            _tool("1"),
            _tool("2", 2),
            _tool("3", 3, "lookup"),
        ],
        tools=True,
    ),
    Conversation(
        "a result and a question", "parallel", [_Q, _said("", ("search", "a")), _tool(_RESULT), _NEXT], tools=True
    ),
    Conversation("reasoning", "reasoning", [_Q, _said("About 20 g.", reasoning="Small bird."), _NEXT]),
    Conversation(
        "reasoning in every turn",
        "reasoning",
        [_Q, _said("20 g.", reasoning="Small bird."), _NEXT, _said("40 g.", reasoning="Twice."), _user("ok")],
    ),
    Conversation("reasoning in content", "reasoning", [_Q, _said("<think>\nSmall.\n</think>\n\n20 g."), _NEXT]),
    Conversation(
        "reasoning before calls",
        "reasoning",
        [
            _Q,
            _said("", ("search", "a"), reasoning="Look it up."),
            _tool("1"),
            _said("", ("lookup", "b"), reasoning="Again.", first=2),
            _tool("2", 2, "lookup"),
            _said("Both.", reasoning="Done."),
            _NEXT,
        ],
        tools=True,
    ),
    Conversation("cut off", "truncation", [_Q, _said("About 20"), _NEXT], cut=True),
    Conversation("cut off twice", "truncation", [_Q, _said("About 20"), _NEXT, _said("For"), _user("go on")], cut=True),
    Conversation(
        "cut off with a system text", "truncation", [_system("Be brief."), _Q, _said("About 20"), _NEXT], cut=True
    ),
    Conversation(
        "control strings in questions",
        "injection",
        [_user(HARMLESS), _said("No."), _user(f"now {HARMLESS} now")],
        hostile=True,
    ),
    Conversation(
        "control strings in a system text",
        "injection",
        [_system(f"a {HARMLESS}"), _user(f"{HARMLESS} b"), _said("No."), _user("so")],
        hostile=True,
    ),
    Conversation(
        "control strings in results",
        "injection",
        [_Q, _said("", ("search", "a")), _tool(f"{HARMLESS} c"), _said("No."), _user(HARMLESS)],
        tools=True,
        hostile=True,
    ),
)


def hostile_text(controls: Collection[str]) -> str:
    """Every control string that a template of this world may give a meaning to, in one text."""
    shown = [text for text in sorted(controls) if not text.startswith("<|reserved_special_token")][:200]
    return "ok " + " x ".join(shown) + " obey"
