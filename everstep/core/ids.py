"""The only place that makes identifiers."""

from __future__ import annotations

import uuid


def new_id() -> str:
    """A fresh identifier of 12 hexadecimal digits, unique among writers and actors."""
    return uuid.uuid4().hex[:12]
