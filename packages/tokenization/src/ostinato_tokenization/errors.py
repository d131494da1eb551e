"""Everything that this package raises on purpose.

Invariant: every leaf is a `TokenizationError` and a standard exception, takes one message and survives pickling.
"""


class TokenizationError(Exception):
    """Root of all errors of this package."""


class TokenizerNotFoundError(TokenizationError, FileNotFoundError):
    """A directory or file that a tokenizer needs does not exist."""


class TokenizerLoadError(TokenizationError, ValueError):
    """The files of a tokenizer exist and cannot be used."""


class ChatTemplateError(TokenizationError, ValueError):
    """The chat template does not compile, or refuses or fails to render a conversation."""


class MessageError(TokenizationError, ValueError):
    """A message, a tool schema or a text is not of the form that can be rendered and encoded."""


class MediaNotSupportedError(TokenizationError, NotImplementedError):
    """A message carries an image, a video or audio."""


class VocabularyError(TokenizationError, ValueError):
    """A token id is not in the vocabulary."""


class LedgerError(TokenizationError, ValueError):
    """A ledger was asked to record something that cannot be so, or its bytes are damaged."""


class HistoryRewrittenError(TokenizationError, ValueError):
    """The template does not extend what was rendered before: the caller begins a new segment."""


class TruncatedTurnError(TokenizationError, ValueError):
    """A turn was cut off before its stop token, and the policy for such turns is `error`."""


class TokenizationMismatchError(TokenizationError, ValueError):
    """A ledger differs from the rendering of its conversation, and the caller asked for an error."""
