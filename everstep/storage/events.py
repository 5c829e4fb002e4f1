"""What happens once in a run, such as a fault that fired: stored before it acts, so that it never acts twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import google_crc32c

from everstep.core.errors import CorruptObject
from everstep.core.ids import new_id
from everstep.storage.keys import EVENTS, EventKey, parse
from everstep.storage.manifests import create_object
from everstep.storage.store import Store


def add(store: Store, run: str, name: str, body: Mapping[str, Any]) -> bool:
    """Store the event; True only for the one caller that stored it.

    The write id makes two callers with equal bodies different, and one caller whose answer was lost the same.
    """
    stored = {"write_id": new_id(), "body": dict(body)}
    data = json.dumps(stored | {"crc32c": _checksum(stored)}).encode()
    return create_object(store, f"{run}/{EventKey(name).path}", data)


def read_all(store: Store, run: str, prefix: str = "") -> dict[str, dict[str, Any]]:
    """Return the body of every event whose name starts with `prefix`, by name.

    Raises:
        CorruptObject: one of them is not what `add` wrote.
    """
    found: dict[str, dict[str, Any]] = {}
    for info in store.list(f"{run}/{EVENTS}{prefix}"):
        key = parse(info.key.removeprefix(f"{run}/"))
        if not isinstance(key, EventKey):
            continue
        found[key.name] = decode(store.get(info.key), where=info.key)
    return found


def decode(data: bytes | bytearray, *, where: str) -> dict[str, Any]:
    """Return the body of what `add` stored; `where` is its name, for messages.

    Raises:
        CorruptObject: it is not that, or its checksum is wrong. (Events of the first runs carry none.)
    """
    try:
        stored = json.loads(data)
        stated = stored.pop("crc32c", None)
        body = dict(stored["body"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _corrupt(where, f"expected JSON with a body ({error!r})") from error
    if stated is not None and stated != _checksum(stored):
        raise _corrupt(where, f"its content has checksum {_checksum(stored)}, but it says {stated!r}")
    return body


def _checksum(stored: Mapping[str, Any]) -> str:
    """CRC32C over the sorted compact form, as in manifests."""
    return f"{google_crc32c.value(json.dumps(stored, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _corrupt(where: str, what: str) -> CorruptObject:
    return CorruptObject(f"event {where} is damaged: {what}", hint="put it back from a copy, or remove this object")
