"""How long a prompt is, and what is cut from one that is too long.

Filter, dataset and rollout count with the same render: the chat template with the row's tools, the extra template
variables and the generation prompt. What is cut is text inside the longest message, so that the template stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.data.vocabulary import token_beyond
from ostinato_trainer.errors import DatasetError

__all__ = ["PromptLength", "count_or_refusal", "cut_text", "without_longest_text"]

Side = Literal["left", "right", "middle"]


class PromptLength:
    """Counts and shortens prompts for one tokenizer and one set of template variables.

    Args:
        tokenizer: the policy's chat tokenizer.
        template_kwargs: extra variables for the template.
        max_tokens: longest prompt, `data.max_prompt_length`.
        vocab_size: of the model, where the tokenizer has ids beyond it: a prompt with one of these is refused.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        template_kwargs: Mapping[str, Any],
        max_tokens: int,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs)
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size

    def count(self, messages: Sequence[dict], tools: Sequence[dict] | None) -> int:
        """Tokens of the prompt as the engine will see it.

        Raises:
            DatasetError: the chat template refuses these messages, or the model has no embedding for one of the tokens; the sentence
                begins with `prompt`.
        """
        try:
            token_ids = self.tokenizer.encode_chat(
                messages, tools, add_generation_prompt=True, template_kwargs=self._template_kwargs or None
            )
        except Exception as error:  # the template is foreign code and may raise anything
            raise DatasetError(
                f"prompt must be accepted by the chat template, got {type(error).__name__}: {error}; "
                "change its messages or actor_rollout_ref.model.chat_template"
            ) from error
        beyond = None if self.vocab_size is None else token_beyond(self.tokenizer, token_ids, self.vocab_size)
        if beyond is not None:
            raise DatasetError(
                f"prompt must be of tokens of the model's vocabulary of {self.vocab_size}, got {beyond}; change the prompt, or name a model "
                "whose embeddings were resized for its tokenizer in actor_rollout_ref.model.path"
            )
        return len(token_ids)

    def shortened(self, messages: Sequence[dict], tools: Sequence[dict] | None, side: Side) -> list[dict]:
        """Messages that fit, with text cut from the `side` of the longest text among them.

        Raises:
            DatasetError: the prompt does not fit even without that text.
        """
        text, place = _longest_text(messages)
        kept, too_many = 0, len(text)
        if not text or self.count(_with_text(messages, place, ""), tools) > self.max_tokens:
            raise DatasetError(self.too_long_to_cut)
        while too_many - kept > 1:
            middle = (kept + too_many) // 2
            if self.count(_with_text(messages, place, cut_text(text, middle, side)), tools) <= self.max_tokens:
                kept = middle
            else:
                too_many = middle
        return _with_text(messages, place, cut_text(text, kept, side))

    @property
    def too_long_to_cut(self) -> str:
        """What is said of a prompt that does not fit even without its longest text."""
        return (
            f"prompt must fit in data.max_prompt_length={self.max_tokens} tokens after cutting its longest message, "
            "got more; raise the limit or shorten tools and system text"
        )


def count_or_refusal(length: PromptLength, messages: Sequence[dict], tools: Sequence[dict] | None) -> int | str:
    """Tokens of a prompt, or the sentence that says why there is none."""
    try:
        return length.count(messages, tools)
    except DatasetError as error:
        return str(error)


def without_longest_text(messages: Sequence[dict]) -> list[dict]:
    """The messages as short as a cut can make them."""
    return _with_text(messages, _longest_text(messages)[1], "")


def cut_text(text: str, num_kept: int, side: Side) -> str:
    """`num_kept` characters of `text`, what is lost being on its `side`."""
    if side == "right":
        return text[:num_kept]
    if side == "left":
        return text[len(text) - num_kept :]
    head = (num_kept + 1) // 2
    return text[:head] + text[len(text) - (num_kept - head) :]


_Place = tuple[int, int | None]
"""Number of a message, and of a part where its content is a list of parts."""


def _longest_text(messages: Sequence[Mapping[str, Any]]) -> tuple[str, _Place]:
    """The longest text and where it stands; the first of equally long ones."""
    found: tuple[str, _Place] = "", (0, None)
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            texts: list[tuple[int | None, Any]] = [(None, content)]
        else:
            texts = [(part, entry.get("text")) for part, entry in enumerate(content or ())]
        for part, text in texts:
            if isinstance(text, str) and len(text) > len(found[0]):
                found = text, (number, part)
    return found


def _with_text(messages: Sequence[dict], place: _Place, text: str) -> list[dict]:
    """The messages with another text at one place; the given ones stay as they are."""
    number, part = place
    changed = list(messages)
    message = changed[number]
    if part is None:
        content: Any = text
    else:
        content = list(message["content"])
        content[part] = {**content[part], "text": text}
    changed[number] = {**message, "content": content}
    return changed
