"""A tokenizer and its chat template, as one object.

Invariant: text of messages and tools never becomes a control token; without control strings in that text the ids are
those of the tokenizer on the rendered conversation. It knows nothing of ledgers, turns or masks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from ostinato_tokenization.control_text import ControlText, MaskTable
from ostinato_tokenization.decoding import Decoder
from ostinato_tokenization.errors import MessageError, VocabularyError
from ostinato_tokenization.messages import Message, check_unicode, normalize_messages, normalize_tools
from ostinato_tokenization.plain_text import (
    ControlToken,
    PlainEncoder,
    control_tokens,
    marks_start,
)
from ostinato_tokenization.rendering import (
    arguments_as_text,
    compile_template,
    contents_as_parts,
    own_variables,
    render_template,
)
from ostinato_tokenization.template_probe import MessageForms, probe_boundaries, probe_forms
from ostinato_tokenization.template_profile import TemplateProfile
from ostinato_tokenization.tokenizer_files import read_tokenizer, take_tokenizer, templates_by_name


class ChatTokenizer:
    """Renders conversations and encodes them. Shared and never changed after construction.

    Args:
        tokenizer: Owned by this object from here on; truncation and padding are switched off.
        chat_template: The template, or several by name (`default`, and `tool_use` where tools are given).
        named_tokens: `bos_token`, `eos_token`, …: what the template calls them, and the string.

    Raises:
        ChatTemplateError: The template does not compile.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_template: str | Mapping[str, str],
        *,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = False
        self._tokenizer = tokenizer
        self._sources = templates_by_name(chat_template, "the chat_template argument")
        self.template_sources = tuple(self._sources.values())
        """The texts of the templates."""
        self._templates = {name: compile_template(source) for name, source in self._sources.items()}
        self.is_dated = any("strftime_now" in source for source in self._sources.values())
        """Whether the template asks for the present date."""
        self._named_tokens = dict(named_tokens or {})
        self._control_tokens = control_tokens(tokenizer)
        self._by_content = {token.content: token for token in self._control_tokens}
        self.control_token_ids = frozenset(token.id for token in self._control_tokens)
        """Ids of added tokens other than whitespace: text never becomes one of these."""
        known = max((token.id + 1 for token in self._control_tokens), default=0)
        self.vocab_size: int = max(tokenizer.get_vocab_size(with_added_tokens=True), known)
        """One more than the largest id."""
        self._decoder = Decoder(tokenizer, self.vocab_size)
        self._profiles: dict[bytes, TemplateProfile] = {}
        normalizer = tokenizer.normalizer
        after_normalization = normalizer is not None and any(token.normalized for token in self._control_tokens)
        self._normalizer = normalizer
        self._given = ControlText(self._by_content, self.normalize if after_normalization else None)
        self._hidden = self._given
        self.trusted_control_text: tuple[str, ...] = ()
        """Control strings that message text may hold as such; see `trusting`."""
        self._trusting: dict[frozenset[str], ChatTokenizer] = {}
        self._marks_start = marks_start(tokenizer)
        self._own = ControlText(())  # the probes below must see the template's own text
        self._forms = MessageForms()
        self._forms = probe_forms(self)
        self.boundaries = probe_boundaries(self)
        eos = self._named_tokens.get("eos_token", "")
        stops = {self._by_content[text].id for text in self.boundaries.stops}
        if (eos_id := self.token_id(eos)) is not None:
            stops.add(eos_id)
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(stops))
        """Ids that end an assistant turn: what the template writes after one, and the end-of-sequence token."""
        self.end_token_ids = frozenset(stops | {self._by_content[text].id for text in self.boundaries.ends})
        """The same, and what the template closes earlier turns with."""
        self._own = ControlText({text for text in (*self.boundaries.structural, eos) if text in self._by_content})
        self._base_own = self._own

    @classmethod
    def from_pretrained(cls, path: str | Path, *, chat_template: str | None = None) -> ChatTokenizer:
        """Read a directory in the Hugging Face layout; nothing is downloaded.

        Raises:
            TokenizerNotFoundError: There is no tokenizer.json.
            TokenizerLoadError: A file is damaged.
            ChatTemplateError: There is no template, or it does not compile.
        """
        files = read_tokenizer(path, chat_template)
        return cls(files.tokenizer, files.templates, named_tokens=files.named_tokens)

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> ChatTokenizer:
        """Take over a fast tokenizer of transformers, or that of a processor, which may change afterwards without effect here.

        Raises:
            TokenizerLoadError: It is not a fast tokenizer.
            ChatTemplateError: It has no chat template.
        """
        files = take_tokenizer(tokenizer)
        return cls(files.tokenizer, files.templates, named_tokens=files.named_tokens)

    def trusting(self, strings: Collection[str]) -> ChatTokenizer:
        """The same tokenizer, for which exactly these strings in message text are control tokens: placeholders such as
        `<image>` that the caller itself puts there, in text that nobody else can write.

        Raises:
            VocabularyError: One is no control token of this tokenizer.
        """
        wanted = frozenset(strings)
        unknown = sorted(wanted - self._by_content.keys())
        if isinstance(strings, str) or unknown:
            raise VocabularyError(
                f"trusted_control_text must hold control tokens of the tokenizer, got {unknown or strings!r};"
                " give a tuple of strings that are added tokens"
            )
        if wanted == frozenset(self.trusted_control_text):
            return self
        if wanted not in self._trusting:
            other = object.__new__(ChatTokenizer)
            other.__dict__.update(self.__dict__)
            other.trusted_control_text = tuple(sorted(wanted))
            other._hidden = self._given.without(wanted)
            other._own = self._base_own.without(wanted)
            other._profiles, other._trusting = {}, {}
            self._trusting[wanted] = other
        return self._trusting[wanted]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._tokenizer.to_str(), self._sources, self._named_tokens, self.trusted_control_text)

    def __repr__(self) -> str:
        return f"ChatTokenizer(vocab_size={self.vocab_size}, template={self.template_hash})"

    @cached_property
    def template_hash(self) -> str:
        """First 12 hex digits of the SHA-256 of the template's text."""
        return hashlib.sha256(msgspec.json.encode(self._sources, order="sorted")).hexdigest()[:12]

    @property
    def tool_template(self) -> str:
        """Text of the template that is used where tools are given."""
        return self._sources.get("tool_use", self._sources["default"])

    @property
    def eos_token(self) -> str:
        """The end-of-sequence token that the files name; empty where they name none."""
        return self._named_tokens.get("eos_token", "")

    @property
    def eos_token_id(self) -> int | None:
        """Its id."""
        return self.token_id(self.eos_token)

    @cached_property
    def blank_variables(self) -> dict[str, str]:
        """Empty texts for the variables that only a caller can give: some templates render nothing without them."""
        return dict.fromkeys(sorted(set().union(*map(own_variables, self._sources.values()))), "")

    @cached_property
    def plain_encoder(self) -> PlainEncoder:
        """Encodes valid text between two control tokens, so that none of it becomes one."""
        return PlainEncoder(self._tokenizer, self._control_tokens)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the template writes it.

        Raises:
            MessageError: Messages or tools have a form that cannot be rendered.
            ChatTemplateError: The template refuses them.
        """
        text, table = self.render_masked(
            messages, tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )
        return table.restore(text)

    def render_masked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None = None,
        started_at: float | None = None,
    ) -> tuple[str, MaskTable]:
        """The rendered text with control strings of messages still masked, for `encode_masked`.

        Args:
            started_at: The moment (seconds since 1970) that the template takes for the present; None for now.
        """
        table = MaskTable()
        text = self.render_as_is(
            self.mask_messages(messages, table),
            self.mask_tools(tools, table),
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
            started_at=started_at,
        )
        return text, table

    def mask_messages(self, messages: Sequence[Message], table: MaskTable) -> list[Message]:
        """Messages in the form for `render_as_is`, their control strings masked in `table`."""
        return [
            (self._own if message["role"] == "assistant" else self._hidden).mask_value(message, table)
            for message in normalize_messages(messages, part_separator=self._forms.part_separator)
        ]

    def render_as_is(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None = None,
        started_at: float | None = None,
    ) -> str:
        """The template on messages and tools that are masked already, or that hold sentinels."""
        template = self._templates["default"]
        if tools is not None and "tool_use" in self._templates:
            template = self._templates["tool_use"]
        messages = arguments_as_text(messages) if self._forms.arguments_as_text else messages
        variables: dict[str, Any] = {
            **self._named_tokens,
            "messages": contents_as_parts(messages) if self._forms.contents_as_parts else messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if started_at is not None and self.is_dated:
            variables["strftime_now"] = datetime.fromtimestamp(started_at).strftime
        if template_kwargs:
            variables.update(template_kwargs)
        text = render_template(template, variables)
        if not text.isascii():
            check_unicode(text)
        return text

    def mask_tools(self, tools: Sequence[Mapping[str, Any]] | None, table: MaskTable) -> list[Any] | None:
        """Tools in the form for `render_as_is`; an empty sequence is None."""
        schemas = normalize_tools(tools)
        if schemas is None:
            return None
        try:
            document = msgspec.json.encode(schemas).decode()
        except (TypeError, ValueError) as error:
            raise MessageError(f"tools must be JSON values, got {error}; pass OpenAI tool schemas") from error
        return self._hidden.mask_value(schemas, table) if self._hidden.may_occur_in_json(document) else schemas

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        started_at: float | None = None,
        trusted_control_text: Collection[str] = (),
    ) -> list[int]:
        """Ids of the conversation. Control strings within message or tool text become ordinary tokens.

        In assistant messages only the strings that separate turns are kept from becoming control tokens: tags such as
        `<think>` and `<tool_call>` are the assistant's own.

        Args:
            trusted_control_text: Control strings that do become control tokens; see `trusting`.

        Raises:
            MessageError: Messages or tools have a form that cannot be rendered.
            ChatTemplateError: The template refuses them.
        """
        encoder = self.trusting(trusted_control_text) if trusted_control_text else self
        text, table = encoder.render_masked(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
            started_at=started_at,
        )
        return self.encode_masked(text, table)

    def encode_masked(self, text: str, table: MaskTable, *, continues: bool = False) -> list[int]:
        """Ids of rendered text: control strings in it become control tokens, masked ones ordinary tokens.

        Args:
            continues: Whether other text stands before it, so that the tokenizer's word-start mark has no place.
        """
        if not table and not (continues and self._marks_start) and not self.plain_encoder.is_fast:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        found = (
            (match.start(), match.end(), self._by_content[match.group()])
            for match in self._given.pattern.finditer(text)
        )
        return self.plain_encoder.encode_around(text, found, table.restore, with_prefix=not continues)

    def prefix_follows(self, token: ControlToken) -> bool:
        """Whether text behind this control token gets a word-start mark."""
        return self.plain_encoder.prefix_follows(token)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text, none of them a control token.

        Raises:
            MessageError: It holds unpaired surrogates, or is no text.
        """
        check_unicode(text)
        if self.plain_encoder.is_fast or self._given.occurs_in(text):
            return self.plain_encoder.encode(text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the ids; bytes that are no complete character become U+FFFD.

        Raises:
            VocabularyError: An id is not in the vocabulary.
        """
        return self._decoder.text(token_ids, skip_special_tokens=skip_special_tokens)

    def normalize(self, text: str) -> str:
        """What the tokenizer makes of a text before it splits it."""
        return text if self._normalizer is None else self._normalizer.normalize_str(text)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact string; None if there is none."""
        return self._tokenizer.token_to_id(token)

    @property
    def control_strings(self) -> tuple[str, ...]:
        """The strings of the control tokens, by id."""
        return tuple(self._by_content)

    def control_token_id(self, token: str) -> int | None:
        """The same for control tokens only."""
        found = self._by_content.get(token)
        return None if found is None else found.id

    def control_token(self, token: str) -> ControlToken:
        """What is known of a control token; its string must be one."""
        return self._by_content[token]

    def find_control(self, text: str) -> list[tuple[int, str]]:
        """Offsets and strings of the control strings in rendered text, in order."""
        return [(match.start(), match.group()) for match in self._given.pattern.finditer(text)]

    def next_control(self, text: str, start: int) -> re.Match[str] | None:
        """The first control string in rendered text, not before `start`."""
        return self._given.pattern.search(text, start)

    def starts_with_control(self, text: str) -> bool:
        """Whether rendered text begins with a control string."""
        return self._given.pattern.match(text) is not None

    def profile(self, template_kwargs: Mapping[str, Any] | None = None) -> TemplateProfile:
        """How the template behaves under these variables; probed once."""
        try:
            key = msgspec.json.encode(template_kwargs or {}, order="sorted")
        except TypeError:
            return TemplateProfile(self, template_kwargs)
        if key not in self._profiles:
            self._profiles[key] = TemplateProfile(self, template_kwargs)
        return self._profiles[key]


def _rebuild(
    document: str, templates: dict[str, str], named: dict[str, str], trusted: tuple[str, ...] = ()
) -> ChatTokenizer:
    made = ChatTokenizer(tokenizers.Tokenizer.from_str(document), templates, named_tokens=named)
    return made.trusting(trusted)
