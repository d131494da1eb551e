"""What ranks must do alike, where one of them finds out something that the others cannot know."""

from __future__ import annotations

import torch.distributed as dist


def raise_alike(error: Exception | None) -> None:
    """Raises on every rank what the first rank that has an error has; returns where none has. Collective."""
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for found in errors:
        if found is not None:
            raise found
