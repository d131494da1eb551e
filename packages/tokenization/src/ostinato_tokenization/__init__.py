"""Token-exact chat conversations for any chat template: encode each message once, keep sampled tokens verbatim.

This package turns conversations into token ids, turn by turn, and records who wrote each token. It is not an engine,
parses no tool calls, downloads nothing and needs neither torch nor transformers.
"""

from ostinato_tokenization.chat_tokenizer import ChatTokenizer
from ostinato_tokenization.continuous import ContinuousTokens, TruncatedTurn
from ostinato_tokenization.delta import BASE_CHAT_HISTORY, DeltaEncoding, encode_delta
from ostinato_tokenization.errors import (
    ChatTemplateError,
    HistoryRewrittenError,
    LedgerError,
    MediaNotSupportedError,
    MessageError,
    TokenizationError,
    TokenizationMismatchError,
    TokenizerLoadError,
    TokenizerNotFoundError,
    TruncatedTurnError,
    VocabularyError,
)
from ostinato_tokenization.ledger import MediaSpan, Origin, TokenLedger
from ostinato_tokenization.sanity import SanityCheckMode, SanityReport, check_ledger, num_mismatches
from ostinato_tokenization.training import TrainingConversation, encode_training_conversation

__all__ = [
    "BASE_CHAT_HISTORY",
    "ChatTemplateError",
    "ChatTokenizer",
    "ContinuousTokens",
    "DeltaEncoding",
    "HistoryRewrittenError",
    "LedgerError",
    "MediaNotSupportedError",
    "MediaSpan",
    "MessageError",
    "Origin",
    "SanityCheckMode",
    "SanityReport",
    "TokenLedger",
    "TokenizationError",
    "TokenizationMismatchError",
    "TokenizerLoadError",
    "TokenizerNotFoundError",
    "TrainingConversation",
    "TruncatedTurn",
    "TruncatedTurnError",
    "VocabularyError",
    "check_ledger",
    "encode_delta",
    "encode_training_conversation",
    "num_mismatches",
]
