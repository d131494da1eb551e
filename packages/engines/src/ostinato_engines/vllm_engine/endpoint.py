"""vLLM's own OpenAI chat endpoint, without a web server: a mapping in, a mapping out."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ostinato_engines.errors import EngineInputError
from ostinato_engines.vllm_engine.probe import ChatParts


class ChatEndpoint:
    """The chat endpoint of one engine; see `make_endpoint`."""

    def __init__(
        self, chat: Any, request_type: Any, model: str, adapter: str | None, refusals: tuple[type[Exception], ...]
    ) -> None:
        self._chat = chat
        self._refusals = refusals
        self._request_type = request_type
        self._model = model
        self._adapter = adapter

    async def answer(self, raw_request: Any) -> dict[str, Any]:
        """Answers one chat request, not streamed.

        Raises:
            EngineInputError: A field is missing, unknown or refused by vLLM, or the conversation leaves no room.
        """
        if not isinstance(raw_request, Mapping):
            raise EngineInputError(
                f"raw_request must be a mapping, got {type(raw_request).__name__}; decode the body first"
            )
        known = self._request_type.model_fields
        if unknown := [key for key in raw_request if key not in known]:
            raise EngineInputError(
                f"chat request must hold fields that vLLM knows, got {unknown[0]!r}; remove it, or mend its name"
            )
        if raw_request.get("stream"):
            raise EngineInputError("stream must be false, got true; ask for whole answers")
        try:
            request = self._request_type(**{**raw_request, "model": self._name_of(raw_request.get("model"))})
            response = await self._chat.create_chat_completion(request)
        except self._refusals as error:
            raise EngineInputError(
                f"chat request must be one that vLLM serves, got {error}; mend the request"
            ) from error
        failure = getattr(response, "error", None)
        if failure is not None:
            raise EngineInputError(
                f"chat request must be one that vLLM serves, got {getattr(failure, 'message', failure)}; mend the request"
            )
        return response.model_dump(mode="json")

    def _name_of(self, asked: Any) -> Any:
        """vLLM's name of what a request asks for: the adapter is the model's, whichever way the model is asked for."""
        name = asked or self._model
        return self._adapter if self._adapter is not None and name == self._model else name


async def make_endpoint(
    llm: Any, model: str, adapter: Any, parts: ChatParts, refusals: tuple[type[Exception], ...]
) -> ChatEndpoint | None:
    """The endpoint of a started engine, whose answers an adapter takes part in (vLLM's `LoRARequest`, or None); None where the model has no
    tokenizer or no chat template."""
    tokenizer = getattr(llm, "tokenizer", None)
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return None
    arguments = ["--model", model]
    if adapter is not None:
        arguments += ["--lora-modules", json.dumps({"name": adapter.lora_name, "path": adapter.lora_path})]
    args = parts.make_arg_parser(parts.flexible_parser()).parse_args(arguments)
    state = SimpleNamespace()
    await parts.init_app_state(llm, state, args, supported_tasks=await llm.get_supported_tasks())
    chat = getattr(state, "openai_serving_chat", None)
    if chat is None:
        return None
    return ChatEndpoint(chat, parts.chat_request, model, None if adapter is None else adapter.lora_name, refusals)


def has_tokenizer(model: str) -> bool:
    """Whether a folder holds a tokenizer; what is not a folder is taken to."""
    folder = Path(model)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    return not folder.is_dir() or any((folder / name).is_file() for name in names)
