"""Parsers by name, and by chat template."""

from collections.abc import Callable

from ostinato_tools.errors import ParserInputError, UnknownParserError
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
from ostinato_tools.parsers.template_marks import TEMPLATE_MARKS

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
        raise UnknownParserError(f"parser must be one of {_known()}, got {name!r}; correct the format")
    return factory()


def parser_for(template: str, *, name: str | None = None) -> ToolParser:
    """Return the parser of the format in which a chat template writes calls.

    Args:
        template: The text of the template (Jinja).
        name: A format, for templates that do not tell theirs; then the template is not looked at.

    Raises:
        UnknownParserError: the template tells no known format, or several; or there is none of that name.
        ParserInputError: the template is no text.
    """
    if name is not None:
        return get_parser(name)
    if not isinstance(template, str):
        kind = type(template).__name__
        raise ParserInputError(f"template must be the text of one chat template, got {kind}; choose the one in use")
    found = [known for known, marks in TEMPLATE_MARKS.items() if known in PARSERS and marks.fit(template)]
    if len(found) == 1:
        return get_parser(found[0])
    told = f"the marks of several ({', '.join(found)})" if found else "no mark of any"
    raise UnknownParserError(
        f"template must tell one format of tool calls out of {_known()}, got {told}; pass the one that the model was "
        "trained with by its name: get_parser(name), or parser_for(template, name=...)"
    )


def _known() -> str:
    return ", ".join(sorted(PARSERS))
