"""Inference engines behind one contract: token ids in, token ids and honest logprobs out.

It is the contract (`AsyncServerBase`), its data, and the embedded engine (`ostinato_engines.transformers_server`).
It is not a tokenizer, a chat template or a router: engines know no text and no other engine. Importing this package
loads neither torch nor any engine.
"""

from ostinato_engines.errors import (
    ConformanceError,
    EngineClosedError,
    EngineCrashedError,
    EngineError,
    EngineInputError,
    EngineLoadError,
    EngineNotReadyError,
    EngineStartError,
    ManifestError,
    MissingDependencyError,
    NonFiniteLogitsError,
    SamplingParamsError,
    UnsupportedError,
    WeightPeerLostError,
    WeightUpdateError,
    WeightUpdateTimeoutError,
)
from ostinato_engines.loading import load_server_class
from ostinato_engines.server import AsyncServerBase, ChatCodec
from ostinato_engines.types import (
    Capabilities,
    EngineState,
    Health,
    PauseMode,
    PolicySpan,
    SamplingParams,
    StopReason,
    TensorSpec,
    TokenOutput,
    WeightManifest,
    as_token_output,
)
from ostinato_engines.weight_routes import CollectiveRoute, SocketRoute, WeightPlace, WeightRoute

__all__ = [
    "AsyncServerBase",
    "Capabilities",
    "ChatCodec",
    "CollectiveRoute",
    "ConformanceError",
    "EngineClosedError",
    "EngineCrashedError",
    "EngineError",
    "EngineInputError",
    "EngineLoadError",
    "EngineNotReadyError",
    "EngineStartError",
    "EngineState",
    "Health",
    "ManifestError",
    "MissingDependencyError",
    "NonFiniteLogitsError",
    "PauseMode",
    "PolicySpan",
    "SamplingParams",
    "SamplingParamsError",
    "SocketRoute",
    "StopReason",
    "TensorSpec",
    "TokenOutput",
    "UnsupportedError",
    "WeightManifest",
    "WeightPeerLostError",
    "WeightPlace",
    "WeightRoute",
    "WeightUpdateError",
    "WeightUpdateTimeoutError",
    "as_token_output",
    "load_server_class",
]
