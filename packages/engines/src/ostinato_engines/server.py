"""The contract of an engine: token ids in, token ids and logprobs out.

A subclass needs `generate` and `chat_completion`. Everything else has an honest default: it does the trivial right
thing, or says what this engine cannot do. Engines know no text: rendering and parsing come from outside.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from ostinato_engines.errors import EngineInputError, UnsupportedError
from ostinato_engines.types import (
    Capabilities,
    EngineState,
    Health,
    PauseMode,
    SamplingParams,
    TokenOutput,
    WeightManifest,
)
from ostinato_engines.versions import installed_versions
from ostinato_engines.weight_routes import WeightRoute

if TYPE_CHECKING:
    from torch import Tensor

UNKNOWN_MAX_MODEL_LEN = 2**31 - 1
"""The length limit of an engine that knows none."""


class ChatCodec(Protocol):
    """What `chat_completion` needs where an engine has no chat endpoint of its own."""

    stop_token_ids: tuple[int, ...]

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Sequence[int]:
        """The ids of a conversation, generation prompt included."""
        ...

    def parse(self, token_ids: Sequence[int]) -> Mapping[str, Any]:
        """The assistant message that these ids spell."""
        ...


class AsyncServerBase(ABC):
    """One replica of a policy. All methods belong to one event loop at a time."""

    policy_version: int = 0
    """The version of the weights that serve now."""
    max_model_len: int = UNKNOWN_MAX_MODEL_LEN
    """Prompt and output together, in tokens."""

    @property
    def versions(self) -> str:
        """Of what the engine runs on, for people; by default what is installed in this process."""
        return installed_versions()

    @abstractmethod
    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        request_id: str,
        media: Sequence[Any] = (),
    ) -> TokenOutput:
        """Continues a prompt.

        Args:
            prompt_ids: The whole conversation so far, not only what is new.
            sampling_params: How to sample; a mapping is checked.
            request_id: Names the conversation: the same for all its turns, one turn at a time.
            media: Images and the like; refused unless `capabilities().media`.

        Raises:
            EngineInputError: The request can never be served.
            EngineNotReadyError: It cannot be served now.
        """

    @abstractmethod
    async def chat_completion(self, raw_request: Any) -> Any:
        """Answers an OpenAI-style chat request: a mapping, or what has an awaitable `json()` that gives one.

        Returns:
            An OpenAI-style response: a mapping that encodes as JSON, or a web framework's response that holds it.
        """

    async def start(self) -> None:  # noqa: B027  a default, not abstract
        """Loads what the engine needs; by default there is nothing to load."""

    async def shutdown(self) -> None:  # noqa: B027  a default, not abstract
        """Ends the engine; requests in flight fail with `EngineClosedError`. By default there is nothing to end."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:  # noqa: B027  a default, not abstract
        """Undoes `sleep`, wholly or for "weights" or "kv_cache"; an engine that never sleeps is awake."""

    async def sleep(self, level: int = 1) -> None:
        """Frees memory: level 1 the key-value cache, level 2 the weights as well."""
        raise UnsupportedError(f"{self._name} cannot sleep; leave it awake")

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Stops sampling; returns once nothing is being computed. Requests that come meanwhile wait for `resume`."""
        raise UnsupportedError(f"{self._name} cannot pause; wait until its requests have ended")

    async def resume(self) -> None:  # noqa: B027  a default, not abstract
        """Undoes `pause`; an engine that never pauses has nothing to resume."""

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Ends requests (None: all) with `StopReason.ABORTED` and their tokens so far; returns how many it ended."""
        raise UnsupportedError(f"{self._name} cannot abort; cancel the awaiting task")

    async def update_weights(self, manifest: WeightManifest, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Replaces all weights by a stream of named tensors, and then `policy_version`.

        Tensors come in any order. Each is valid until the next one is taken, and may be empty from then on: what is kept
        must be copied. `ostinato_engines.weight_transfer` brings such streams from other processes.

        Raises:
            ManifestError: The manifest does not fit; nothing was written, the old policy serves on.
            WeightUpdateError: The stream failed; the engine is not ready until a complete update.
        """
        raise UnsupportedError(f"{self._name} cannot update its weights; start a new one from a checkpoint")

    async def receive_weights(self, manifest: WeightManifest, route: WeightRoute) -> None:
        """Does what `update_weights` does, with tensors that its workers (`capabilities().weight_workers`) fetch along a route.

        Whoever sends along the route must be told of an error (`ostinato_engines.weight_transfer.decline`): perhaps no worker has come.

        Raises:
            EngineError: As `update_weights`.
        """
        raise UnsupportedError(f"{self._name} has no workers that fetch weights; hand them to update_weights()")

    async def reset_prefix_cache(self) -> None:
        """Forgets the state of conversations that are not in flight; by default there is none."""
        if self.capabilities().prefix_reuse:
            raise UnsupportedError(f"{self._name} cannot reset its prefix cache; restart it")

    async def health(self) -> Health:
        """The engine's state now; by default ready."""
        return Health(EngineState.READY, self.policy_version)

    def capabilities(self) -> Capabilities:
        """What this engine can do; by default nothing is claimed."""
        return Capabilities(engine=type(self).__name__)

    async def release(self, request_id: str) -> None:  # noqa: B027  a default, not abstract
        """The conversation is over: its state may be freed. Unknown ids are fine."""

    def refuse_media(self, media: Sequence[Any]) -> None:
        """Raises `EngineInputError` if there is any media: for engines that serve text only."""
        if len(media):
            raise EngineInputError(
                f"media must be empty, got {len(media)} item(s); {self._name} serves token ids only, for now"
            )

    @property
    def _name(self) -> str:
        return type(self).__name__
