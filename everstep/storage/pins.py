"""Pins: what a restore or a fork is using, so that garbage collection leaves it alone.

Whoever uses objects that a live run may drop writes a pin first and reads the manifest again after it: either that
shows the drop, or the collector, which lists pins after it has committed the drop, sees the pin.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass

from everstep.core import clock
from everstep.core.errors import CorruptObject, StepNotKept
from everstep.core.ids import new_id
from everstep.storage import manifests
from everstep.storage.chain import Chain
from everstep.storage.keys import PINS, DataKey, PinKey, parse
from everstep.storage.listing import Listing
from everstep.storage.store import Store

RESTORE_S = 24 * 3600.0  # a restore that has not ended after this is taken for dead


@dataclass(frozen=True)
class Pin:
    """Objects of one run that somebody uses.

    Attributes:
        run: whose objects.
        id: the pin's own name.
        objects: their paths in the run.
        child: the run that was forked from them; "" for a restore.
        until: seconds since the epoch after which it does not count; None: for as long as the child uses the run.
        created: seconds since the epoch.
    """

    run: str
    id: str
    objects: tuple[str, ...]
    child: str
    until: float | None
    created: float

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{self.run}/{PinKey(self.id).path}"


def pin(chain: Chain, keys: Iterable[DataKey], *, child: str = "") -> list[Pin]:
    """Write pins for these objects, one in each run that owns some; return them.

    Raises:
        StepNotKept: some of them were dropped or deleted meanwhile; the pins are void (collection removes them).
    """
    wanted = set(keys)
    pins = []
    for run in sorted({key.run or chain.run for key in wanted}):
        paths = tuple(sorted(key.path for key in wanted if (key.run or chain.run) == run))
        until = None if child else clock.wall() + RESTORE_S
        made = Pin(run, f"{'fork' if child else 'restore'}-{new_id()}", paths, child, until, clock.wall())
        manifests.create_object(chain.store, made.name, json.dumps(asdict(made)).encode())
        pins.append(made)
    for made in pins:
        _still_there(chain.store, made)
    return pins


def read_pins(store: Store, run: str) -> list[Pin]:
    """Return all pins of a run.

    Raises:
        CorruptObject: one cannot be read, so that nobody knows what it holds.
    """
    found = []
    for info in store.list(f"{run}/{PINS}"):
        if not isinstance(parse(info.key.removeprefix(f"{run}/")), PinKey):
            continue
        try:
            body = json.loads(store.get(info.key))
            found.append(Pin(**body | {"objects": tuple(body["objects"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptObject(
                f"pin {info.key} is damaged: expected JSON with the objects it holds ({error!r})",
                hint="nothing is collected while nobody knows what it holds; if no fork uses it, remove it",
            ) from error
    return found


def live(store: Store, pins: Collection[Pin], *, now: float, grace_s: float) -> tuple[list[Pin], list[Pin]]:
    """Return (pins that count, pins that do not): a restore's time may be over, a fork gone or grown out of its parent.

    Args:
        store: where the forks are looked up.
        pins: of one run.
        now: seconds since the epoch.
        grace_s: how long a fork may take between its pin and its first manifest.
    """
    counting: list[Pin] = []
    void: list[Pin] = []
    for made in pins:
        (counting if _counts(store, made, now, grace_s) else void).append(made)
    return counting, void


def _counts(store: Store, made: Pin, now: float, grace_s: float) -> bool:
    if made.until is not None:
        return now < made.until
    child = manifests.latest(store, made.child)
    if child is None:
        return now - made.created < grace_s
    return child.state != "deleted" and made.run in child.origins


def _still_there(store: Store, made: Pin) -> None:
    manifest = manifests.latest(store, made.run)
    listed = {key.path for key, _ in Listing.of(made.run, store.list(f"{made.run}/g")).objects}
    dropped = set(manifest.dropped) if manifest else set()
    gone = [path for path in made.objects if path in dropped or path not in listed]
    if gone:
        raise StepNotKept(
            f"run {made.run!r}: step no longer kept: {len(gone)} of {len(made.objects)} objects it needs were dropped "
            f"meanwhile, the first {gone[0]}",
            hint=f"choose a step that is kept: everstep chain ls {made.run}",
        )
