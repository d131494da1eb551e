"""A model that scores, behind HTTP: vLLM's `/classify` and `/pooling`, or a model that judges, by chat completions.

Invariant: a score is a finite number that the server gave in the form that was asked for; anything else, after bounded attempts within
bounded time and memory, is an error. Attempts are repeated where another one may go better: too many requests (429), a fault of the
server (5xx), a connection that fails, a request that runs out of time. Redirections are not followed.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
from collections.abc import Mapping
from typing import Any, Final

import httpx

from ostinato_trainer.config.reward import RewardModelConfig
from ostinato_trainer.errors import RewardError
from ostinato_trainer.rewards.failures import late_text
from ostinato_trainer.rewards.pace import Pace

__all__ = ["RewardModel", "conversation", "template_values"]

_MAX_ANSWER_BYTES: Final = 4 * 2**20
_MAX_JUDGED_CHARS: Final = 16384
"""Only the end of what a judge says is searched, as a pattern may take quadratic time."""
_MAX_BACKOFF_S: Final = 30.0
_JUDGE: Final[dict[str, Any]] = {"temperature": 0.0, "max_tokens": 1024}


class RewardModel:
    """Asks one endpoint for scores.

    Args:
        config: the node `reward.reward_model`, with a url.
        max_connections: requests at the same time.
        pace: the rate of requests.
        timeout_s: seconds for one score, all attempts together.

    Raises:
        RewardError: the environment has no key where one is to be sent.
    """

    name = "the reward model"

    def __init__(self, config: RewardModelConfig, *, max_connections: int, pace: Pace, timeout_s: float) -> None:
        assert config.url is not None
        self._config, self._pace, self._timeout_s = config, pace, timeout_s
        try:
            self._url = httpx.URL(config.url)
        except httpx.InvalidURL as error:
            raise RewardError(f"reward.reward_model.url must be an address, got {error}; write it in full") from None
        self._place = str(self._url.copy_with(userinfo=b"", query=None))  # without what may be secret
        self._pattern = re.compile(config.pattern)
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if config.api_key_env is not None:
            if not (key := os.environ.get(config.api_key_env)):
                raise RewardError(
                    f"reward.reward_model.api_key_env must name a variable that is set, got {config.api_key_env}, which is not; "
                    "export it, or write null for a server without keys"
                )
            if not key.isascii() or not key.isprintable() or " " in key:
                raise RewardError(
                    f"reward.reward_model.api_key_env must name a variable that holds a key, got {config.api_key_env} with a space, a line "
                    "break or another letter that no key has; export the bare key"
                )
            headers["Authorization"] = f"Bearer {key}"
        self._headers = headers
        self._limits = httpx.Limits(max_connections=max_connections)
        self._client: httpx.AsyncClient | None = None
        self._jitter = random.Random(0)  # of its own: a run's seeds do not depend on a server's moods

    async def __call__(self, messages: list[dict[str, Any]], values: dict[str, str]) -> float:
        """Return the score of a trajectory; cancelling closes its request.

        Args:
            messages: the conversation, the response at its end.
            values: what the template may name: prompt, response, ground_truth, data_source.

        Raises:
            RewardError: there is no score: the server refuses, fails too often, takes too long, or gives none.
        """
        answer = await self._asked(self._body(messages, values))
        try:
            score = self._score(answer)
        except (KeyError, IndexError, TypeError, OverflowError):
            raise self._error(
                f"answer in the form of {self._config.api}", _shown(answer), "see reward.reward_model.api"
            ) from None
        if not math.isfinite(score):
            raise self._error("give a finite score", str(score), "see the server's log")
        return score

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _body(self, messages: list[dict[str, Any]], values: dict[str, str]) -> dict[str, Any]:
        config = self._config
        body: dict[str, Any] = {} if config.model is None else {"model": config.model}
        text = config.filled_template(values)
        if config.api == "chat":
            body |= {**_JUDGE, "messages": [{"role": "user", "content": text}]}
        else:
            body |= {"messages": messages} if text is None else {"input": text}
        body |= config.extra_body
        return {name: value for name, value in body.items() if value is not None}

    async def _asked(self, body: dict[str, Any]) -> Any:
        """The first answer that is one, within the deadline of a score."""
        content = json.dumps(body).encode()
        client = self._client
        if client is None:  # made where a loop runs, and before the clock does
            client = self._client = httpx.AsyncClient(headers=self._headers, limits=self._limits, timeout=None)
        failures: list[str] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._attempts(client, content, failures)
        except TimeoutError:
            got = f"{len(failures)} failed attempts, the last: {failures[-1]}" if failures else "no answer"
            raise RewardError(late_text(f"the reward model at {self._place}", self._timeout_s, got)) from None

    async def _attempts(self, client: httpx.AsyncClient, content: bytes, failures: list[str]) -> Any:
        while True:
            try:
                return await self._attempt(client, content)
            except _MayGoBetter as error:
                failures.append(str(error))
                if len(failures) > self._config.max_retries:
                    raise self._error(
                        f"answer within {len(failures)} attempts",
                        str(error),
                        "see the server, or raise reward.reward_model.max_retries",
                    ) from None
                await asyncio.sleep(self._backoff_s(len(failures), error.retry_after_s))
                await self._pace.turn()

    async def _attempt(self, client: httpx.AsyncClient, content: bytes) -> Any:
        timeout_s = self._config.request_timeout_s
        deadline = asyncio.timeout(timeout_s)
        try:
            async with (
                deadline,
                client.stream(
                    "POST", self._url, content=content, headers={"Content-Type": "application/json"}
                ) as response,
            ):
                text = await self._text(response)
        except TimeoutError:
            raise _MayGoBetter(f"no answer within reward.reward_model.request_timeout_s={timeout_s:g} s") from None
        except (httpx.TransportError, OSError) as error:
            raise _MayGoBetter(f"{type(error).__name__}: {error}") from error
        except httpx.HTTPError as error:
            raise self._error(
                "be reachable", f"{type(error).__name__}: {error}", "check reward.reward_model.url"
            ) from error
        status = response.status_code
        if status == 429 or status >= 500:
            raise _MayGoBetter(f"status {status}: {text[:200]}", _seconds(response.headers.get("retry-after")))
        if status != 200:
            raise self._error("answer with status 200", f"{status}: {text[:500]}", "check url, model and key")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self._error("answer in JSON", repr(text[:200]), "check reward.reward_model.url") from None

    async def _text(self, response: httpx.Response) -> str:
        """The body, read no further than it may be long."""
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            raise self._error("answer as it is asked to, unpacked", f"encoding {encoding[:40]}", "turn compression off")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise self._error(
                    f"answer in at most {_MAX_ANSWER_BYTES} bytes", "more", "check reward.reward_model.url"
                )
        return body.decode(errors="replace")

    def _score(self, answer: Any) -> float:
        api = self._config.api
        if api == "chat":
            text = answer["choices"][0]["message"]["content"]
            if not isinstance(text, str):
                raise TypeError
            return self._judged(text)
        data = answer["data"][0]
        numbers = data["probs"] if api == "classify" else data["data"]
        if api == "pooling" and numbers and isinstance(numbers[0], list):
            numbers = numbers[-1]  # a number, or several, for each token
        if not isinstance(numbers, list) or not all(
            isinstance(n, int | float) and not isinstance(n, bool) for n in numbers
        ):
            raise TypeError
        index = self._config.class_index
        if index is None and len(numbers) != 1:
            raise self._error(
                "give one number", str(len(numbers)), "say which of them is the score: reward.reward_model.class_index"
            )
        return float(numbers[index or 0])

    def _judged(self, text: str) -> float:
        found = list(self._pattern.finditer(text[-_MAX_JUDGED_CHARS:]))
        try:
            if found:
                return float(found[-1][1])
        except (TypeError, ValueError):
            pass
        raise self._error(
            f"give a score in the form {self._config.pattern}", repr(text[-200:]), "mend template or pattern"
        ) from None

    def _backoff_s(self, attempt: int, retry_after_s: float) -> float:
        longest = min(self._config.backoff_s * 2.0 ** (attempt - 1), _MAX_BACKOFF_S)
        return max(longest * self._jitter.uniform(0.5, 1.0), min(retry_after_s, _MAX_BACKOFF_S))

    def _error(self, constraint: str, got: str, cure: str) -> RewardError:
        return RewardError(f"the reward model at {self._place} must {constraint}, got {got}; {cure}")


class _MayGoBetter(Exception):
    """An attempt failed in a way in which the next need not."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


def _seconds(retry_after: str | None) -> float:
    """A header `Retry-After` in seconds; one that is a date, or nonsense, counts as none."""
    try:
        seconds = float(retry_after or 0.0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _shown(answer: Any) -> str:
    return json.dumps(answer)[:200]


def conversation(prompt: Any, response: str) -> list[dict[str, Any]]:
    """The prompt's messages with the response at the end."""
    messages: list[dict[str, Any]] = [dict(message) for message in prompt] if isinstance(prompt, list | tuple) else []
    return [*messages, {"role": "assistant", "content": response}]


def template_values(arguments: Mapping[str, Any], prompt: Any) -> dict[str, str]:
    """What a template may name, as text."""
    truth, source = arguments["ground_truth"], arguments["data_source"]
    texts = [f"{message.get('role')}: {message.get('content')}" for message in conversation(prompt, "")[:-1]]
    return {
        "prompt": "\n\n".join(texts),
        "response": arguments["solution_str"],
        "ground_truth": "" if truth is None else str(truth),
        "data_source": "" if source is None else str(source),
    }
