"""What either end counts."""

import msgspec


class TransportStats(msgspec.Struct):
    """What a remote server has sent, over all its connections."""

    num_generates: int = 0
    num_prompt_tokens: int = 0
    """In the prompts of all generations."""
    num_sent_tokens: int = 0
    """Of these, those that travelled."""
    num_whole: int = 0
    """Prompts that were sent whole at once: first turns, and those that do not go on from the last one."""
    num_resent: int = 0
    """Prompts that were sent whole because the replica had forgotten their beginning, or had another."""
    num_malformed: int = 0
    """Messages of the replica that could not be read."""
    num_lost: int = 0
    """Connections that were lost."""
    num_replaced: int = 0
    """Times that another service was found at the address."""


class ServiceStats(msgspec.Struct):
    """What a service has seen."""

    num_generates: int = 0
    num_forgotten: int = 0
    """Prompts that had to be sent again."""
    num_malformed: int = 0
    """Messages that could not be read; they were answered, if anybody could be told."""
    num_refused: int = 0
    """Hellos without the key, or of another protocol."""
    num_vanished: int = 0
    """Callers that went without a goodbye."""
    num_undelivered: int = 0
    """Messages for somebody who was gone."""
    num_release_failures: int = 0
    """Conversations that the server failed to release after their caller had gone."""
