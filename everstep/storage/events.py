"""What happens once in a run, such as a fault that fired: stored before it acts, so that it never acts twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.core.errors import CorruptObject
from everstep.core.ids import new_id
from everstep.storage import checked
from everstep.storage.keys import EVENTS, EventKey, parse
from everstep.storage.manifests import create_object
from everstep.storage.store import Store


def add(store: Store, run: str, name: str, body: Mapping[str, Any]) -> bool:
    """Store the event; True only for the one caller that stored it.

    The write id makes two callers with equal bodies different, and one caller whose answer was lost the same.
    """
    stored = {"write_id": new_id(), "name": name, "body": dict(body)}
    return create_object(store, f"{run}/{EventKey(name).path}", checked.dump(stored))


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
        found[key.name] = decode(bytes(store.get(info.key)), name=key.name, where=info.key)
    return found


def decode(data: bytes | bytearray, *, name: str, where: str) -> dict[str, Any]:
    """Return the body of the event `name` that `add` stored; `where` is the object's name, for messages.

    Raises:
        CorruptObject: it is not that. (Events of the first runs carry neither checksum nor name.)
    """
    try:
        stored = checked.load(data, optional=True)
        body = dict(stored["body"])
        if stored.get("name", name) != name:
            raise ValueError(f"it is the event {stored['name']!r}")
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptObject(
            f"event {where} is damaged: expected JSON with a body ({error})",
            hint="put it back from a copy, or remove this object",
        ) from error
    return body
