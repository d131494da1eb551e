"""What a chat template writes around an assistant's turns, under one set of template variables.

Everything here is probed when it is first asked for. It knows nothing of how a conversation is continued.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ostinato_tokenization.control_text import NEXT_SENTINEL, SENTINEL, MaskTable
from ostinato_tokenization.errors import ChatTemplateError
from ostinato_tokenization.template_probe import SYSTEM, USER

if TYPE_CHECKING:
    from ostinato_tokenization.chat_tokenizer import ChatTokenizer

PLAIN_TURN = {"role": "assistant", "content": SENTINEL}
"""An assistant's turn whose words are a sentinel."""


class TurnFrame:
    """The frame of turns in one template; made by `TemplateProfile`.

    Args:
        tokenizer: Tokenizer and template.
        template_kwargs: Variables of the template.
    """

    def __init__(self, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kwargs = template_kwargs
        self._words_before: dict[str, array[int]] = {}

    def _render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str | None:
        """The conversation, behind a system text where the template asks for one; None where it refuses both."""
        for opening in ([], [SYSTEM]):
            try:
                return self._tokenizer.render_as_is(
                    [*opening, *messages],
                    None,
                    add_generation_prompt=add_generation_prompt,
                    template_kwargs=self._kwargs,
                    started_at=0.0,
                )
            except ChatTemplateError:
                continue
        return None

    @cached_property
    def generation_prompt(self) -> str:
        """What the template writes to let the assistant speak; empty where that cannot be told apart."""
        with_prompt, without = (self._render([USER], add_generation_prompt=add) for add in (True, False))
        if with_prompt is None or without is None or not with_prompt.startswith(without):
            return ""
        return with_prompt[len(without) :]

    @cached_property
    def generation_prompt_ids(self) -> array[int]:
        """Its ids; none where it does not begin with a control token."""
        text = self.generation_prompt
        known = self._tokenizer.starts_with_control(text)
        return array("i", self._tokenizer.encode_masked(text, MaskTable()) if known else ())

    @cached_property
    def prefill(self) -> str:
        """The end of the generation prompt that the template does not write before an earlier turn, such as `<think>`."""
        prompt = self.generation_prompt
        before, found, _ = (self._render([USER, PLAIN_TURN, USER]) or "").partition(SENTINEL)
        for cut in range(len(prompt), 0, -1) if found else ():
            if before.endswith(prompt[:cut]):
                return prompt[cut:]
        return ""

    @cached_property
    def close_lead_ids(self) -> tuple[int, ...]:
        """Ids that the template writes between an assistant's last words and the control string that ends the turn."""
        text = self._render([USER, PLAIN_TURN, {"role": "user", "content": NEXT_SENTINEL}]) or ""
        zone = text.rpartition(SENTINEL)[2].partition(NEXT_SENTINEL)[0]
        for at, control in self._tokenizer.find_control(zone):
            if control in self._tokenizer.boundaries.ends:
                return tuple(self._tokenizer.encode_masked(zone[:at], MaskTable(), continues=True))
        return ()

    @cached_property
    def ids_at_end(self) -> array[int]:
        """Ids of what the template writes behind the last words of a conversation: some write a generation prompt always."""
        text = (self._render([USER, PLAIN_TURN]) or "").rpartition(SENTINEL)[2]
        return array("i", self._tokenizer.encode_masked(text, MaskTable(), continues=True))

    def words_before(self, role: str) -> array[int]:
        """Ids of what a template whose turns end in words writes between an assistant's words and a message of this role."""
        if role not in self._words_before:
            text = self._render([USER, PLAIN_TURN, {"role": role, "content": NEXT_SENTINEL}]) or ""
            zone, found, _ = text.rpartition(SENTINEL)[2].partition(NEXT_SENTINEL)
            ids = self._tokenizer.encode_masked(zone if found else "", MaskTable(), continues=True)
            self._words_before[role] = array("i", ids)
        return self._words_before[role]

    @cached_property
    def reasoning_close(self) -> str:
        """What the template writes between an assistant's reasoning and its answer."""
        turn = {"role": "assistant", "content": SENTINEL, "reasoning_content": NEXT_SENTINEL}
        between = (self._render([USER, turn]) or "").partition(NEXT_SENTINEL)[2].partition(SENTINEL)
        return between[0] if between[1] and between[0].strip() else "\n</think>\n\n"
