"""Parsers by name."""

from collections.abc import Callable

from ostinato_tools.errors import UnknownParserError
from ostinato_tools.parsers.base import ToolParser
from ostinato_tools.parsers.deepseek_v3 import DeepSeekV3Parser
from ostinato_tools.parsers.gemma4 import Gemma4Parser
from ostinato_tools.parsers.glm import GlmParser
from ostinato_tools.parsers.gpt_oss import GptOssParser
from ostinato_tools.parsers.hermes import HermesParser
from ostinato_tools.parsers.kimi_k2 import KimiK2Parser
from ostinato_tools.parsers.llama3_json import Llama3JsonParser
from ostinato_tools.parsers.minimax import MiniMaxParser
from ostinato_tools.parsers.mistral import MistralParser
from ostinato_tools.parsers.pythonic import PythonicParser
from ostinato_tools.parsers.qwen3_coder import Qwen3CoderParser
from ostinato_tools.parsers.seed_oss import SeedOssParser

PARSERS: dict[str, Callable[[], ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "gemma4": Gemma4Parser,
    "glm": GlmParser,
    "gpt_oss": GptOssParser,
    "hermes": HermesParser,
    "kimi_k2": KimiK2Parser,
    "llama3_json": Llama3JsonParser,
    "minimax": MiniMaxParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
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
