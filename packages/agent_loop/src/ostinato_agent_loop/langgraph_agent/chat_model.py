"""The policy as a LangChain chat model: a graph says messages, what was sampled is recorded as it was sampled.

Invariant: the model has no state that a message would have to carry: which conversation a call goes on with follows from
what the history says. Nothing is answered from a cache, and what cannot be obeyed is refused. Knows no graph.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field

from ostinato_agent_loop.errors import GraphInputError
from ostinato_agent_loop.langgraph_agent.bridge import LoopBridge
from ostinato_agent_loop.langgraph_agent.conversations import GraphConversations, GraphTurn
from ostinato_agent_loop.langgraph_agent.graph_tools import TrajectoryTool
from ostinato_agent_loop.langgraph_agent.messages import chunks_of, message_of, plain_messages

_ABOUT_FORM = ("stream", "ls_structured_output_format")
"""Keywords that LangChain passes on and that ask for nothing of the model."""


class ChatModel(BaseChatModel):
    """The policy of one trajectory.

    Use `ainvoke` and `astream` on the event loop, `invoke` and `stream` in other threads, as LangGraph runs nodes that are
    ordinary functions. A stream has the text of the turn as one chunk and then a last one with its calls, its end and its
    cost: engines answer with whole turns, so there is nothing to show earlier.
    """

    conversations: Any = Field(exclude=True, repr=False)
    """The trajectory's GraphConversations."""
    bridge: Any = Field(exclude=True, repr=False)
    """The trajectory's LoopBridge."""
    on_turn: Any = Field(default=None, exclude=True, repr=False)
    """Called with each GraphTurn before anybody else sees it; None: nobody is."""
    cache: Any = Field(default=False, exclude=True)
    """False: LangChain's cache would give answers that nobody sampled."""

    @classmethod
    def over(
        cls,
        conversations: GraphConversations,
        bridge: LoopBridge,
        *,
        on_turn: Callable[[GraphTurn], None] | None = None,
    ) -> ChatModel:
        """Return the model of one trajectory."""
        return cls(conversations=conversations, bridge=bridge, on_turn=on_turn)

    @property
    def _llm_type(self) -> str:
        return "ostinato"

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools that it may call: the run's, LangChain's, functions, classes or schemas.

        Args:
            tools: What it is shown.
            tool_choice: None or `auto`; a call cannot be forced, since nothing constrains what is sampled.
            **kwargs: As `ainvoke` takes them.

        Raises:
            GraphInputError: A call is to be forced or forbidden, or a keyword is not known.
        """
        if tool_choice not in (None, "auto"):
            raise GraphInputError(
                f"tool_choice must be None or 'auto', got {tool_choice!r:.80}; a call cannot be forced where nothing"
                " constrains what is sampled: ask for it in words, or bind no tools"
            )
        _read_options(None, kwargs)
        return self.bind(tools=[_schema_of(tool) for tool in tools], **kwargs)

    def with_structured_output(
        self, schema: dict | type, *, include_raw: bool = False, method: str = "function_calling", **kwargs: Any
    ) -> Runnable[LanguageModelInput, dict | BaseModel]:
        """Return a model whose answer is read from the call of a tool with this schema.

        The call cannot be forced: an answer without it is an error, or a `parsing_error` with `include_raw`.

        Args:
            schema: A pydantic class, a TypedDict or a JSON schema.
            include_raw: Return `raw`, `parsed` and `parsing_error` instead of what was parsed.
            method: `function_calling`; nothing else is there.
            **kwargs: None are known.

        Raises:
            GraphInputError: Another method is asked for, or a keyword is not known.
        """
        if method != "function_calling" or any(value is not None for value in kwargs.values()):
            raise GraphInputError(
                f"with_structured_output must use the method function_calling and nothing else, got {method!r} and"
                f" {sorted(kwargs)}; leave the rest out"
            )
        name = convert_to_openai_tool(schema)["function"]["name"]
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            parser: Runnable = PydanticToolsParser(tools=[schema], first_tool_only=True)
        else:
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)

        def must_be_there(parsed: Any) -> Any:
            if parsed is None:
                raise OutputParserException(
                    f"the answer must be a call of {name}, got none; tell the model to call it, or use include_raw"
                )
            return parsed

        model, read = self.bind_tools([schema]), parser | RunnableLambda(must_be_there)
        if not include_raw:
            return model | read
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | read, parsing_error=lambda _: None)
        without = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([without], exception_key="parsing_error")

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _result(await self.bridge.call(self._sample, messages, stop, kwargs))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _result(self.bridge.call_blocking(self._sample, messages, stop, kwargs))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        for chunk in chunks_of(await self.bridge.call(self._sample, messages, stop, kwargs)):
            yield ChatGenerationChunk(message=chunk)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in chunks_of(self.bridge.call_blocking(self._sample, messages, stop, kwargs)):
            yield ChatGenerationChunk(message=chunk)

    async def _sample(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> GraphTurn:
        tools, max_tokens = _read_options(stop, options)
        turn = await self.conversations.answer(plain_messages(messages), tools, max_tokens, _as_it_comes_back)
        if self.on_turn is not None:
            self.on_turn(turn)
        return turn


def _as_it_comes_back(turn: GraphTurn) -> dict:
    return plain_messages([message_of(turn)])[0]


def _result(turn: GraphTurn) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message_of(turn))])


def _schema_of(tool: Any) -> dict:
    """Return a tool as the model is shown it; the run's own exactly as they stand in its configuration."""
    if isinstance(tool, TrajectoryTool):
        return tool.openai_schema
    schema = convert_to_openai_tool(tool)
    if schema.get("type") != "function":
        raise GraphInputError(
            f"a tool must be a function, got type {schema.get('type')!r}; a policy has no tools of a provider"
        )
    return schema


def _read_options(stop: list[str] | None, options: Mapping[str, Any]) -> tuple[list[dict], int | None]:
    """Return the tools and the longest turn that a call asks for.

    Raises:
        GraphInputError: It asks for something else.
    """
    asked = {name: value for name, value in options.items() if value is not None and name not in _ABOUT_FORM}
    if stop:
        asked["stop"] = stop
    tools, max_tokens = asked.pop("tools", []), asked.pop("max_tokens", None)
    if asked.get("tool_choice") == "auto":
        del asked["tool_choice"]
    if asked:
        raise GraphInputError(
            f"the model must be asked for tools and max_tokens only, got {sorted(asked)}; how it samples is set in the"
            " run's configuration, so that what is trained is what was sampled"
        )
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1):
        raise GraphInputError(f"max_tokens must be a positive number of tokens, got {max_tokens!r}; raise it")
    return tools, max_tokens
