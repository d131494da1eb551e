"""Our engines, which also tell what their weights are: for benchmarks whose engines are in actors, where only the contract reaches."""

from typing import Any

from benchmarks.weight_digests import digests_of
from ostinato_engines.transformers_server import TransformersServer
from ostinato_engines.vllm_server import VLLMServer


class TellingVLLM(VLLMServer):
    """Answers every chat request with the digests of its worker's parameters."""

    async def chat_completion(self, raw_request: Any) -> Any:
        assert self._engine is not None
        (digests,) = await self._engine.llm.collective_rpc("ostinato_weight_digests")
        return dict(digests)


class TellingTransformers(TransformersServer):
    """The same of the embedded engine."""

    async def chat_completion(self, raw_request: Any) -> Any:
        assert self._engine is not None
        return digests_of(self._engine.writer.parameters.items(), fused=False)
