"""Token-exact chat conversations for any chat template: encode each message once, keep sampled tokens verbatim.

This package turns conversations into token ids, turn by turn, and records who wrote each token. It is not an engine,
parses no tool calls, downloads nothing and needs neither torch nor transformers.
"""

from ostinato_tokenization.chat_tokenizer import ChatTokenizer
from ostinato_tokenization.continuous import ContinuousTokens, TruncatedTurn
from ostinato_tokenization.errors import (
    ChatTemplateError,
    HistoryRewrittenError,
    LedgerError,
    MediaNotSupportedError,
    MessageError,
    TokenizationError,
    TokenizerLoadError,
    TokenizerNotFoundError,
    TruncatedTurnError,
    VocabularyError,
)
from ostinato_tokenization.ledger import MediaSpan, Origin, TokenLedger

__all__ = [
    "ChatTemplateError",
    "ChatTokenizer",
    "ContinuousTokens",
    "HistoryRewrittenError",
    "LedgerError",
    "MediaNotSupportedError",
    "MediaSpan",
    "MessageError",
    "Origin",
    "TokenLedger",
    "TokenizationError",
    "TokenizerLoadError",
    "TokenizerNotFoundError",
    "TruncatedTurn",
    "TruncatedTurnError",
    "VocabularyError",
]
