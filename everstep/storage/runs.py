"""The runs of a store at a glance; a damaged one is a row like the others."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from everstep.core.errors import ChainError, CorruptObject, EverstepError
from everstep.storage import manifests
from everstep.storage.chain import Chain
from everstep.storage.keys import DataKey, is_name
from everstep.storage.listing import Listing
from everstep.storage.pins import read_pins
from everstep.storage.plan import plan_restore
from everstep.storage.store import ObjectInfo, Store


def list_runs(store: Store) -> list[dict[str, Any]]:
    """Return one row a run, by name; `problem` says what is wrong with it, None if it can be opened and restored.

    Raises:
        StoreError: the store cannot be listed.
    """
    found: dict[str, list[ObjectInfo]] = {}
    for info in store.list(""):
        run, slash, _ = info.key.partition("/")
        if slash and is_name(run):
            found.setdefault(run, []).append(info)
    rows = []
    for run, infos in sorted(found.items()):
        listing = Listing.of(run, infos)
        if listing.objects:
            rows.append(_row(store, run, listing))
    return rows


def _row(store: Store, run: str, listing: Listing) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run": run, "state": "damaged", "generation": None, "last_restorable": None, "exactness": None,
        "bytes": sum(info.size for key, info in listing.objects if isinstance(key, DataKey)),
        "created": None, "origin": None, "problem": None,
    }  # fmt: skip
    try:
        chain = Chain.open(store, run, deleted_too=True)
        row |= _facts(chain)
        row["created"] = _created(store, run, listing)
        if chain.manifest.shards:
            row["last_restorable"] = plan_restore(chain.manifest, chain.listing()).target
    except EverstepError as error:
        row["problem"] = error.message
    return row


def _facts(chain: Chain) -> Mapping[str, Any]:
    manifest = chain.manifest
    return {
        "state": manifest.state,
        "generation": manifest.generation,
        "exactness": manifest.exactness,
        "origin": f"{manifest.origin.run}@{manifest.origin.step}" if manifest.origin else None,
    }


def _created(store: Store, run: str, listing: Listing) -> str | None:
    """Return when the oldest manifest that is still there was written, ISO 8601 in UTC; None if it cannot be read."""
    try:
        first = manifests.read(store, run, min(listing.versions()))
    except (ChainError, ValueError):
        return None
    return datetime.fromtimestamp(first.created, UTC).isoformat(timespec="seconds")


def forks_of(chain: Chain) -> list[dict[str, Any]]:
    """Return the runs that were forked from this one, and how many of its objects each of them holds."""
    try:
        pins = read_pins(chain.store, chain.run)
    except CorruptObject as error:
        return [{"run": None, "objects": None, "problem": error.message}]
    held: dict[str, set[str]] = {}
    for made in pins:
        if made.child:
            held.setdefault(made.child, set()).update(made.objects)
    return [{"run": child, "objects": len(objects)} for child, objects in sorted(held.items())]
