"""The app: routes, keys, and who is answered by what.

It is an ASGI application; `serving` puts it on a socket. Conversations are ChatSessions (see `conversations`), and
nothing here knows token ids.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ostinato_engines import AsyncServerBase, EngineState, Health
from ostinato_engines.server import UNKNOWN_MAX_MODEL_LEN
from ostinato_rollout.client import LLMServerClient
from ostinato_rollout.config import AdmissionConfig, SessionConfig
from ostinato_rollout.errors import NoReplicaError, SessionInputError
from ostinato_rollout.openai_app.answers import Answer, chunks, completion
from ostinato_rollout.openai_app.conversations import SessionStore
from ostinato_rollout.openai_app.delivery import TurnResponse, error_response, header, json_response, read_body, told
from ostinato_rollout.openai_app.errors import ApiError, UnknownSessionError, no_model, shutting_down
from ostinato_rollout.openai_app.limits import AppLimits
from ostinato_rollout.openai_app.request import ChatRequest, parse_request
from ostinato_rollout.openai_app.responses import events, parse_responses_request, response
from ostinato_rollout.openai_app.turns import answer_request
from ostinato_rollout.pool import ServerPool
from ostinato_rollout.session import ChatSession
from ostinato_rollout.turn_reader import TurnReader
from ostinato_rollout.types import SessionBudget
from ostinato_tokenization import ContinuousTokens
from ostinato_tools import ToolParser

logger = logging.getLogger(__name__)

OpenChat = Callable[[str | None, Sequence[dict]], ChatSession]
"""Makes a ChatSession of a session (None: of none) that shows the model these tools."""
Proceed = Callable[[ChatRequest], Awaitable[Answer]]
"""Has a request answered."""
Watch = Callable[[ChatRequest, Proceed], Awaitable[Answer]]
"""Goes around the answer to a request: has it answered as it is, or changed, or refuses it."""
TakePost = Callable[[bytes], Mapping]
"""Takes a body of JSON and returns what is answered, as JSON too; or refuses it with an ApiError."""

_SESSION_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_HEALTH_TIMEOUT_S = 5.0
_SWEEPS_PER_TIMEOUT = 10


class OpenAIApp:
    """OpenAI's chat API over the replicas of a policy.

    Args:
        pool: The replicas; started and shut down by whoever made them. None: those of `client`.
        tokens: How messages become token ids.
        model: The name that clients ask for.
        parser: Reads calls from what was sampled; without one, requests with tools are refused.
        config: How sessions treat their tokens.
        api_key: What clients must bring; None lets everybody in, and `serving` then stays on loopback.
        limits: How much of everything is taken.
        client: Where generations come from. By default a client of `pool` without admission: a conversation that nobody
            continues would keep its place, and engines queue by themselves.
        only_session: The session that every request belongs to, whatever its X-Session-ID; paths of others are refused. None: the
            one that it names.
        any_model: Take requests for models of any name.
        open_chat: Makes the ChatSession of a conversation that shows the model these tools, in place of the app.
        watch: Awaited for the answer to each request, with what is asked and what has it answered; it may ask for something
            else in its place, refuse it with an ApiError, and sees what came of it.
        posts: Further paths below /v1 that may be posted to, and who takes it.

    Raises:
        SessionInputError: The model or the key is empty, the key is no ASCII, there is neither pool nor client, or the
            tokenizer has no token for what ends a turn in the parser's format.
    """

    def __init__(
        self,
        pool: ServerPool | None,
        tokens: ContinuousTokens,
        *,
        model: str,
        parser: ToolParser | None = None,
        config: SessionConfig | None = None,
        api_key: str | None = None,
        limits: AppLimits | None = None,
        client: LLMServerClient | None = None,
        only_session: str | None = None,
        any_model: bool = False,
        open_chat: OpenChat | None = None,
        watch: Watch | None = None,
        posts: Mapping[str, TakePost] | None = None,
    ) -> None:
        if not model:
            raise SessionInputError("model must be a name, got ''; give the one that clients will send")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
            raise SessionInputError(
                "api_key must be printable ASCII, got another text; choose one of letters and digits"
            )
        TurnReader(tokens.tokenizer, parser, None)  # each conversation makes one; what it would refuse is refused now
        self.model, self.limits = model, limits or AppLimits()
        if client is None:
            if pool is None:
                raise SessionInputError("pool or client must be given, got neither; pass where generations come from")
            client = pool.client(admission=AdmissionConfig(enable=False))
        self._replicas: ServerPool | LLMServerClient = pool or client
        self._client, self._tokens, self._parser = client, tokens, parser
        self._only_session, self._any_model, self._watch = only_session, any_model, watch
        self._config = config or SessionConfig()
        self._key = None if api_key is None else api_key.encode()
        self._created = int(time.time())
        self._sweeping: asyncio.Task[None] | None = None
        self._num_in_flight = 0
        self._is_closed = False
        self.sessions = SessionStore(open_chat or self._open_chat, self.limits)
        """Conversations; `take` gives those of a session to whoever trains on them."""
        self._asgi = self._routes(posts or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        await self._asgi(scope, receive, send)

    @property
    def needs_key(self) -> bool:
        """Whether clients must bring a key."""
        return self._key is not None

    @property
    def num_in_flight(self) -> int:
        """Answers that are being sampled, `n` for each request; returns to zero."""
        return self._num_in_flight

    async def start(self) -> None:
        """Begin to expire idle sessions. Servers that speak ASGI's lifespan do this by themselves."""
        self._is_closed = False
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """End all sessions and what is under way in them; later requests are sent away. The pool is not shut down."""
        self._is_closed = True
        sweeping, self._sweeping = self._sweeping, None
        if sweeping is not None:
            sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await sweeping
        await self.sessions.close()

    def _routes(self, posts: Mapping[str, TakePost]) -> Starlette:
        def routes(prefix: str) -> list[Route]:
            return [
                Route(f"{prefix}/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route(f"{prefix}/v1/responses", self._guarded(self._responses), methods=["POST"]),
                Route(f"{prefix}/v1/models", self._guarded(self._models), methods=["GET"]),
                Route(f"{prefix}/v1/models/{{model:path}}", self._guarded(self._one_model), methods=["GET"]),
            ]

        app = Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/sessions/{session}", self._guarded(self._end_session), methods=["DELETE"]),
                *routes("/sessions/{session}"),
                *routes(""),
                *(
                    Route(f"/v1{path}", self._guarded(partial(self._post, take)), methods=["POST"])
                    for path, take in posts.items()
                ),
            ],
            exception_handlers={HTTPException: _no_route},
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False  # behind a gateway a redirection would lead past the trajectory's address
        return app

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        await self.start()
        try:
            yield
        finally:
            await self.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.limits.idle_timeout_s / _SWEEPS_PER_TIMEOUT)
            try:
                await self.sessions.expire()
            except Exception:
                logger.exception("idle sessions could not be ended; the next round tries again")

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Let only those in who have the key, and answer every error in OpenAI's form."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return error_response(told(error))

        return guarded

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        scheme, _, key = (header(request, "Authorization") or "").partition(" ")
        if not hmac.compare_digest(key.strip().encode(), self._key) or scheme.lower() != "bearer":
            raise ApiError(
                "Authorization must be 'Bearer KEY' with this server's key, got another; set api_key in your client",
                status=401,
                code="invalid_api_key",
            )

    async def _chat(self, request: Request) -> Response:
        session = self._session(request)
        body = await read_body(request, self.limits)
        chat = parse_request(body, self.limits, vocab_size=self._tokens.tokenizer.vocab_size)
        self._check_served(chat)
        decode = self._tokens.tokenizer.decode
        return TurnResponse(
            partial(self._answer, chat, session),
            whole=lambda answer: completion(answer, chat, decode),
            events=(lambda answer: chunks(answer, chat, decode)) if chat.stream else None,
            limits=self.limits,
        )

    async def _responses(self, request: Request) -> Response:
        session = self._session(request)
        body = await read_body(request, self.limits)
        asked = parse_responses_request(body, self.limits, vocab_size=self._tokens.tokenizer.vocab_size)
        self._check_served(asked.chat)
        return TurnResponse(
            partial(self._answer, asked.chat, session),
            whole=lambda answer: response(answer, asked),
            events=(lambda answer: events(answer, asked)) if asked.chat.stream else None,
            limits=self.limits,
        )

    async def _post(self, take: TakePost, request: Request) -> Response:
        return json_response(take(await read_body(request, self.limits)))

    def _session(self, request: Request) -> str | None:
        if self._only_session is None:
            return _session_name(request)
        # Some frameworks send an X-Session-ID of their own with every request, to be routed by; here it leads nowhere else.
        name = request.path_params.get("session")
        if name not in (None, self._only_session):
            raise ApiError(
                f"the session must be left out here, got {name!r}; every request belongs to the same one",
                status=404,
                code="session_not_found",
            )
        return self._only_session

    def _check_served(self, chat: ChatRequest) -> None:
        if not self._any_model and chat.model is not None and chat.model != self.model:
            raise no_model(chat.model, self.model)
        if chat.tools and self._parser is None:
            raise ApiError(
                "tools must be left out, got some; this server was started without a format of calls", param="tools"
            )

    async def _answer(self, chat: ChatRequest, session: str | None) -> Answer:
        if self._is_closed:
            raise shutting_down()
        if self._num_in_flight and self._num_in_flight + chat.n > self.limits.max_in_flight:
            raise ApiError(
                f"answers must be at most {self.limits.max_in_flight} at a time, got {chat.n} more; wait and try again",
                status=503,
                code="too_many_requests",
            )
        self._num_in_flight += chat.n
        try:
            logprobs_known = all(server.capabilities().logprobs for server in self._replicas.servers)
            proceed = partial(
                answer_request, store=self.sessions, session=session, model=self.model, logprobs_known=logprobs_known
            )
            return await (proceed(chat) if self._watch is None else self._watch(chat, proceed))
        except asyncio.CancelledError:
            if self._is_closed:
                raise shutting_down() from None
            raise
        finally:
            self._num_in_flight -= chat.n

    def _open_chat(self, session: str | None, tools: Sequence[dict]) -> ChatSession:
        if not self._replicas.servers:
            raise NoReplicaError("at least one replica must be in service, got none; restart the server")
        length = min(server.max_model_len for server in self._replicas.servers)
        return ChatSession(
            client=self._client,
            tokens=self._tokens,
            config=self._config,
            budget=SessionBudget(max_prompt_tokens=length, max_response_tokens=length, max_model_len=length),
            parser=self._parser,
            tools=tools,
            group=session,
            call_id_prefix=f"call_{self.sessions.num_begun}_",  # a history may hold calls of another conversation
        )

    async def _end_session(self, request: Request) -> Response:
        name = self._session(request)
        assert name is not None  # the route has it
        try:
            chats = await self.sessions.take(name)
        except UnknownSessionError as error:
            raise ApiError(str(error), status=404, code="session_not_found") from None
        return json_response(
            {
                "id": name,
                "object": "session.deleted",
                "deleted": True,
                "num_segments": sum(len(chat.segments) for chat in chats),
                "num_sampled_tokens": sum(chat.metrics.num_sampled_tokens for chat in chats),
            }
        )

    async def _models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def _one_model(self, request: Request) -> Response:
        if request.path_params["model"] != self.model:
            raise no_model(request.path_params["model"], self.model)
        return json_response(self._model())

    def _model(self) -> dict:
        length = min((server.max_model_len for server in self._replicas.servers), default=UNKNOWN_MAX_MODEL_LEN)
        return {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "ostinato",
            "max_model_len": None if length == UNKNOWN_MAX_MODEL_LEN else length,
        }

    async def _health(self, _request: Request) -> Response:
        """Tell how the replicas are; needs no key, and changes nothing in the pool."""
        states = await asyncio.gather(*map(_health_of, self._replicas.servers))
        ready = any(state.ready for state in states)
        store = self.sessions
        report = {
            "status": "ready" if ready else "unavailable",
            "replicas": [{"state": state.state, "policy_version": state.policy_version} for state in states],
            "num_in_flight": self._num_in_flight,
            "num_sessions": len(store),
            "num_conversations": store.num_open,
            "num_expired_sessions": store.num_expired,
        }
        headers = None if ready else ApiError("", status=503).headers
        return json_response(report, 200 if ready else 503, headers)


async def _health_of(server: AsyncServerBase) -> Health:
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            return await server.health()
    except Exception as error:
        return Health(EngineState.FAILED, server.policy_version, detail=f"{type(error).__name__}: {error}")


def _session_name(request: Request) -> str | None:
    """Return the session that a request names, by its path or by its header."""
    names = {request.path_params.get("session"), header(request, "X-Session-ID")} - {None}
    if len(names) > 1:
        raise ApiError(
            "X-Session-ID must be the session of the path, got another; send one of them", param="X-Session-ID"
        )
    name = names.pop() if names else None
    if name is not None and not _SESSION_NAME.fullmatch(name):
        raise ApiError(
            f"a session's name must be 1 to 128 letters, digits, or . _ : @ -, got {name!r:.80}; choose another",
            param="X-Session-ID",
        )
    return name


async def _no_route(request: Request, error: Exception) -> Response:
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
    message = (
        f"the path must be one of /v1/chat/completions, /v1/responses, /v1/models, /health and /sessions/NAME, each by its"
        f" method, got {request.method} {request.url.path!r:.200}; see the documentation"
    )
    response = error_response(ApiError(message, status=status))
    response.headers.update(headers or {})  # which methods a path has
    return response
