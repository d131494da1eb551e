"""What was sampled, as a turn: the ids that end it, its text, and the calls in it. Knows one tokenizer and one parser."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ostinato_rollout.errors import SessionInputError
from ostinato_rollout.turns import same_turn
from ostinato_tokenization import ChatTokenizer
from ostinato_tools import ParsedTurn, ToolParser

_TAIL_LENGTH = 8


class TurnReader:
    """Reads the turns of one conversation.

    Args:
        tokenizer: Decodes.
        parser: Reads calls; None takes the text as it is.
        tools: Schemas that the model is shown.
        call_id_prefix: What the ids of its calls begin with.
        generation_prompt_ids: What prompts end with, as a rule.

    Raises:
        SessionInputError: The tokenizer has no single token for a stop token of the parser.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        parser: ToolParser | None,
        tools: Sequence[dict] | None,
        *,
        call_id_prefix: str = "call_",
        generation_prompt_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._parser, self._tools = tokenizer, parser, tools
        self._openers: tuple[str, ...] = ()
        """Texts behind which a turn begins inside reasoning."""
        if parser is not None:
            self._openers = tuple(getattr(parser, "reasoning_openers", ("<think>",)))
        self._usual_end, self._usual_opens = self._resolve_usual_end(generation_prompt_ids)
        self._call_id_prefix = call_id_prefix
        self.stop_ids = self._resolve_stop_ids()
        """Ids that end a turn: the template's, and those that the parser names as text."""

    def _resolve_stop_ids(self) -> tuple[int, ...]:
        ids = list(self._tokenizer.stop_token_ids)
        for token in () if self._parser is None else self._parser.stop_tokens:
            token_id = self._tokenizer.token_id(token)
            if token_id is None:
                name = "" if self._parser is None else self._parser.name
                raise SessionInputError(
                    f"the stop token of format {name!r} must be a token of the tokenizer, got {token!r}, which it does not"
                    " have; choose the format that the model was trained with"
                )
            ids.append(token_id)
        return tuple(dict.fromkeys(ids))

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Tell whether the generation prompt has opened the reasoning, so that the turn begins inside it."""
        if not self._openers:
            return False
        usual = self._usual_end
        if usual and prompt[-len(usual) :] == usual:
            return self._usual_opens
        return self._end_of(prompt).endswith(self._openers)

    def _end_of(self, prompt: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt[-_TAIL_LENGTH:]).rstrip()

    def _resolve_usual_end(self, generation_prompt_ids: Sequence[int]) -> tuple[array[int], bool]:
        """The ids that prompts end with as a rule, and whether they open reasoning; none where they alone do not tell."""
        text = self._end_of(generation_prompt_ids)
        if len(text) < max(map(len, self._openers), default=0):
            return array("i"), False
        return array("i", generation_prompt_ids), text.endswith(self._openers)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn, control tokens kept; the token that ends a turn is no part of it."""
        if token_ids[-1] in self._tokenizer.stop_token_ids:
            token_ids = token_ids[:-1]
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def parse(self, text: str, *, turn: int, in_reasoning: bool = False) -> ParsedTurn:
        """Read a turn; `turn` makes the ids of its calls differ from those of other turns."""
        if self._parser is None:
            return ParsedTurn(content=text, reasoning=None, tool_calls=(), errors=())
        return self._parser.parse(
            text, self._tools, id_prefix=f"{self._call_id_prefix}{turn}_", in_reasoning=in_reasoning
        )

    def same_turn(self, said: str, shown: str) -> bool:
        """Tell whether two texts are the same turn, however it is written."""
        return same_turn(self.parse(said, turn=0), self.parse(shown, turn=0))
