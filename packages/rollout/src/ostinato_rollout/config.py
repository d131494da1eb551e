"""The configuration node of a session: `actor_rollout_ref.rollout.multi_turn`, the part that a conversation reads."""

from __future__ import annotations

import msgspec

from ostinato_tokenization import SanityCheckMode


class SessionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a conversation needs to know beyond its budget."""

    format: str = "hermes"
    """How the model writes tool calls: the name of a tool parser, or `auto` for the one that the chat template tells."""
    tokenization_sanity_check_mode: SanityCheckMode = SanityCheckMode.STRICT
    """Compare, once at the end of a conversation, the recorded tokens with a fresh render of its messages:
    `strict` reports every difference, `ignore_strippable` only those beyond whitespace, `disable` compares nothing."""
    use_inference_chat_template: bool = False
    """Feed the engine a fresh render of the whole conversation each turn, as a chat server would do at inference.
    Where that render does not extend what was recorded, a new segment begins."""
