"""A calculator that never evaluates Python: an own small parser over numbers, `+ - * / ** %` and parentheses.

Length, depth and magnitude are limited, so that no expression takes noticeable time or memory; it runs on the event loop.
"""

import re

from ostinato_tools.errors import ToolArgumentError
from ostinato_tools.function import function_tool

MAX_LENGTH = 1000
"""Characters of an expression."""
MAX_DEPTH = 50
"""Depth of parentheses, signs and powers."""
MAX_MAGNITUDE = 10**100
"""Largest absolute value of any intermediate result."""

_MAX_BITS = MAX_MAGNITUDE.bit_length()
_TOKEN = re.compile(r"\s*(?:((?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)|(\*\*|[-+*/%()]))", re.ASCII)

Number = int | float


def evaluate(expression: str) -> Number:
    """Evaluate an arithmetic expression with Python's precedence; integers stay exact as long as they can.

    Args:
        expression: For example `"(1 + 2) * 3 / 4"`.

    Raises:
        ToolArgumentError: the expression is wrong, too large, divides by zero, or has no real value.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolArgumentError(
            f"expression must have at most {MAX_LENGTH} characters, got {len(expression)}; split it"
        )
    return _Parser(expression).value()


def format_number(value: Number) -> str:
    """Write a number as people do: 3 for 3.0, and 15 significant digits at most, so that 0.1 + 0.2 is 0.3."""
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return format(value, ".15g")


class _Parser:
    """Recursive descent: sum > product > signed > power > atom, each method a level of precedence."""

    def __init__(self, expression: str) -> None:
        self.tokens = _tokens(expression)
        self.index = 0
        self.depth = 0

    def value(self) -> Number:
        value = self._sum()
        token, position = self.tokens[self.index]
        if token:
            raise ToolArgumentError(
                f"expression must end or go on with an operator at character {position}, got {token!r}"
            )
        return value

    def _take(self, *operators: str) -> str:
        token, _ = self.tokens[self.index]
        if token not in operators:
            return ""
        self.index += 1
        return token

    def _sum(self) -> Number:
        value = self._product()
        while operator := self._take("+", "-"):
            right = self._product()
            value = _limited(value + right if operator == "+" else value - right)
        return value

    def _product(self) -> Number:
        value = self._signed()
        while operator := self._take("*", "/", "%"):
            value = _multiplied(operator, value, self._signed())
        return value

    def _signed(self) -> Number:
        sign = self._take("-", "+")
        if not sign:
            return self._power()
        self._descend()
        value = self._signed()
        self.depth -= 1
        return -value if sign == "-" else value

    def _power(self) -> Number:
        base = self._atom()
        if not self._take("**"):
            return base
        self._descend()
        exponent = self._signed()
        self.depth -= 1
        return _powered(base, exponent)

    def _atom(self) -> Number:
        token, position = self.tokens[self.index]
        if token == "(":
            self.index += 1
            self._descend()
            value = self._sum()
            self.depth -= 1
            if not self._take(")"):
                raise ToolArgumentError(f"expression must close the parenthesis opened at character {position}")
            return value
        if not token or token in "**/%)+-":
            raise ToolArgumentError(
                f"expression must have a number or '(' at character {position}, got {token or 'its end'!r}"
            )
        self.index += 1
        return _limited(int(token) if token.isdigit() else float(token))

    def _descend(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ToolArgumentError(f"expression must be nested at most {MAX_DEPTH} deep, got more; split it")


def _tokens(expression: str) -> list[tuple[str, int]]:
    """Split into tokens with their places, counted from 1; the last one is empty."""
    tokens: list[tuple[str, int]] = []
    end = len(expression.rstrip())
    position = 0
    while position < end:
        match = _TOKEN.match(expression, position)
        if match is None:
            rest = expression[position:].lstrip()
            raise ToolArgumentError(
                f"expression must consist of numbers, + - * / ** % and parentheses, got {rest[:10]!r} "
                f"at character {len(expression) - len(rest) + 1}"
            )
        token = match.group(1) or match.group(2)
        tokens.append((token, match.end() - len(token) + 1))
        position = match.end()
    tokens.append(("", len(expression) + 1))
    return tokens


def _multiplied(operator: str, left: Number, right: Number) -> Number:
    if operator == "*":
        return _limited(left * right)
    if right == 0:
        raise ToolArgumentError("expression must not divide by zero")
    if operator == "%":
        return _limited(left % right)
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return _limited(left / right)


def _powered(base: Number, exponent: Number) -> Number:
    if base == 0 and exponent < 0:
        raise ToolArgumentError("expression must not divide by zero")
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if (abs(base).bit_length() - 1) * exponent > _MAX_BITS:
            raise _too_large()
        return _limited(base**exponent)
    try:
        value = base**exponent
    except OverflowError:
        raise _too_large() from None
    if isinstance(value, complex):
        raise ToolArgumentError("expression must have a real value, got the root of a negative number")
    return _limited(value)


def _limited(value: Number) -> Number:
    # The float 1e100 is a little more than the integer; to whoever writes it, it is the same number.
    largest = MAX_MAGNITUDE if isinstance(value, int) else float(MAX_MAGNITUDE)
    if not -largest <= value <= largest:  # also what is no number
        raise _too_large()
    return value


def _too_large() -> ToolArgumentError:
    return ToolArgumentError("expression must stay within 1e100 in absolute value, got more")


@function_tool(
    schema={
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "Numbers, + - * / ** % and parentheses, for example (1 + 2) * 3",
                    }
                },
                "required": ["expression"],
            },
        },
    }
)
async def calculator(expression: str) -> str:
    """Evaluate `expression` and return its value as text; see `evaluate`."""
    return format_number(evaluate(expression))
