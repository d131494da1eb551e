"""Parsers by name."""

from collections.abc import Callable

from ostinato_tools.errors import UnknownParserError
from ostinato_tools.parsers.base import ToolParser
from ostinato_tools.parsers.gemma4 import Gemma4Parser
from ostinato_tools.parsers.glm import GlmParser
from ostinato_tools.parsers.gpt_oss import GptOssParser
from ostinato_tools.parsers.hermes import HermesParser
from ostinato_tools.parsers.minimax import MiniMaxParser
from ostinato_tools.parsers.qwen3_coder import Qwen3CoderParser
from ostinato_tools.parsers.seed_oss import SeedOssParser

PARSERS: dict[str, Callable[[], ToolParser]] = {
    "gemma4": Gemma4Parser,
    "glm": GlmParser,
    "gpt_oss": GptOssParser,
    "hermes": HermesParser,
    "minimax": MiniMaxParser,
    "qwen3_coder": Qwen3CoderParser,
    "seed_oss": SeedOssParser,
}
"""Name to factory. Add a format of your own here, or pass your parser object directly where a parser is taken."""


def get_parser(name: str) -> ToolParser:
    """Return a parser of the format `name`.

    Raises:
        UnknownParserError: the format is not known.
    """
    factory = PARSERS.get(name)
    if factory is None:
        raise UnknownParserError(
            f"parser must be one of {', '.join(sorted(PARSERS))}, got {name!r}; correct the format"
        )
    return factory()
