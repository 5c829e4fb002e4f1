"""What a collection drops, from hand-made manifests and listings: nothing that a kept step is restored from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from everstep.core.errors import ChainError
from everstep.storage import retention
from everstep.storage.keys import CompressorKey, Key, ManifestKey, SegmentKey
from everstep.storage.listing import Listing
from everstep.storage.manifest import Base, CompressorSnapshot, Kept, Manifest, Span
from everstep.storage.plan import plan_restore
from everstep.storage.retention import GcPlan, Retention, plan_gc
from everstep.storage.store import ObjectInfo

NOW = 1000.0
ALL_OLD = Retention(rounds=2, young_s=0.0, min_age_s=0.0)


def base(shard: int, lsn: int, number: int, generation: int = 1, name: str = "a", run: str = "") -> Base:
    return Base(generation, shard, lsn, name, number, "0" * 8, 10, run)


def seg(shard: int, first: int, last: int, generation: int = 1) -> SegmentKey:
    return SegmentKey(generation, shard, first, last)


def listing(*keys: Key, modified: float = 0.0) -> Listing:
    return Listing.of("r", [ObjectInfo(f"r/{key.path}", 10, modified) for key in keys])


def manifest(bases: Collection[Base] = (), *, generation: int = 1, **more: Any) -> Manifest:
    lineage = more.pop("lineage", (Span(1, 0, 1, None), Span(1, 1, 1, None)))
    state = more.pop("state", "open")
    return Manifest(5, "r", generation, state, lineage, {}, "bitwise", bases=tuple(bases), **more)


def rounds(*lsns: tuple[int, int]) -> list[Base]:
    return [base(shard, lsn, number) for number, pair in enumerate(lsns) for shard, lsn in enumerate(pair)]


FOUR = rounds((0, 0), (10, 10), (20, 20), (30, 30))
SEGMENTS = [seg(shard, first, first + 9) for shard in (0, 1) for first in (1, 11, 21, 31)]
OBJECTS = [*(found.key for found in FOUR), *SEGMENTS]


def paths(plan: GcPlan) -> set[str]:
    return {item.path for item in plan.drop}


def after(before: Manifest, plan: GcPlan, found: Listing) -> tuple[Manifest, Listing]:
    """The manifest and the listing when the plan was carried out."""
    gone = paths(plan)
    return replace(before, **plan.changes), Listing(tuple((k, info) for k, info in found.objects if k.path not in gone))


def test_the_newest_rounds_stay_with_all_after_them() -> None:
    plan = plan_gc(manifest(FOUR), listing(*OBJECTS), (), ALL_OLD, NOW)
    assert plan.changes["bases"] == tuple(FOUR[4:])
    assert plan.changes["kept"] == (Kept(21, None),)
    assert paths(plan) == {key.path for key in OBJECTS if isinstance(key, SegmentKey) and key.last <= 20} | {
        found.key.path for found in FOUR[:4]
    }
    assert plan.changes["dropped"] == tuple(sorted(paths(plan)))
    assert "every step from 20 on" in plan.reasons[0]
    assert not plan.more and plan.spared == {}
    assert {item.reason for item in plan.drop} == {
        "its round is not kept any more", "older than every round that is kept (segments from lsn 21 on are)",
    }  # fmt: skip


def test_nothing_changes_the_second_time() -> None:
    before, found = manifest(FOUR), listing(*OBJECTS)
    now, left = after(before, plan_gc(before, found, (), ALL_OLD, NOW), found)
    again = plan_gc(now, left, (), ALL_OLD, NOW)
    assert again.drop == ()
    assert again.changes == {"dropped": ()}  # the objects are gone
    assert plan_gc(replace(now, dropped=()), left, (), ALL_OLD, NOW).changes == {}


def test_a_dropped_name_stays_dropped_while_the_object_is_there() -> None:
    before, found = manifest(FOUR), listing(*OBJECTS)
    plan = plan_gc(before, found, (), ALL_OLD, NOW)
    again = plan_gc(replace(before, **plan.changes), found, (), ALL_OLD, NOW)
    assert again.changes == {} and again.drop == ()


def test_every_so_many_rounds_one_stays_for_ever() -> None:
    many = rounds(*((10 * n, 10 * n + 3) for n in range(8)))
    segments = [seg(shard, first, first + 4) for shard in (0, 1) for first in range(1, 80, 5)]
    before, found = manifest(many), listing(*(b.key for b in many), *segments)
    keep = replace(ALL_OLD, every=3)
    plan = plan_gc(before, found, (), keep, NOW)
    now, left = after(before, plan, found)
    assert now.kept == (Kept(1, 3), Kept(31, 33), Kept(61, None))
    assert sorted({b.round for b in now.bases}) == [0, 3, 6, 7]
    for step in (3, 33, 63, 64, 75, 80):
        assert plan_restore(now, left, target=step).target == step
    later = plan_gc(now, left, (), keep, NOW)
    assert set(later.changes) == {"dropped"}
    assert "one of every 3" in later.reasons[1]


def test_rounds_that_overlap_stay_for_ever_too() -> None:
    """Rolling merges: one shard begins the next round at the lsn where another ends the last."""
    many = rounds((0, 10), (10, 20), (20, 30), (30, 40))
    found = listing(*(b.key for b in many), *SEGMENTS)
    plan = plan_gc(manifest(many), found, (), Retention(1, 1, 0.0, 0.0), NOW)
    assert "bases" not in plan.changes and plan.drop == ()
    assert "kept" not in plan.changes  # ranges that touch are one


def test_skipped_round_numbers_do_not_cost_a_round() -> None:
    many = [base(s, 10 * n, n) for n in (0, 1, 3, 5, 7, 8) for s in (0, 1)]
    segments = [seg(s, first, first + 9) for s in (0, 1) for first in range(1, 91, 10)]
    plan = plan_gc(manifest(many), listing(*(b.key for b in many), *segments), (), Retention(1, 2, 0.0, 0.0), NOW)
    assert sorted({b.round for b in plan.changes["bases"]}) == [0, 3, 5, 7, 8]


def test_young_segments_keep_their_round() -> None:
    found = Listing(listing(*OBJECTS[:8], *SEGMENTS[:1]).objects + listing(*SEGMENTS[1:], modified=900.0).objects)
    plan = plan_gc(manifest(FOUR), found, (), replace(ALL_OLD, young_s=200.0), NOW)
    assert plan.changes == {} and plan.drop == ()  # shard 1's first segment is young: round 0 is needed
    plan = plan_gc(manifest(FOUR), found, (), replace(ALL_OLD, young_s=50.0), NOW)
    assert plan.changes["kept"] == (Kept(21, None),)


def test_young_segments_older_than_any_round_keep_everything() -> None:
    late = rounds((20, 20), (30, 30))
    found = Listing(listing(*(b.key for b in late)).objects + listing(*SEGMENTS, modified=NOW).objects)
    plan = plan_gc(manifest(late), found, (), replace(ALL_OLD, young_s=1.0), NOW)
    assert plan.drop == () and plan.changes == {}
    assert "all of the history is kept" in plan.reasons[0]


def test_the_last_compressor_snapshot_keeps_its_segments() -> None:
    snapshots = (CompressorSnapshot(1, 5, 1), CompressorSnapshot(1, 15, 1))
    slices = [CompressorKey(1, 5, 0), CompressorKey(1, 15, 0), CompressorKey(1, 12, 0), CompressorKey(1, 25, 0)]
    before, found = manifest(FOUR, compressor=snapshots), listing(*OBJECTS, *slices)
    plan = plan_gc(before, found, (), replace(ALL_OLD, residual=True), NOW)
    assert plan.changes["kept"] == (Kept(11, None),)
    assert plan.changes["compressor"] == snapshots[1:]
    assert {path for path in paths(plan) if "comp" in path} == {slices[0].path, slices[2].path}  # 25 may be under way
    now, left = after(before, plan, found)
    assert plan_restore(now, left, target=15).target == 15
    next_generation = replace(now, generation=2, lineage=(*now.lineage, Span(2, 0, 41, None), Span(2, 1, 41, None)))
    assert slices[3].path in paths(plan_gc(next_generation, left, (), replace(ALL_OLD, residual=True), NOW))
    without = plan_gc(before, found, (), ALL_OLD, NOW)  # a run without residual does not wait for one
    assert without.changes["kept"] == (Kept(21, None),) and without.changes["compressor"] == ()


def test_a_residual_without_a_snapshot_keeps_everything() -> None:
    assert plan_gc(manifest(FOUR), listing(*OBJECTS), (), replace(ALL_OLD, residual=True), NOW).drop == ()


def test_what_zombies_left_outside_the_history_goes() -> None:
    cut = (Span(1, 0, 1, 34), Span(2, 0, 35, None), Span(1, 1, 1, 34), Span(2, 1, 35, None))
    zombies = [seg(0, 41, 50), base(1, 38, 0, name="z").key, CompressorKey(1, 40, 0)]
    before = manifest(FOUR, generation=2, lineage=cut)
    plan = plan_gc(before, listing(*OBJECTS, *zombies), (), replace(ALL_OLD, rounds=9), NOW)
    assert paths(plan) == {key.path for key in zombies}
    assert plan.changes == {"dropped": tuple(sorted(paths(plan)))}


def test_what_a_stopped_writer_added_to_a_finished_run_goes() -> None:
    before = manifest(FOUR, state="closed", closing={"last_lsn": 40})
    late = [seg(0, 41, 50), base(1, 45, 0, name="z").key]
    plan = plan_gc(before, listing(*OBJECTS, *late), (), replace(ALL_OLD, rounds=9), NOW)
    assert paths(plan) == {key.path for key in late}


def test_unnamed_bases() -> None:
    ahead, same, behind = base(0, 35, 9, name="x").key, base(0, 30, 9, name="y").key, base(0, 25, 9, name="z").key
    found = listing(*OBJECTS, ahead, same, behind)
    keep = replace(ALL_OLD, rounds=9)
    assert paths(plan_gc(manifest(FOUR), found, (), keep, NOW)) == {behind.path}
    old = manifest(FOUR, generation=2, lineage=tuple(
        span for s in (0, 1) for span in (Span(1, s, 1, 40), Span(2, s, 41, None))))  # fmt: skip
    plan = plan_gc(old, found, (), keep, NOW)
    assert paths(plan) == {ahead.path, same.path, behind.path}
    assert {item.reason for item in plan.drop} == {"was never named"}


def test_an_unnamed_base_behind_a_hole_stays() -> None:
    """The log was lost for a while and went on from a base of the workers; a takeover came before it was named."""
    bridge = [base(s, 60, 9, name="x").key for s in (0, 1)]
    lineage = tuple(span for s in (0, 1) for span in (Span(1, s, 1, 65), Span(2, s, 66, None)))
    before = manifest(FOUR, generation=2, lineage=lineage)
    found = listing(*OBJECTS, *bridge, seg(0, 61, 65), seg(1, 61, 65), base(0, 64, 9, name="y").key)
    plan = plan_gc(before, found, (), replace(ALL_OLD, rounds=1), NOW)
    now, left = after(before, plan, found)
    assert plan_restore(now, left).target == 65 and plan_restore(now, left, target=60).target == 60
    assert base(0, 64, 9, name="y").key.path in paths(plan)  # reached from the one before
    foreign = Listing(found.objects).joined("p", listing(*(key for key in bridge)))
    assert plan_gc(before, foreign, (), replace(ALL_OLD, rounds=1), NOW).drop == plan.drop


def test_without_a_complete_round_all_is_kept() -> None:
    for some in ([], FOUR[:1], [*FOUR[:1], replace(FOUR[3], round=2)]):
        plan = plan_gc(manifest(some), listing(*OBJECTS), (), replace(ALL_OLD, rounds=1), NOW)
        assert plan.drop == () and plan.changes == {}


def test_a_round_whose_segments_have_not_come_is_not_complete() -> None:
    """Bases may be ahead of segments: without those up to the highest base the round restores nothing."""
    skewed = rounds((0, 0), (10, 10), (20, 38))
    found = listing(*(b.key for b in skewed), *(key for key in SEGMENTS if key.last <= 30 or key.shard == 1))
    before = manifest(skewed)
    plan = plan_gc(before, found, (), replace(ALL_OLD, rounds=1), NOW)
    now, left = after(before, plan, found)
    assert now.kept == (Kept(11, None),)
    assert plan_restore(now, left).target == 30


def test_a_named_base_that_is_missing_makes_no_round() -> None:
    plan = plan_gc(manifest(FOUR), listing(*OBJECTS[:7], *SEGMENTS), (), replace(ALL_OLD, rounds=1), NOW)
    assert plan.changes["kept"] == (Kept(21, None),)


def test_age_and_pins_spare() -> None:
    pinned = {FOUR[0].key.path, SEGMENTS[0].path}
    plan = plan_gc(manifest(FOUR), listing(*OBJECTS), pinned, ALL_OLD, NOW)
    assert plan.spared == {"pinned": 2} and not paths(plan) & pinned
    plan = plan_gc(manifest(FOUR), listing(*OBJECTS, modified=990.0), pinned, replace(ALL_OLD, min_age_s=60.0), NOW)
    assert plan.spared == {"pinned": 2, "younger than 60 s": 6} and plan.drop == ()
    later = plan_gc(replace(manifest(FOUR), **plan.changes), listing(*OBJECTS), (), ALL_OLD, NOW)
    assert len(later.drop) == 8  # they are not named any more; now they go


def test_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 3)
    now, left = manifest(FOUR), listing(*OBJECTS)
    sizes = []
    while True:
        plan = plan_gc(now, left, (), ALL_OLD, NOW)
        now, left = after(now, plan, left)
        sizes.append(len(plan.drop))
        for step in (20, 25, 40):
            assert plan_restore(now, left, target=step).target == step
        if not plan.more:
            break
    assert sizes == [3, 3, 2]


def test_a_claim_and_a_deleted_run() -> None:
    plan = plan_gc(manifest(FOUR, state="claim", generation=2), listing(*OBJECTS), (), ALL_OLD, NOW)
    assert plan.changes == {} and plan.drop == () and "takeover" in plan.reasons[0]
    gone = manifest((), state="deleted", lineage=(), kept=())
    plan = plan_gc(gone, listing(*OBJECTS), {SEGMENTS[0].path}, ALL_OLD, NOW)
    assert paths(plan) == {key.path for key in OBJECTS} - {SEGMENTS[0].path}
    assert set(plan.changes) == {"dropped"}


def test_the_lineage_is_trimmed_with_what_it_names() -> None:
    lineage = tuple(span for s in (0, 1) for span in (Span(1, s, 1, 20), Span(2, s, 21, 20), Span(3, s, 21, None)))
    third = [base(s, lsn, n, 3) for n, lsn in ((2, 20), (3, 30)) for s in (0, 1)]
    segments = [*(key for key in SEGMENTS if key.last <= 20), *(replace(k, generation=3) for k in SEGMENTS[2:4])]
    segments += [replace(key, generation=3) for key in SEGMENTS[6:]]
    before = manifest([*FOUR[:4], *third], generation=3, lineage=lineage)
    found = listing(*(b.key for b in before.bases), *segments)
    plan = plan_gc(before, found, (), ALL_OLD, NOW)
    now, left = after(before, plan, found)
    assert now.lineage == (Span(3, 0, 21, None), Span(3, 1, 21, None))
    assert plan_restore(now, left).target == 40
    assert now.shards == (0, 1)


def test_another_runs_objects_are_never_dropped_but_let_go_of() -> None:
    own = rounds((20, 20), (30, 30))
    lineage = tuple(span for s in (0, 1) for span in (Span(1, s, 1, 5, "p"), Span(1, s, 6, None)))
    parents = [base(s, 0, 0, run="p") for s in (0, 1)]
    bases = [*parents, *(replace(b, round=b.round + 1) for b in own)]
    found = listing(*(b.key for b in own), *(seg(s, 6, 40) for s in (0, 1)))
    found = found.joined("p", listing(*(replace(b.key, run="") for b in parents), seg(0, 1, 9), seg(1, 1, 9)))
    before = manifest(bases, lineage=lineage)
    assert before.origins == ("p",)
    plan = plan_gc(before, found, (), ALL_OLD, NOW)
    now, _ = after(before, plan, found)
    assert plan.drop == () and now.origins == ()
    assert replace(before, **plan_gc(before, found, (), replace(ALL_OLD, rounds=3), NOW).changes).origins == ("p",)


def test_the_oldest_manifest_moves_in_leaps() -> None:
    def oldest(version: int, now: int, modified: float = 0.0) -> int | None:
        before = replace(manifest(FOUR), version=version, oldest=now)
        keys = [ManifestKey(n) for n in range(now, version + 1)]
        found = Listing(listing(*OBJECTS).objects + listing(*keys, modified=modified).objects)
        return plan_gc(before, found, (), replace(ALL_OLD, rounds=9, min_age_s=50.0), NOW).changes.get("oldest")

    assert oldest(200, 1) is None
    assert oldest(201, 1) == 101
    assert oldest(300, 101) is None
    assert oldest(301, 1, modified=990.0) is None  # all are young


@st.composite
def histories(draw: st.DrawFn) -> tuple[Manifest, Listing, set[int]]:
    """A manifest after some generations, a listing, and the steps that can be restored before."""
    spans: list[Span] = []
    keys: list[Key] = []
    bases: list[Base] = []
    ends, numbers, generation = [0, 0], [0, 0], 0
    for generation in range(1, draw(st.integers(1, 3)) + 1):
        for shard in (0, 1):
            start = lsn = ends[shard]
            for kind in draw(st.lists(st.sampled_from(["segment", "named", "unnamed", "hole"]), max_size=7)):
                if kind == "segment":
                    last = lsn + draw(st.integers(1, 3))
                    keys.append(seg(shard, lsn + 1, last, generation))
                    lsn = last
                elif kind == "hole" and draw(st.integers(0, 3)) == 0:
                    lsn += 2
                    keys.append(base(shard, lsn, 0, generation, "hole").key)
                elif kind in ("named", "unnamed"):
                    made = base(shard, lsn, numbers[shard], generation, f"{kind}{len(keys)}")
                    keys.append(made.key)
                    if kind == "named" and lsn > max((b.lsn for b in bases if b.shard == shard), default=-1):
                        bases.append(made)
                        numbers[shard] += draw(st.integers(1, 2))
            spans.append(Span(generation, shard, start + 1, lsn))
            ends[shard] = lsn
    spans += [Span(generation + 1, shard, ends[shard] + 1, None) for shard in (0, 1)]
    made_of = [base(shard, 0, 0, 1, "start") for shard in (0, 1)]
    before = manifest(bases, generation=generation + 1, lineage=tuple(spans))
    found = listing(*(b.key for b in made_of), *dict.fromkeys(keys))
    return before, found, restorable(before, found)


def restorable(now: Manifest, found: Listing) -> set[int]:
    steps = set()
    for step in range(60):
        try:
            plan_restore(now, found, target=step)
        except ChainError:
            continue
        steps.add(step)
    return steps


@settings(max_examples=150, deadline=None)
@given(histories(), st.integers(1, 3), st.integers(0, 3))
def test_all_that_is_kept_can_be_restored_from_what_stays(
    history: tuple[Manifest, Listing, set[int]], newest: int, every: int
) -> None:
    before, found, steps = history
    whole = [
        (number, high) for number in sorted({b.round for b in before.bases})
        if (high := _high(before, found, number)) is not None
    ]  # fmt: skip
    plan = plan_gc(before, found, (), Retention(newest, every, 0.0, 0.0), NOW)
    now, left = after(before, plan, found)
    kept = restorable(now, left)
    floor = whole[-newest:][0] if whole else (0, 0)
    assert {step for step in steps if step >= floor[1]} <= kept <= steps
    last = None
    for number, high in whole:
        if every and number < floor[0] and (last is None or number >= last + every):
            last = number
            assert high in kept
    assert plan_gc(replace(now, dropped=()), left, (), Retention(newest, every, 0.0, 0.0), NOW).drop == ()


def _high(now: Manifest, found: Listing, number: int) -> int | None:
    """The highest lsn of a round if it is complete, by restoring it from its own bases alone."""
    chosen = {b.key for b in now.bases if b.round == number}
    others = frozenset(key for key in found.bases() if key not in chosen)
    if {key.shard for key in chosen} != {0, 1}:
        return None
    high = max(key.lsn for key in chosen)
    try:
        plan_restore(now, found, target=high, exclude=others)
    except ChainError:
        return None
    return high
