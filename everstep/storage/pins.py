"""Pins: what a restore or a fork is using, so that garbage collection leaves it alone.

Whoever uses objects that a live run may drop writes pins first (`pin`) and reads the manifest again after that
(`confirm`): either it shows the drop, or the collector, which lists pins after it has committed the drop, sees the pin.

What a fork uses of its parent is held by the fork's own pins for as long as its manifest names the parent. So whoever
uses the fork reads the fork's manifest again, not the parent's: if it still names the parent, then a collector that
finds the fork to have let go does so later, and it lists pins once more after that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from everstep.core import clock
from everstep.core.errors import CorruptObject, ObjectMissing, StepNotKept
from everstep.core.ids import new_id
from everstep.storage import checked, manifests
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
    """Write pins for these objects, one in each run that owns some; they hold nothing until `confirm` has returned."""
    wanted, now = set(keys), clock.wall()
    pins = []
    for run in sorted({key.run or chain.run for key in wanted}):
        paths = tuple(sorted(key.path for key in wanted if (key.run or chain.run) == run))
        name = f"{'fork' if child else 'restore'}-{new_id()}"
        made = Pin(run, name, paths, child, None if child else now + RESTORE_S, now)
        manifests.create_object(chain.store, made.name, checked.dump(asdict(made)))
        pins.append(made)
    return pins


def confirm(chain: Chain, pins: Iterable[Pin]) -> None:
    """Make sure that what these pins name is there and stays.

    Args:
        chain: the run whose plans name the objects.
        pins: what `pin` returned for it.

    Raises:
        StepNotKept: some objects were dropped or deleted meanwhile; the pins hold nothing.
    """
    manifest = manifests.latest(chain.store, chain.run)
    for made in pins:
        gone = list(made.objects)
        if manifest is not None and made.run == chain.run:
            listed = {key.path for key, _ in Listing.of(chain.run, chain.store.list(f"{chain.run}/g")).objects}
            gone = [path for path in gone if path in manifest.dropped or path not in listed]
        elif manifest is not None and made.run in manifest.origins:
            gone = []
        if gone:
            raise StepNotKept(
                f"run {chain.run!r}: step no longer kept: {len(gone)} of {len(made.objects)} objects of run "
                f"{made.run!r} that it needs were dropped meanwhile, the first {gone[0]}",
                hint=f"choose a step that is kept: everstep chain ls {chain.run}",
            )


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
            found.append(decode(bytes(store.get(info.key)), where=info.key))
        except ObjectMissing:  # removed since
            continue
    return found


def decode(data: bytes | bytearray, *, where: str) -> Pin:
    """Return the pin that was stored as the object `where`.

    Raises:
        CorruptObject: it is damaged, or another pin.
    """
    try:
        body = checked.load(data)
        found = Pin(**body | {"objects": tuple(body["objects"])})
        if found.name != where:
            raise ValueError(f"it is the pin {found.name}")
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptObject(
            f"pin {where} is damaged: expected JSON with the objects it holds ({error})",
            hint="nothing is collected while nobody knows what it holds; if no fork uses it, remove it",
        ) from error
    return found


def live(store: Store, run: str, *, grace_s: float) -> tuple[list[Pin], list[Pin]]:
    """Return (pins that count, pins that do not): a restore's time may be over, a fork gone or grown out of its parent.

    Args:
        store: where the run and its forks are.
        run: whose pins.
        grace_s: how long a fork may take between its pin and its first manifest.

    Raises:
        CorruptObject: a pin cannot be read.
        ChainError: a fork's manifests are damaged.
    """
    counting: dict[str, Pin] = {}
    void: dict[str, Pin] = {}
    # Once more after each judgement: a restore from a fork that lets go now has left its own pin before that.
    while fresh := [made for made in read_pins(store, run) if made.id not in counting and made.id not in void]:
        for made in fresh:
            (counting if _counts(store, made, grace_s) else void)[made.id] = made
    return list(counting.values()), list(void.values())


def _counts(store: Store, made: Pin, grace_s: float) -> bool:
    now = clock.wall()
    if made.until is not None:
        return now < made.until
    child = manifests.latest(store, made.child)
    if child is None:
        return now - made.created < grace_s
    return child.state != "deleted" and made.run in child.origins
