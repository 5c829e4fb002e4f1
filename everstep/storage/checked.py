"""JSON that carries its own checksum, as `crc32c` beside its other fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import google_crc32c


def checksum(body: Mapping[str, Any]) -> str:
    """CRC32C over the sorted compact form, so that it does not depend on the layout of the text."""
    return f"{google_crc32c.value(json.dumps(body, sort_keys=True, separators=(',', ':')).encode()):08x}"


def dump(body: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Return the object as JSON, with the checksum of everything else as its last entry."""
    return json.dumps({**body, "crc32c": checksum(body)}, indent=indent).encode()


def load(data: bytes | bytearray, *, optional: bool = False) -> dict[str, Any]:
    """Return what `dump` was given; `optional`: a checksum may be missing, as in objects of the first runs.

    Raises:
        ValueError: it is no JSON object, or its checksum is missing or wrong; says what was expected and found.
    """
    body = json.loads(data)
    if not isinstance(body, dict):
        raise ValueError(f"expected a JSON object, got {type(body).__name__}")
    stated = body.pop("crc32c", None)
    found = checksum(body)
    if stated != found and not (optional and stated is None):
        raise ValueError(f"its content has checksum {found}, but it says {stated!r}")
    return body
