"""Parsers: from the text that a model sampled to content, reasoning, calls and errors. They run nothing.

They work on text from any engine and know neither tokens nor tools' code. Text must be decoded with its special tokens kept.
"""

from ostinato_tools.parsers.base import (
    CallDelta,
    ContentDelta,
    Delta,
    ErrorDelta,
    ParsedTurn,
    ReasoningDelta,
    ToolParser,
    TurnStream,
)
from ostinato_tools.parsers.grammar import Format, TagFormat
from ostinato_tools.parsers.hermes import HermesParser
from ostinato_tools.parsers.lookup import PARSERS, get_parser, parser_for

__all__ = [
    "PARSERS",
    "CallDelta",
    "ContentDelta",
    "Delta",
    "ErrorDelta",
    "Format",
    "HermesParser",
    "ParsedTurn",
    "ReasoningDelta",
    "TagFormat",
    "ToolParser",
    "TurnStream",
    "get_parser",
    "parser_for",
]
