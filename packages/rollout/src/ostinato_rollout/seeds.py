"""Seeds derived from seeds: the same inputs give the same value in every process, and different inputs unrelated ones."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(*parts: int) -> int:
    """Return a seed in [0, 2**31) that depends on every part and on their order.

    31 bits, because that is what every engine and random generator of this field accepts.
    """
    digest = blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF
