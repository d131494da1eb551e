"""Which rows of a dataset are used, where it is not all of them."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

__all__ = ["RowSample"]


class RowSample(Struct, frozen=True):
    """At most so many rows, in the order of their files."""

    num_rows: int
    """How many; at least 1."""
    seed: int | None
    """Seed of the choice; None takes the first ones."""

    def chosen(self, total: int) -> list[int]:
        """Numbers of the rows that are used, of `total`, ascending."""
        if self.seed is None or self.num_rows >= total:
            return list(range(min(self.num_rows, total)))
        rng = np.random.default_rng([abs(self.seed), int(self.seed < 0)])
        return sorted(rng.choice(total, self.num_rows, replace=False).tolist())
