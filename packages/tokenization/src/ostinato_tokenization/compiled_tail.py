"""What follows an assistant's turn, prepared once for each sequence of roles: literal ids, and slots for contents.

Renderings with probes in the messages show where each content stands and what the template does to it. A tail exists
only where every probe came out as foreseen; contents on which the template might act otherwise (those that hold a text
that the template asks for, blank ones, other forms than text) are left to it. Invariant: the ids of a tail are those of
the rendering that it stands for.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ostinato_tokenization.errors import ChatTemplateError, HistoryRewrittenError, MessageError
from ostinato_tokenization.messages import Message, check_unicode

if TYPE_CHECKING:
    from ostinato_tokenization.chat_tokenizer import ChatTokenizer
    from ostinato_tokenization.plain_text import EncodePlain

Transform = Callable[[str], str]
Shape = tuple[tuple[str, str | None, bool], ...]
"""Of each message: its role, its name, whether it has a tool_call_id."""

MAX_MESSAGES = 8
_KNOWN_KEYS = frozenset(("role", "content", "name", "tool_call_id"))
_CALL_IDS = ("call00001", "x9Yw2LmQ7")
_EDGES = (
    "x",
    " x ",
    "\n\tx\r\n\n",
    "\n\nx\n",
    "  x  y",
    "\u00a0x\u3000",
    '"x"',
    "{'a': \"b\\n\\\\\"}",
    "é\U0001f642\u2028x",
)
_CONTENTS = (
    *_EDGES, "12", "-1.5", "true", "null", '{"a": [1, "b"]}', "[1, 2]", "x" * 5000, "one\ntwo\n\nthree\n", "a\tb", "\x1cx\x1f",
    "http://x.y/z?a=b&c=d", "<b>&amp;</b>", "{{ x }}{% y %}", "# t\n- l", "'x'", "x.", ".x", "//x", "\\x", "|x|", "%s", "x:", "e\u0301",
)  # fmt: skip


_json_encode = msgspec.json.Encoder().encode


def _as_json(text: str) -> str:
    """As `json.dumps(text, ensure_ascii=False)`, which is slower; the text is valid Unicode."""
    return _json_encode(text).decode()


def _stripped_json(text: str) -> str:
    return _as_json(text.strip())


_TRANSFORMS: tuple[Transform, ...] = (
    str,
    str.strip,
    _as_json,
    str.lstrip,
    str.rstrip,
    _stripped_json,
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
)
"""What templates do to contents; the commonest first."""


class _Slot(NamedTuple):
    message: int
    transform: Transform


class _Mixed(NamedTuple):
    """Plain text between two control tokens with contents in it: encoded in one, for merges across their borders."""

    literals: tuple[str, ...]
    """One more than slots."""
    slots: tuple[_Slot, ...]
    with_prefix: bool
    lstrip: bool
    rstrip: bool

    def text(self, contents: Sequence[str]) -> str:
        text = self.literals[0]
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            text += slot.transform(contents[slot.message]) + literal
        text = text.lstrip() if self.lstrip else text
        return text.rstrip() if self.rstrip else text

    def composer(self) -> Callable[[Sequence[str]], str]:
        """`text`, or what comes to the same and is faster."""
        if len(self.slots) != 1 or self.lstrip or self.rstrip:
            return self.text
        (before, after), ((message, transform),) = self.literals, self.slots
        if transform is str:
            return lambda contents: before + contents[message] + after
        return lambda contents: before + transform(contents[message]) + after


class CompiledTail:
    """Literal ids and mixed texts, in turn.

    Args:
        encode: Encodes plain text; told whether a word-start mark is put before it.
        head: Ids before the first mixed text.
        rest: Mixed texts, and the ids that follow each.
        left_to_template: Finds the texts on which the template may act in another way.
    """

    def __init__(
        self,
        encode: EncodePlain,
        head: array[int],
        rest: Sequence[tuple[_Mixed, array[int]]],
        left_to_template: re.Pattern[str] | None,
    ) -> None:
        self._encode = encode
        self._head = head
        self._rest = tuple((mixed.composer(), mixed.with_prefix, ids) for mixed, ids in rest)
        self._left = left_to_template

    def ids(self, messages: Sequence[Message]) -> array[int] | None:
        """Ids of the tail with these messages' contents; None where the template must be asked.

        Raises:
            MessageError: A content holds unpaired surrogates.
        """
        contents = [message["content"] for message in messages]
        for text in contents:
            if type(text) is not str or not text or text.isspace() or (self._left and self._left.search(text)):
                return None
            if not text.isascii():
                check_unicode(text)
        ids = self._head[:]
        for compose, with_prefix, literal in self._rest:
            ids += self._encode(compose(contents), with_prefix=with_prefix)
            ids += literal
        return ids


def shape_of(messages: Sequence[Message]) -> Shape | None:
    """The shape of new messages; None where no tail is made for such."""
    if len(messages) > MAX_MESSAGES:
        return None
    shape: list[tuple[str, str | None, bool]] = []
    for message in messages:
        if type(message) is not dict or not message.keys() <= _KNOWN_KEYS or "content" not in message:
            return None
        role, name = message.get("role"), message.get("name")
        call_id = message.get("tool_call_id", _KNOWN_KEYS)
        if type(role) is not str or not role or not (name is None or type(name) is str):
            return None
        if ("name" in message and name is None) or not (call_id is _KNOWN_KEYS or type(call_id) is str):
            return None
        shape.append((role, name, call_id is not _KNOWN_KEYS))
    return tuple(shape)


def compile_tail(
    tokenizer: ChatTokenizer,
    shape: Shape,
    render: Callable[[list[Message], float], str],
    asked_for: Collection[str],
) -> CompiledTail | None:
    """Prepare the tail of one shape; None where a probe did not come out as foreseen.

    Args:
        render: The continuation with these messages, at this moment, as text.
        asked_for: Texts that the template holds: contents with one that changes the rendering are left to it.
    """
    if any(text != text.strip() or _as_json(text) != f'"{text}"' for text in tokenizer.control_strings):
        return None  # the template would see the mask of such a text and write it otherwise
    probe = _Probe(shape, render)
    try:
        parts = probe.find_parts()
        if parts is None:
            return None
        literals, slots = parts
        for shift in range(len(_CONTENTS)):
            contents = [_CONTENTS[(shift + 5 * place) % len(_CONTENTS)] for place in range(len(shape))]
            if not probe.foresees(literals, slots, contents):
                return None
    except (ChatTemplateError, HistoryRewrittenError, MessageError):
        return None
    left = [text for text in sorted(asked_for) if not probe.is_harmless(literals, slots, text)]
    left += tokenizer.trusted_control_text  # those are no plain text
    if any(len(text) < 2 or text.isspace() for text in left):
        return None
    pattern = re.compile("|".join(map(re.escape, left))) if left else None
    return _assemble(tokenizer, literals, slots, pattern)


class _Probe:
    """Renders one shape with chosen contents."""

    def __init__(self, shape: Shape, render: Callable[[list[Message], float], str]) -> None:
        self._shape = shape
        self._render = render

    def text(self, contents: Sequence[str], *, call_id: str = _CALL_IDS[0], moment: float = 0.0) -> str:
        messages: list[Message] = []
        for (role, name, has_id), content in zip(self._shape, contents, strict=True):
            message: dict[str, Any] = {"role": role, "content": content}
            if name is not None:
                message["name"] = name
            if has_id:
                message["tool_call_id"] = call_id
            messages.append(message)
        return self._render(messages, moment)

    def find_parts(self) -> tuple[tuple[str, ...], tuple[_Slot, ...]] | None:
        """The literal texts and the slots between them."""
        marks = [f"zq{place}Vx7k" for place in range(len(self._shape))]
        text = self.text(marks)
        if self.text(marks, call_id=_CALL_IDS[1]) != text or self.text(marks, moment=4e8) != text:
            return None
        places: list[tuple[int, str, _Slot]] = []
        for message, mark in enumerate(marks):
            slot = self._slot_of(message, marks, text)
            if slot is None:
                return None
            shown = slot.transform(mark)
            places.append((text.index(shown), shown, slot))
        places.sort(key=lambda place: place[0])
        literals, end = [], 0
        for start, shown, _ in places:
            literals.append(text[end:start])
            end = start + len(shown)
        return (*literals, text[end:]), tuple(slot for _, _, slot in places)

    def _slot_of(self, message: int, marks: list[str], text: str) -> _Slot | None:
        shown = [self.text([*marks[:message], edge, *marks[message + 1 :]]) for edge in _EDGES]
        for transform in _TRANSFORMS:
            mark = transform(marks[message])
            if text.count(mark) != 1 or text.count(marks[message]) != 1:
                continue
            before, _, after = text.partition(mark)
            if all(whole == before + transform(edge) + after for edge, whole in zip(_EDGES, shown, strict=True)):
                return _Slot(message, transform)
        return None

    def foresees(self, literals: Sequence[str], slots: Sequence[_Slot], contents: Sequence[str]) -> bool:
        """Whether the template writes these contents as the parts say."""
        mixed = _Mixed(tuple(literals), tuple(slots), False, False, False)
        return self.text(contents) == mixed.text(contents)

    def is_harmless(self, literals: Sequence[str], slots: Sequence[_Slot], text: str) -> bool:
        """Whether a text is written like any other, wherever it stands in a content."""
        closing = text.replace("<", "</", 1).replace("[", "[/", 1)
        try:
            return all(
                self.foresees(literals, slots, [content] * len(self._shape))
                for content in (text, f"x{text}y", f"{text}y", f"x{text}", f"{text}y{closing}", f" {text}\n{text} ")
                if content.strip()
            )
        except (ChatTemplateError, HistoryRewrittenError, MessageError):
            return False


def _assemble(
    tokenizer: ChatTokenizer, literals: Sequence[str], slots: Sequence[_Slot], left: re.Pattern[str] | None
) -> CompiledTail | None:
    """Cut the text at its control tokens; what lies between them is encoded now unless a content stands in it."""
    encode = tokenizer.plain_encoder.encode_array
    head = array("i")
    rest: list[tuple[_Mixed, array[int]]] = []
    pieces, inside = [""], []
    with_prefix, lstrip = tokenizer.starts_with_control(literals[0]), False

    def close_piece(rstrip: bool) -> None:
        mixed = _Mixed(tuple(pieces), tuple(inside), with_prefix, lstrip, rstrip)
        if inside:
            rest.append((mixed, array("i")))
        elif text := mixed.text(()):
            (rest[-1][1] if rest else head).extend(encode(text, with_prefix=with_prefix))

    for number, literal in enumerate(literals):
        start = 0
        for at, string in tokenizer.find_control(literal):
            token = tokenizer.control_token(string)
            if token.single_word:
                return None
            pieces[-1] += literal[start:at]
            close_piece(token.lstrip)
            (rest[-1][1] if rest else head).append(token.id)
            pieces, inside = [""], []
            start, lstrip, with_prefix = at + len(string), token.rstrip, tokenizer.prefix_follows(token)
        pieces[-1] += literal[start:]
        if number < len(slots):
            inside.append(slots[number])
            pieces.append("")
    close_piece(False)
    return CompiledTail(encode, head, rest, left)
