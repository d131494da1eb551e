"""Whatever is said, stopped, cut off, injected, forked, forgotten or stored: the record is what the model saw."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostinato_tokenization import ContinuousTokens, HistoryRewrittenError, TokenLedger
from ostinato_tokenization.control_text import MaskTable
from ostinato_tokenization.testing import sample_chat_tokenizer
from ostinato_tokenization.testing.strategies import chat_tokenizers, context_messages, hostile_texts, texts

STABLE = {"tools", "plain", "default_system", "opener_stops", "several_closes", "quotes_results"}


class Conversation(RuleBasedStateMachine):
    """One conversation with a tokenizer and a template; `spoken` and `seen` are kept apart from the ledger."""

    @initialize(tokenizer=chat_tokenizers(), first=hostile_texts(), system=st.none() | hostile_texts())
    def begin(self, tokenizer, first, system):
        self.tokenizer, self.tokens = tokenizer, ContinuousTokens(tokenizer)
        self.messages = [] if system is None or not self.takes_system() else [{"role": "system", "content": system}]
        self.messages.append({"role": "user", "content": first})
        self.ledger = self.tokens.build_initial_tokens(self.messages)
        self.spoken, self.seen, self.speaks = [], self.ledger.token_ids, True
        self.canonical = True
        assert self.ledger.token_ids == tokenizer.encode_chat(self.messages)

    def takes_system(self):
        return "must alternate" not in self.tokenizer._sources["default"]

    @property
    def is_stable(self):
        return any(self.tokenizer is sample_chat_tokenizer(kind, name) for kind in KINDS for name in STABLE)

    def record(self, ids, text):
        start = len(self.ledger)
        self.tokens.merge_assistant_tokens(self.ledger, ids, [-float(i) for i in range(len(ids))])
        self.spoken.append((start, ids))
        self.messages.append({"role": "assistant", "content": text})
        self.speaks = False

    def stop_for(self, new):
        """The token with which a policy that follows the template ends its turn before `new`."""
        opener = self.tokens.opener_after([*self.messages, {"role": "assistant", "content": "x"}], new)
        stops = [i for i in self.tokenizer.stop_token_ids if i != self.tokenizer.eos_token_id]
        return opener if opener is not None else stops[0]

    @precondition(lambda self: self.speaks)
    @rule(
        text=texts(), new=context_messages(), how=st.sampled_from(["stop", "cut", "split", "bytes", "eos", "nothing"])
    )
    def turn(self, text, new, how):
        """The policy speaks, stops in one way or another, and something is said to it. What it says holds no control
        strings: as text those would be other ids than as tokens."""
        text = "x" + text.rstrip().replace("<", "(")
        opening = (
            "\n" if self.tokens._profile.frame.generation_prompt == "<|assistant|>" else ""
        )  # written before every answer
        ids = self.said_after_prompt("" if how == "nothing" else opening + text)
        if self.tokens._profile.frame.close_lead_ids and how in ("stop", "eos", "split"):
            ids = [*ids, *self.tokens._profile.frame.close_lead_ids]
        if how == "split":
            ids = [i for token in ids for i in self.pieces(token)]
        if how == "bytes":
            ids = [*ids, *self.tokenizer.encode_text("\U0001fae0")[:-1]]
        if how in ("stop", "split", "bytes"):
            ids = [*ids, self.stop_for(new)]
        if how == "eos":
            ids = [*ids, self.tokenizer.eos_token_id]
        if how in ("split", "bytes", "eos", "nothing"):
            self.canonical = self.canonical and how == "nothing" and not opening
        said = "" if how == "nothing" else text
        before, messages = self.ledger.to_bytes(), self.messages
        self.record(ids, said)
        spoken = len(self.ledger)
        try:
            added = self.tokens.merge_context_messages(self.ledger, self.messages, new)
        except HistoryRewrittenError:
            assert len(self.ledger) == spoken
            with pytest.raises(Exception, match=r"alternate"):
                self.tokenizer.encode_chat([*self.messages, *new])
            self.ledger = TokenLedger.from_bytes(before)
            self.messages = messages[:-1]
            self.spoken.pop()
            self.speaks = True
            return
        assert added == len(self.ledger) - spoken > 0
        self.messages = [*self.messages, *new]
        self.speaks = True
        self.check_controls(spoken, [*new], how)

    def said_after_prompt(self, text):
        """The ids that text has behind the generation prompt in one encoding of both."""
        if self.ledger.token_ids[-1] not in self.tokenizer.control_token_ids:
            return self.tokenizer.encode_masked(text, MaskTable(), continues=True)
        return self.tokenizer.encode_masked("<|im_start|>" + text, MaskTable())[1:]

    def pieces(self, token_id):
        """A token as the tokens of its single characters: the same text, another way."""
        if token_id in self.tokenizer.control_token_ids:
            return [token_id]
        text = self.tokenizer.decode([token_id])
        parts = [i for char in text for i in self.tokenizer.encode_text(char)]
        return parts if self.tokenizer.decode(parts) == text else [token_id]

    def check_controls(self, start, new, how):
        """No control token comes from what is said: a harmless word in its place gives as many."""
        controls = [i for i in self.ledger.token_ids[start:] if i in self.tokenizer.control_token_ids]
        harmless = [{**message, "content": "word"} for message in new]
        twin = self.ledger.fork()
        twin.truncate(start)
        self.tokens.merge_context_messages(twin, self.messages[: len(self.messages) - len(new)], harmless)
        assert controls == [i for i in twin.token_ids[start:] if i in self.tokenizer.control_token_ids]

    @rule(data=st.data())
    def fork_and_forget(self, data):
        """A fork is independent, and forgetting in it comes back to what was there."""
        mark = data.draw(st.integers(0, len(self.ledger)))
        fork = self.ledger.fork()
        fork.truncate(mark)
        assert fork.token_ids == self.ledger.token_ids[:mark]
        assert fork.num_sampled == sum(fork.response_mask)
        fork.append_sampled([0], None)
        assert len(self.ledger) >= mark
        assert fork.token_ids[:mark] == self.ledger.token_ids[:mark]

    @rule()
    def store_and_load(self):
        """A ledger from bytes is the ledger, and the conversation goes on with it."""
        loaded = TokenLedger.from_bytes(self.ledger.to_bytes())
        assert loaded == self.ledger
        self.ledger = loaded

    @invariant()
    def earlier_ids_are_a_prefix(self):
        """What the model has seen stays as it was."""
        if hasattr(self, "ledger"):
            ids = self.ledger.token_ids
            assert ids[: len(self.seen)] == self.seen
            self.seen = ids

    @invariant()
    def sampled_ids_stay_verbatim(self):
        """Each turn is where it was said, and the mask counts those tokens and no others."""
        if hasattr(self, "ledger"):
            ids = self.ledger.token_ids
            assert all(ids[start : start + len(said)] == said for start, said in self.spoken)
            assert self.ledger.num_sampled == sum(self.ledger.response_mask) == sum(len(ids) for _, ids in self.spoken)
            assert len(self.ledger.prompt_ids) + len(self.ledger.response_ids) == len(self.ledger)

    @invariant()
    def canonical_conversations_are_the_rendering(self):
        """Where the policy says what the template would write, and the template keeps what it wrote."""
        if hasattr(self, "ledger") and self.canonical and self.is_stable:
            assert self.ledger.token_ids == self.tokenizer.encode_chat(self.messages)


KINDS = ("byte_level", "nfc", "prepend", "metaspace")
Conversation.TestCase.settings = settings(
    deadline=None, max_examples=40, stateful_step_count=8, suppress_health_check=list(HealthCheck)
)
TestConversation = Conversation.TestCase
