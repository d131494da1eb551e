"""Literals in Python's spelling, read without evaluating anything: strings, numbers, True, False, None, lists, tuples, dicts.

The values are those of JSON: a tuple becomes a list, keys of a dict are strings, and JSON's `true`, `false` and `null` are
read too. Bytes, formatted strings, sets, names, operators and calls are refused. A line break in a string is text, and
strings side by side are one string, so a string in triple quotes is read as what it says unless it holds such a quote.
"""

import math
import re
from typing import Any

_MAX_DEPTH = 200
_TOKEN = re.compile(
    r"""\s*+(?:
    (?P<raw>[rR]?)(?P<string>"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+')
    |(?P<number>[+-]?(?:0[xXoObB][\da-fA-F_]++|(?:\d[\d_]*+(?:\.[\d_]*+)?|\.\d[\d_]*+)(?:[eE][+-]?\d++)?)(?![\w.]))
    |(?P<name>[^\W\d][\w.\-]*+)
    |(?P<mark>[][(){},:=])
    )""",
    re.DOTALL | re.VERBOSE,
)
_SPACE = re.compile(r"\s*+")
_NAMED = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPED |= {char: char for char in "\\'\""}
_SURROGATE = re.compile("[\ud800-\udfff]")
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class LiteralError(ValueError):
    """A text is no literal; the message says what is wrong and where."""


def read_literal(text: str) -> Any:
    """Return the value of a literal.

    Raises:
        LiteralError: it is none.
    """
    reader = _Reader(text)
    value = reader.value()
    reader.end()
    return value


def read_keywords(text: str) -> dict[str, Any]:
    """Return the arguments of a call, `(name=literal, ...)`, brackets included.

    Raises:
        LiteralError: it is something else, as arguments without a name are.
    """
    reader = _Reader(text)
    arguments: dict[str, Any] = {}
    reader.take("(")
    while not reader.take_if(")"):
        name = reader.keyword()
        if name in arguments:
            raise reader.fault(f"the argument {name} is there twice")
        arguments[name] = reader.value()
        if not reader.take_if(","):
            reader.take(")")
            break
    reader.end()
    return arguments


class _Reader:
    """Reads a text from left to right, one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._depth = 0
        self._start = self._end = 0
        self._advance()

    def value(self) -> Any:
        """Read a value."""
        match = self._match
        kind = match.lastgroup if match is not None else None
        if match is None or kind is None:
            raise self.fault("expected a value")
        if kind == "string":
            return self._strings()
        if kind == "mark":
            return self._container(match.group("mark"))
        text = match.group(kind)
        if kind == "number":
            value = self._number(text)
        elif text in _NAMED:
            value = _NAMED[text]
        else:
            raise self.fault(f"expected a value, not the name {text[:40]!r}")
        self._advance()
        return value

    def keyword(self) -> str:
        """Read `name=`."""
        name = self._match.group("name") if self._match is not None else None
        if name is None:
            raise self.fault("expected a named argument, name=value")
        self._advance()
        self.take("=")
        return name

    def take(self, mark: str) -> None:
        """Read `mark`."""
        if not self.take_if(mark):
            raise self.fault(f"expected {mark}")

    def take_if(self, mark: str) -> bool:
        """Read `mark` if it comes next, and tell."""
        if self._match is None or self._match.group("mark") != mark:
            return False
        self._advance()
        return True

    def end(self) -> None:
        """Require that nothing is left."""
        if self._start < len(self._text):
            raise self.fault("expected nothing more")

    def fault(self, what: str) -> LiteralError:
        """Say what is wrong at the next token."""
        near = self._text[max(self._start - 20, 0) : self._start + 20]
        return LiteralError(f"{what} at character {self._start + 1}, near {near!r}")

    def _advance(self) -> None:
        space = _SPACE.match(self._text, self._end)
        self._start = space.end() if space is not None else self._end
        self._match = _TOKEN.match(self._text, self._start)
        self._end = self._match.end() if self._match is not None else self._start

    def _container(self, opening: str) -> Any:
        if opening not in _CLOSING:
            raise self.fault("expected a value")
        if self._depth == _MAX_DEPTH:
            raise self.fault("it is nested too deeply")
        self._depth += 1
        self._advance()
        value = self._dict() if opening == "{" else self._list(_CLOSING[opening])
        self._depth -= 1
        return value

    def _list(self, closing: str) -> Any:
        values = []
        while not self.take_if(closing):
            values.append(self.value())
            if not self.take_if(","):
                self.take(closing)
                return values[0] if closing == ")" and len(values) == 1 else values
        return values

    def _dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self.take_if("}"):
            if self._match is None or self._match.lastgroup != "string":
                raise self.fault("expected a key in quotes")
            key = self._strings()
            self.take(":")
            values[key] = self.value()
            if not self.take_if(","):
                self.take("}")
                break
        return values

    def _strings(self) -> str:
        parts = []
        while self._match is not None and self._match.lastgroup == "string":
            inner = self._match.group("string")[1:-1]
            if "\\" in inner and not self._match.group("raw"):
                inner = self._unescape(inner)
            parts.append(inner)
            self._advance()
        return "".join(parts)

    def _unescape(self, inner: str) -> str:
        try:
            text = _ESCAPE.sub(_escaped, inner)
            # Two escapes may stand for the halves of one character; half a character alone is none.
            return text.encode("utf-16", "surrogatepass").decode("utf-16") if _SURROGATE.search(text) else text
        except ValueError:
            raise self.fault("an escape in the string stands for no character") from None

    def _number(self, text: str) -> int | float:
        try:
            is_integer = text.lstrip("+-")[:2].lower() in ("0x", "0o", "0b") or not any(char in text for char in ".eE")
            value = int(text, 0) if is_integer else float(text)
        except ValueError:
            raise self.fault(f"{text[:40]!r} is no number") from None
        if isinstance(value, float) and math.isinf(value):
            raise self.fault("the number is out of range")
        return value


def _escaped(match: re.Match[str]) -> str:
    octal, *hexadecimal, char = match.groups()
    if octal is not None:
        return chr(int(octal, 8))
    if char is not None:
        return _ESCAPED.get(
            char, "\\" + char
        )  # as Python has it, a backslash before any other character is a backslash
    return chr(int(next(digits for digits in hexadecimal if digits is not None), 16))
