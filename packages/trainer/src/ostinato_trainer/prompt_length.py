"""How long a prompt is, and what is cut from one that is too long.

Filter, dataset and rollout count with the same render: the chat template with the row's tools, the extra template
variables and the generation prompt. What is cut is text inside the longest message, so that the template stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.errors import DatasetError

__all__ = ["PromptLength", "cut_text"]


class PromptLength:
    """Counts and shortens prompts for one tokenizer and one set of template variables.

    Args:
        tokenizer: the policy's chat tokenizer.
        template_kwargs: extra variables for the template.
        max_tokens: longest prompt, `data.max_prompt_length`.
    """

    def __init__(self, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any], max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs)
        self.max_tokens = max_tokens

    def count(self, messages: Sequence[dict], tools: Sequence[dict] | None) -> int:
        """Tokens of the prompt as the engine will see it.

        Raises:
            DatasetError: the chat template refuses these messages; the sentence begins with `prompt`.
        """
        try:
            token_ids = self._tokenizer.encode_chat(
                messages, tools, add_generation_prompt=True, template_kwargs=self._template_kwargs or None
            )
        except Exception as error:  # the template is foreign code and may raise anything
            raise DatasetError(
                f"prompt must be accepted by the chat template, got {type(error).__name__}: {error}; "
                "change its messages or actor_rollout_ref.model.chat_template"
            ) from error
        return len(token_ids)

    def shortened(
        self, messages: Sequence[dict], tools: Sequence[dict] | None, side: Literal["left", "right", "middle"]
    ) -> list[dict]:
        """Messages that fit, with text cut from the `side` of the longest message.

        Raises:
            DatasetError: the prompt does not fit even without that message's text.
        """
        place = max(range(len(messages)), key=lambda number: len(_text(messages[number])))
        text = _text(messages[place])
        cut_messages = list(messages)

        def fits(num_kept: int) -> bool:
            cut_messages[place] = {**messages[place], "content": cut_text(text, num_kept, side)}
            return self.count(cut_messages, tools) <= self.max_tokens

        if not text or not fits(0):
            raise DatasetError(
                f"prompt must fit in data.max_prompt_length={self.max_tokens} tokens after cutting its longest message, "
                "got more; raise the limit or shorten tools and system text"
            )
        kept, too_many = 0, len(text)
        while too_many - kept > 1:
            middle = (kept + too_many) // 2
            if fits(middle):
                kept = middle
            else:
                too_many = middle
        cut_messages[place] = {**messages[place], "content": cut_text(text, kept, side)}
        return cut_messages


def cut_text(text: str, num_kept: int, side: Literal["left", "right", "middle"]) -> str:
    """`num_kept` characters of `text`, what is lost being on its `side`."""
    if side == "right":
        return text[:num_kept]
    if side == "left":
        return text[len(text) - num_kept :]
    head = (num_kept + 1) // 2
    return text[:head] + text[len(text) - (num_kept - head) :]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
