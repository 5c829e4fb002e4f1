"""Randomness is a function of what it is for: keys are folded into seeds, nothing is ever saved."""

from __future__ import annotations

import hashlib


def fold(seed: int, *keys: int | str) -> int:
    """Return a 63-bit seed that depends on `seed` and every key, and on their order.

    SHA-256 based, so the same on every machine and Python version.
    """
    text = "/".join(str(part) for part in (seed, *keys))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
