"""Every object of a finished run damaged in every way: the right state or a typed error that names the damage.

Never a wrong state, never a shorter history in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.core.errors import ChainError, ChainGap, CorruptObject, EverstepError, ObjectMissing, StepNotKept
from everstep.core.rng import fold
from everstep.storage import events
from everstep.storage.chain import Chain
from everstep.storage.collect import collect
from everstep.storage.folder import FolderStore
from everstep.storage.keys import (
    BaseKey,
    CompressorKey,
    EventKey,
    Key,
    ManifestKey,
    PinKey,
    SegmentKey,
    parse,
)
from everstep.storage.memory import MemoryStore
from everstep.storage.pins import pin, read_pins
from everstep.storage.retention import Retention
from everstep.storage.takeover import Cut
from everstep.training.blueprint import Blueprint
from everstep.training.restore import read_residual, restore
from tests.faults.history import History, recipe
from tests.faults.overlay import Overlay
from tests.unit.training.worlds import whole_digest

RUN = "r"
STEPS, CUT = 30, 14
KINDS = {
    ManifestKey: "manifest", SegmentKey: "segment", BaseKey: "base", CompressorKey: "compressor", EventKey: "event",
    PinKey: "pin",
}  # fmt: skip
Damage = Callable[["Finished", str, int], bytes | None]
Action = Callable[["Finished", Overlay, str], tuple[str, int]]


class Finished:
    """A run on disk that ended: 15 segments a shard, four rounds, two generations, a snapshot, events, a pin."""

    def __init__(self, folder: Path) -> None:
        on_disk = FolderStore(str(folder))
        made = History(on_disk, RUN, recipe())
        made.round()
        for lsn in range(2, STEPS + 1, 2):
            made.advance(2, 2)
            if lsn in (8, 16, 24):
                made.round()
                made.evaluate()
            if lsn == 12:
                made.snapshot()
            if lsn == CUT:
                made.take_over()
        pin(made.chain, made.chain.listing().bases(1)[:2])
        made.close()
        self.digests, self.shards = made.digests, made.shards
        self.blueprint = Blueprint(made.recipe)
        self.objects = {info.key: bytes(on_disk.get(info.key)) for info in on_disk.list(f"{RUN}/")}
        self.store = MemoryStore()  # where the damage is looked at, which is quicker
        for name, data in self.objects.items():
            self.store.put(name, data)
        self.kinds = {name: KINDS[type(self.key(name))] for name in self.objects}  # type: ignore[index]

    def key(self, name: str) -> Key | None:
        return parse(name.removeprefix(f"{RUN}/"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("finished"))


# --- what is done to an object


def flipped(run: Finished, name: str, draw: int) -> bytes:
    data = bytearray(run.objects[name])
    bit = fold(draw, name) % (8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def truncated(run: Finished, name: str, draw: int) -> bytes:
    data = run.objects[name]
    how = fold(draw, name)
    return data[: (0, len(data) - 1, how // 3 % len(data))[how % 3]]


def deleted(run: Finished, name: str, draw: int) -> None:
    return None


def swapped(run: Finished, name: str, draw: int) -> bytes:
    """Another object's bytes: the neighbour of the same kind if there is one, then any other."""
    same = [other for other in sorted(run.objects) if run.kinds[other] == run.kinds[name] and other != name]
    others = same if same and fold(draw, name) % 2 else [other for other in sorted(run.objects) if other != name]
    return run.objects[others[fold(draw, name) % len(others)]]


DAMAGES: dict[str, tuple[Damage, int]] = {
    "bit flip": (flipped, 2),
    "truncated": (truncated, 1),
    "deleted": (deleted, 1),
    "swapped": (swapped, 1),
}

# --- what is then tried: each returns (digest of the state, its lsn)


def newest(run: Finished, store: Overlay, name: str) -> tuple[str, int]:
    return _restored(run, Chain.open(store, RUN), None)


def earlier(run: Finished, store: Overlay, name: str) -> tuple[str, int]:
    return _restored(run, Chain.open(store, RUN), fold(7, name) % STEPS)


def _taken(cut: Cut) -> Action:
    def take(run: Finished, store: Overlay, name: str) -> tuple[str, int]:
        return _restored(run, Chain.take_over(store, RUN, cut=cut), None)

    return take


ACTIONS: dict[str, tuple[Action, Callable[[str], int]]] = {
    "restore newest": (newest, lambda name: STEPS),
    "restore earlier": (earlier, lambda name: fold(7, name) % STEPS),
    "take over common": (_taken("common"), lambda name: STEPS),
    "take over each": (_taken("each"), lambda name: STEPS),
}


def _restored(run: Finished, chain: Chain, target: int | None) -> tuple[str, int]:
    states, plan, _ = restore(chain, run.blueprint, target=target)
    return whole_digest(list(states.values())), plan.target


def names(message: str, name: str, key: Key | None) -> bool:
    """Whether a message says what is wrong: the object's name, or the shard and an lsn of it."""
    if name.removeprefix(f"{RUN}/") in message:
        return True
    if isinstance(key, SegmentKey):
        return f"shard {key.shard}" in message and any(str(n) in message for n in range(key.first - 1, key.last + 1))
    return isinstance(key, BaseKey) and f"shard {key.shard}" in message


def outcome(run: Finished, damage: bytes | None, name: str, action: str) -> str:
    """Return "exact" or "told"; anything else is a violation, in words."""
    act, wanted = ACTIONS[action]
    try:
        digest, lsn = act(run, Overlay(run.store, {name: damage}), name)
    except EverstepError as error:
        return "told" if names(str(error), name, run.key(name)) else f"unnamed: {type(error).__name__}: {error}"
    except Exception as error:
        return f"untyped: {type(error).__name__}: {error}"
    if lsn != wanted(name):
        return f"shorter: step {lsn} instead of {wanted(name)}"
    return "exact" if digest == run.digests[lsn] else f"wrong state at step {lsn}"


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_right_state_or_a_named_error(finished: Finished, damage: str, action: str) -> None:
    make, draws = DAMAGES[damage]
    if action != "restore newest":
        draws = 1
    counts: Counter[tuple[str, str]] = Counter()
    violations = []
    for name in sorted(finished.objects):
        for draw in range(draws):
            data = make(finished, name, draw)
            if data == finished.objects[name]:
                continue
            found = outcome(finished, data, name, action)
            counts[finished.kinds[name], found.partition(":")[0]] += 1
            if found not in ("exact", "told"):
                violations.append(f"{name} ({draw}): {found}")
    for kind in KINDS.values():
        cells = ", ".join(f"{what} {n}" for (of, what), n in sorted(counts.items()) if of == kind)
        print(f"{action:16} | {damage:9} | {kind:10} | {cells}")
        assert any(of == kind for of, _ in counts), f"no {kind} was damaged"
    assert not violations, "\n".join(violations)
    assert sum(n for (_, what), n in counts.items() if what == "exact") > 0
    assert sum(n for (_, what), n in counts.items() if what == "told") > 0


# --- objects that a restore does not need


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_residual_is_named(finished: Finished, damage: str) -> None:
    make, draws = DAMAGES[damage]
    slices = [name for name, kind in finished.kinds.items() if kind == "compressor"]
    for name, draw in [(name, draw) for name in slices for draw in range(draws)]:
        chain = Chain.open(Overlay(finished.store, {name: make(finished, name, draw)}), RUN)
        with pytest.raises((CorruptObject, ObjectMissing), match=name):
            read_residual(chain, chain.manifest.compressor[0])


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_events_and_pins_are_the_same_or_named(finished: Finished, damage: str) -> None:
    make, _ = DAMAGES[damage]
    whole_events, whole_pins = events.read_all(finished.store, RUN), read_pins(finished.store, RUN)
    counts: Counter[tuple[str, str]] = Counter()
    for name in (name for name, kind in finished.kinds.items() if kind in ("event", "pin")):
        for draw in range(1 if damage == "deleted" else 40):
            store = Overlay(finished.store, {name: make(finished, name, draw)})
            try:
                same = events.read_all(store, RUN) == whole_events and read_pins(store, RUN) == whole_pins
                found = "same" if same else "different"
            except EverstepError as error:
                found = "told" if names(str(error), name, finished.key(name)) else "unnamed"
            counts[finished.kinds[name], found] += 1
    for (kind, found), number in sorted(counts.items()):
        print(f"read events and pins | {damage:9} | {kind:10} | {found} {number}")
    assert not any(found == "unnamed" for _, found in counts)
    different = {kind: n for (kind, found), n in counts.items() if found == "different"}
    if damage == "deleted":
        assert different == {"event": 3, "pin": 1}  # what was removed leaves no trace: nobody counts them
    else:
        assert not different, "events and pins have a checksum and are held to their names"


# --- a run that has not ended


class Unfinished(History):
    """Ten steps in segments of two, a round at 0 and one at 4; not closed."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), RUN, recipe())
        self.round()
        self.advance(4, 2)
        self.round()
        self.advance(6, 2)
        self.blueprint = Blueprint(self.recipe)

    def remove(self, *parts: str) -> list[str]:
        """Remove the objects whose names contain one of `parts`; return their names."""
        gone = [info.key for info in self.store.list(f"{RUN}/") if any(part in info.key for part in parts)]
        assert gone
        for name in gone:
            self.store.delete(name)
        return gone

    def remove_highest_manifest(self) -> int:
        version = self.chain.listing().versions()[-1]
        self.remove(f"manifest/{version:020d}")
        return version

    def restored(self, chain: Chain | None = None, **more: Any) -> tuple[int, int, Any]:
        """Restore what there is; the state must be the live one of that step. Returns (step, highest, damage)."""
        states, plan, damage = restore(chain or Chain.open(self.store, RUN), self.blueprint, **more)
        assert whole_digest(list(states.values())) == self.digests[plan.target]
        return plan.target, plan.highest, damage


@pytest.fixture
def unfinished() -> Unfinished:
    return Unfinished()


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_missing_tail_gives_an_earlier_step_and_the_plan_tells(unfinished: Unfinished, shard: int) -> None:
    unfinished.remove(f"log/s{shard:04d}/000000000009")
    assert unfinished.restored() == (8, 10, {})
    chain = Chain.take_over(unfinished.store, RUN, cut="common")
    assert {span.last for span in chain.manifest.lineage if span.generation == 1} == {8}
    assert unfinished.restored(chain)[:2] == (8, 8)


def test_a_tail_missing_in_every_shard_leaves_no_trace(unfinished: Unfinished) -> None:
    unfinished.remove("/000000000009")  # known limit: nothing but the removed objects said that step 10 was durable
    assert unfinished.restored() == (8, 8, {})


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_a_damaged_tail_gives_an_earlier_step_and_is_named(unfinished: Unfinished, damage: str) -> None:
    key = unfinished.chain.listing().segments(1)[-1]
    data = bytearray(unfinished.store.get(f"{RUN}/{key.path}"))
    data[len(data) // 2] ^= 1
    unfinished.remove(key.path)
    unfinished.store.put(f"{RUN}/{key.path}", data if damage == "flipped" else data[:-1])
    step, highest, found = unfinished.restored()
    assert (step, highest) == (8, 10) and key.path in found[key]
    taken = Chain.take_over(unfinished.store, RUN, cut="common")  # it looks at names only, so it cuts at 10
    with pytest.raises(ChainGap, match=key.path):
        restore(taken, unfinished.blueprint)
    again = Chain.take_over(unfinished.store, RUN, cut="common", at=8)  # the way on that the user chooses
    assert unfinished.restored(again)[0] == 8


@pytest.mark.parametrize("cut", ["common", "each"])
@pytest.mark.parametrize("shards", ["s0001/000000000009", "/000000000009"])
def test_a_tail_missing_after_a_takeover_is_a_gap(unfinished: Unfinished, cut: Cut, shards: str) -> None:
    chain = Chain.take_over(unfinished.store, RUN, cut=cut)
    unfinished.remove(shards)
    for act in (
        lambda: restore(chain, unfinished.blueprint),
        lambda: Chain.take_over(unfinished.store, RUN, cut="common"),
    ):
        with pytest.raises(ChainGap, match="missing tail: the lineage says .* up to lsn 10, but shard [012]"):
            act()
    assert unfinished.restored(chain, target=8)[0] == 8


def test_a_hole_before_the_tail_is_a_gap(unfinished: Unfinished) -> None:
    unfinished.remove("log/s0002/000000000007")
    with pytest.raises(ChainGap, match="shard 2 has lsn up to 6 and then 9 to 10"):
        unfinished.restored()
    assert unfinished.restored(target=6)[0] == 6


# --- the highest manifest removed


def test_without_the_manifest_that_named_a_round_the_bases_still_count(unfinished: Unfinished) -> None:
    unfinished.remove_highest_manifest()
    assert not [base for base in Chain.open(unfinished.store, RUN).manifest.bases if base.lsn == 4]
    assert unfinished.restored()[:2] == (10, 10)


def test_a_writer_whose_manifest_was_removed_stops(unfinished: Unfinished) -> None:
    version = unfinished.remove_highest_manifest()
    with pytest.raises(ChainError, match=f"expected manifest {version} or later"):
        unfinished.chain.check_tenure()


def test_without_a_claim_the_old_generation_owns_the_run(unfinished: Unfinished) -> None:
    claimant = Chain.open(unfinished.store, RUN)
    claimant.fence()  # and died
    version = unfinished.remove_highest_manifest()
    assert unfinished.restored()[0] == 10
    chain = Chain.take_over(unfinished.store, RUN, cut="common")
    assert (chain.manifest.generation, chain.manifest.version) == (2, version + 1)
    assert unfinished.restored(chain)[0] == 10


def test_without_the_open_manifest_a_generation_that_wrote_nothing_is_taken_over(unfinished: Unfinished) -> None:
    Chain.take_over(unfinished.store, RUN, cut="common")
    unfinished.remove_highest_manifest()
    assert Chain.open(unfinished.store, RUN).manifest.state == "claim" and unfinished.restored()[0] == 10
    chain = Chain.take_over(unfinished.store, RUN, cut="common")
    assert chain.manifest.generation == 3 and unfinished.restored(chain)[0] == 10


@pytest.mark.parametrize("count", [1, 2])
def test_without_the_open_manifest_a_generation_that_wrote_is_refused(unfinished: Unfinished, count: int) -> None:
    """The claim is left, or goes as well: then the new generation's folder tells."""
    unfinished.take_over()
    unfinished.advance(2, 2)
    gone = [unfinished.remove_highest_manifest() for _ in range(count)][-1]
    told = f"{gone} is missing" if count == 1 else f"folder {RUN}/g000002 holds objects"
    for act in (lambda: Chain.open(unfinished.store, RUN), lambda: Chain.take_over(unfinished.store, RUN, cut="each")):
        with pytest.raises(ChainError, match=told):
            act()


def test_without_the_closing_manifest_the_state_is_the_same(unfinished: Unfinished) -> None:
    unfinished.close()
    unfinished.remove_highest_manifest()
    chain = Chain.open(unfinished.store, RUN)
    assert chain.manifest.state == "open" and unfinished.restored(chain)[0] == 10


def test_without_the_manifest_that_dropped_objects_the_newest_state_is_the_same(unfinished: Unfinished) -> None:
    done = collect(unfinished.chain, Retention(rounds=1, young_s=0.0, min_age_s=0.0))
    assert done.deleted
    unfinished.remove_highest_manifest()
    assert unfinished.restored()[0] == 10 and unfinished.restored(target=5)[0] == 5
    with pytest.raises(StepNotKept, match="step 3 cannot be restored; steps that can: 4 to 10"):
        unfinished.restored(target=3)
