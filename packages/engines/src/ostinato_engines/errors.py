"""The errors of this package: one tree under `EngineError`, every leaf also a standard exception and picklable."""


class EngineError(Exception):
    """Root of everything that an engine raises on purpose."""


class EngineInputError(EngineError, ValueError):
    """A request that no engine could serve: empty or over-long prompt, ids outside the vocabulary, media."""


class SamplingParamsError(EngineInputError):
    """A sampling parameter that is unknown, of the wrong type or out of range."""


class ManifestError(EngineInputError):
    """A weight manifest that does not describe this engine's model; nothing was written, the old policy serves on."""


class UnsupportedError(EngineError, NotImplementedError):
    """The engine cannot do what was asked; `capabilities()` says what it can."""


class EngineNotReadyError(EngineError, RuntimeError):
    """The engine is not started, asleep, or waits for a complete weight update."""


class EngineClosedError(EngineError, RuntimeError):
    """The engine was shut down; requests that were in flight end with this error."""


class EngineCrashedError(EngineError, RuntimeError):
    """The engine's loop died; the cause is in the message and in `__cause__`."""


class NonFiniteLogitsError(EngineError, ArithmeticError):
    """The model produced NaN or infinite logits, so that no token could be sampled."""


class WeightUpdateError(EngineError, RuntimeError):
    """A weight update failed in mid-stream; the engine is not ready until a complete update succeeds."""


class WeightUpdateTimeoutError(WeightUpdateError, TimeoutError):
    """The other end of a weight transfer showed no progress for too long."""


class WeightPeerLostError(WeightUpdateError, ConnectionError):
    """The other end of a weight transfer went away, or spoke something else; connect anew."""


class EngineLoadError(EngineError, OSError):
    """A model or a server class could not be loaded from where it was said to be."""


class EngineStartError(EngineError, RuntimeError):
    """An engine's processes did not come up; the message has the lines of their log that matter, and the likely cure."""


class MissingDependencyError(EngineError, ImportError):
    """An optional dependency is not installed; the message says how to install it."""


class ConformanceError(EngineError, AssertionError):
    """A server broke the contract; the message lists every check that failed."""
