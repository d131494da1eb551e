"""For tests of code that uses this package, and for a look at a model's chat template.

`check_template` runs on any tokenizer. The tokenizers are real and made in the call. The strategies are in
`ostinato_tokenization.testing.strategies`, which needs hypothesis.
"""

from ostinato_tokenization.testing.template_check import TemplateReport, Verdict, check_template
from ostinato_tokenization.testing.templates import SAMPLE_TEMPLATES, SAMPLE_TOKENS, TINY_CHAT_TEMPLATE
from ostinato_tokenization.testing.tiny import (
    TINY_SPECIAL_TOKENS,
    TINY_TAG_TOKENS,
    TokenizerKind,
    sample_chat_tokenizer,
    sample_tokenizer,
    tiny_chat_tokenizer,
    tiny_tokenizer,
)

__all__ = [
    "SAMPLE_TEMPLATES",
    "SAMPLE_TOKENS",
    "TINY_CHAT_TEMPLATE",
    "TINY_SPECIAL_TOKENS",
    "TINY_TAG_TOKENS",
    "TemplateReport",
    "TokenizerKind",
    "Verdict",
    "check_template",
    "sample_chat_tokenizer",
    "sample_tokenizer",
    "tiny_chat_tokenizer",
    "tiny_tokenizer",
]
