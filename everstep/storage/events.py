"""What happens once in a run, such as a fault that fired: stored before it acts, so that it never acts twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from everstep.core.errors import CorruptObject
from everstep.core.ids import new_id
from everstep.storage.keys import EVENTS, EventKey, parse
from everstep.storage.manifests import create_object
from everstep.storage.store import Store


def add(store: Store, run: str, name: str, body: Mapping[str, Any]) -> bool:
    """Store the event; True only for the one caller that stored it.

    The write id makes two callers with equal bodies different, and one caller whose answer was lost the same.
    """
    data = json.dumps({"write_id": new_id(), "body": dict(body)}).encode()
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
        try:
            found[key.name] = dict(json.loads(store.get(info.key))["body"])
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptObject(
                f"event {info.key} is damaged: expected JSON with a body ({error!r})", hint="remove this object"
            ) from error
    return found
