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
    (?P<string>[rR]?(?:"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+'))
    |(?P<number>[+-]?(?:0[xXoObB][\da-fA-F_]++|(?:\d[\d_]*+(?:\.[\d_]*+)?|\.\d[\d_]*+)(?:[eE][+-]?\d++)?)(?![\w.]))
    |(?P<name>[^\W\d][\w.\-]*+)
    |(?P<mark>[][(){},:=])
    )""",
    re.DOTALL | re.VERBOSE,
)
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
        self._end = 0  # of the token ahead
        self._advance()

    def value(self) -> Any:
        """Read a value."""
        kind, token = self._kind, self._token
        if kind == "string":
            return self._strings()
        if kind == "mark":
            return self._container(token)
        if kind == "number":
            value = self._number(token)
        elif not kind or token not in _NAMED:
            raise self.fault("expected a value")
        else:
            value = _NAMED[token]
        self._advance()
        return value

    def keyword(self) -> str:
        """Read `name=`."""
        name = self._token
        if self._kind != "name":
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
        if self._token != mark or self._kind != "mark":
            return False
        self._advance()
        return True

    def end(self) -> None:
        """Require that nothing is left."""
        if self._kind or self._text[self._end :].strip():
            raise self.fault("expected nothing more")

    def fault(self, what: str) -> LiteralError:
        """Say what is wrong at the next token."""
        at = self._end - len(self._token)
        near = self._text[max(at - 20, 0) : at + 20]
        return LiteralError(f"{what} at character {at + 1}, near {near!r}")

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._end)
        if match is None:
            self._kind = self._token = ""
            return
        self._kind = match.lastgroup or ""
        self._token = match[self._kind]
        self._end = match.end()

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
            if self._kind != "string":
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
        while self._kind == "string":
            token = self._token
            is_raw = token[0] in "rR"
            inner = token[2:-1] if is_raw else token[1:-1]
            parts.append(self._unescape(inner) if "\\" in inner and not is_raw else inner)
            self._advance()
        return parts[0] if len(parts) == 1 else "".join(parts)

    def _unescape(self, inner: str) -> str:
        try:
            text = _ESCAPE.sub(_escaped, inner)
            # Two escapes may stand for the halves of one character; half a character alone is none.
            return text.encode("utf-16", "surrogatepass").decode("utf-16") if _SURROGATE.search(text) else text
        except (ValueError, OverflowError):
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
    if char is not None:
        return _ESCAPED.get(
            char, "\\" + char
        )  # as Python has it, a backslash before any other character is a backslash
    if octal is not None:
        return chr(int(octal, 8))
    return chr(int(next(digits for digits in hexadecimal if digits is not None), 16))
