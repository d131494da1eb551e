"""What a tool gives back, in one shape whatever its author returned.

Media values pass through untouched; text is text and is never interpreted.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from ostinato_tools.errors import ToolResultError


class ToolResponse(msgspec.Struct):
    """What a tool shows to the model.

    Raises:
        ToolResultError: `text` is not a string, or `image` or `video` is not a list.
    """

    text: str | None = None
    """Text for the model; None and no media is an empty text."""
    image: list | None = None
    """Images, passed on untouched."""
    video: list | None = None
    """Videos, passed on untouched."""

    def __post_init__(self) -> None:
        if self.text is not None and not isinstance(self.text, str):
            raise ToolResultError(
                f"text must be a string or None, got {type(self.text).__name__}; convert it with str() or json.dumps()"
            )
        for name in ("image", "video"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise ToolResultError(f"{name} must be a list, got {type(value).__name__}; put one value in a list")


def normalize_result(result: Any) -> tuple[ToolResponse, float, dict]:
    """Bring what a tool returned into the shape `(response, reward, metrics)`.

    Args:
        result: `str`, `dict` (shown as JSON), `ToolResponse`, or a tuple `(response, reward)` or
            `(response, reward, metrics)` of one of them; reward None counts as 0.0, metrics None as empty.

    Raises:
        ToolResultError: it is anything else, the reward is not a finite number, or metrics is not a mapping.
    """
    reward: Any = None
    metrics: Any = None
    response = result
    if isinstance(result, tuple):
        if len(result) == 2:
            response, reward = result
        elif len(result) == 3:
            response, reward, metrics = result
        else:
            raise ToolResultError(
                "a tuple returned by a tool must be (response, reward) or (response, reward, metrics), "
                f"got {len(result)} items; return str, dict or ToolResponse where there is no reward"
            )
    return _as_response(response), _as_reward(reward), _as_metrics(metrics)


def message_content(text: str, response: ToolResponse | None) -> str | list[dict]:
    """Return the content of a tool's message: its text or, where there are media, parts.

    Args:
        text: The text as the model shall read it.
        response: Where the media are, if there are any.
    """
    if response is None or not (response.image or response.video):
        return text
    content = [{"type": "image", "image": image} for image in response.image or ()]
    content += [{"type": "video", "video": video} for video in response.video or ()]
    if text:
        content.append({"type": "text", "text": text})
    return content


def _as_response(value: Any) -> ToolResponse:
    if isinstance(value, str):
        response = ToolResponse(text=value)
    elif isinstance(value, ToolResponse):
        value.__post_init__()  # fields can be assigned after construction
        response = value
    elif isinstance(value, dict):
        try:
            response = ToolResponse(text=json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolResultError(
                f"a dict returned by a tool must be JSON, got one that is not ({error}); convert its values first"
            ) from error
    else:
        raise ToolResultError(
            f"a tool must return str, dict, ToolResponse or (response, reward[, metrics]), got {type(value).__name__}; "
            "convert the value with str() or put it in a dict"
        )
    if response.text is not None and not response.text.isascii():
        try:
            response.text.encode()
        except UnicodeEncodeError as error:
            raise ToolResultError(
                f"text must be valid Unicode, got a lone surrogate at character {error.start}; "
                'decode bytes with errors="replace"'
            ) from error
    return response


def _as_reward(value: Any) -> float:
    if value is None:
        return 0.0
    try:
        reward = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not math.isfinite(reward):
        raise ToolResultError(f"reward must be a finite number or None, got {short_repr(value)}; return a float")
    return reward


def _as_metrics(value: Any) -> dict:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ToolResultError(f"metrics must be a dict or None, got {type(value).__name__}; return a dict")
    return dict(value)


def short_repr(value: Any) -> str:
    """Return how a foreign value is written, cut; its class where it cannot be written."""
    try:
        text = repr(value)
    except Exception:  # a foreign __repr__, or an integer of thousands of digits
        text = f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."
