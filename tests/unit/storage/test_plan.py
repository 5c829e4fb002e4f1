"""Plans: which objects restore which step, and what is said when none do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everstep.core.errors import ChainError, ChainGap, StepNotKept
from everstep.storage.keys import BaseKey, Key, SegmentKey
from everstep.storage.listing import Listing
from everstep.storage.manifest import Base, CompressorSnapshot, Kept, Manifest, Span
from everstep.storage.plan import plan_restore, reachable
from everstep.storage.store import ObjectInfo
from everstep.storage.takeover import clips, cut_changes


def base(shard: int, lsn: int, generation: int = 1, name: str = "a") -> BaseKey:
    return BaseKey(generation, shard, lsn, name)


def seg(shard: int, first: int, last: int, generation: int = 1) -> SegmentKey:
    return SegmentKey(generation, shard, first, last)


def listing(*keys: Key) -> Listing:
    return Listing.of("r", [ObjectInfo(f"r/{key.path}", 10, 0.0) for key in keys])


def manifest(*lineage: Span, closing: int | None = None, generation: int = 1) -> Manifest:
    spans = lineage or (Span(1, 0, 1, None), Span(1, 1, 1, None))
    closed = None if closing is None else {"last_lsn": closing}
    return Manifest(1, "r", generation, "open" if closed is None else "closed", spans, {}, "bitwise", closing=closed)


BOTH = [base(0, 0), base(1, 0), seg(0, 1, 5), seg(1, 1, 5), seg(0, 6, 10), seg(1, 6, 10)]


def test_all_that_every_shard_has() -> None:
    plan = plan_restore(manifest(), listing(*BOTH, seg(0, 11, 15)))
    assert plan.target == 10
    assert plan.reached == {0: 15, 1: 10}
    assert plan.highest == 15
    assert [(use.first, use.last) for use in plan.shards[0].segments] == [(1, 5), (6, 10)]
    assert [part.lsn for part in plan.shards] == [10, 10]
    assert "step 10" in plan.reasons[0]


def test_one_shard_alone_may_go_further() -> None:
    found = listing(*BOTH, seg(0, 11, 15))
    assert plan_restore(manifest(), found, shards=[0]).target == 15
    assert [part.shard for part in plan_restore(manifest(), found, shards=[1], target=7).shards] == [1]


def test_segments_are_clipped_to_the_target() -> None:
    plan = plan_restore(manifest(), listing(*BOTH, base(0, 4)), target=8)
    assert plan.shards[0].base.lsn == 4
    assert [(use.first, use.last) for use in plan.shards[0].segments] == [(5, 5), (6, 8)]
    assert plan_restore(manifest(), listing(*BOTH, base(0, 4)), target=4).shards[0].segments == ()
    assert plan_restore(manifest(), listing(*BOTH, base(0, 4)), target=3).shards[0].base.lsn == 0


def test_a_damaged_base_gives_way_to_the_older() -> None:
    found = listing(*BOTH, base(0, 7), base(0, 7, name="b"))
    first = plan_restore(manifest(), found).shards[0].base
    second = plan_restore(manifest(), found, exclude=frozenset({first})).shards[0].base
    third = plan_restore(manifest(), found, exclude=frozenset({first, second}))
    assert {first.id, second.id} == {"a", "b"}
    assert third.shards[0].base.lsn == 0
    assert third.target == 10
    assert "2 damaged" in third.reasons[-1]


def test_a_hole_inside_a_shard_is_a_gap() -> None:
    found = listing(*BOTH[:4], seg(0, 6, 10), seg(1, 6, 10), seg(1, 16, 20))
    with pytest.raises(ChainGap, match=r"shard 1 has lsn up to 10 and then 16 to 20.*from 11") as caught:
        plan_restore(manifest(), found)
    assert "everstep chain export r --step 10" in caught.value.hint
    with pytest.raises(ChainGap):
        plan_restore(manifest(), found, target=11)
    assert plan_restore(manifest(), found, target=10).target == 10
    assert reachable(manifest(), found, 1) == 10


def test_a_damaged_segment_is_a_gap() -> None:
    with pytest.raises(ChainGap):
        plan_restore(manifest(), listing(*BOTH), exclude=frozenset({seg(0, 1, 5)}))
    assert plan_restore(manifest(), listing(*BOTH), exclude=frozenset({seg(0, 6, 10)})).target == 5


def test_a_later_base_bridges_a_hole_but_its_steps_are_not_kept() -> None:
    found = listing(*BOTH, base(0, 20), base(1, 20), seg(0, 21, 25), seg(1, 21, 24))
    assert plan_restore(manifest(), found).target == 24
    assert plan_restore(manifest(), found, target=10).target == 10
    with pytest.raises(StepNotKept, match="steps that can: 0 to 10, 20 to 24"):
        plan_restore(manifest(), found, target=15)


def test_a_step_that_no_shard_pair_shares_falls_back() -> None:
    found = listing(*BOTH, seg(1, 11, 15), base(0, 20), seg(0, 21, 25))
    plan = plan_restore(manifest(), found)
    assert plan.reached == {0: 25, 1: 15}
    assert plan.target == 10  # 15 = the least reached, but shard 0 has nothing between 10 and 20


def test_beyond_the_end_and_before_the_first_base() -> None:
    with pytest.raises(StepNotKept, match="step 11 .*0 to 10"):
        plan_restore(manifest(), listing(*BOTH), target=11)
    with pytest.raises(StepNotKept, match="step 3 .*4 to 10"):
        plan_restore(manifest(), listing(base(0, 4), base(1, 3), *BOTH[2:]), target=3)


def test_no_base() -> None:
    with pytest.raises(ChainError, match="shard 1: expected a base"):
        plan_restore(manifest(), listing(base(0, 0), *BOTH[2:]))
    assert reachable(manifest(), listing(), 0) == -1


def test_overlapping_segments() -> None:
    plan = plan_restore(manifest(Span(1, 0, 1, None)), listing(base(0, 0), seg(0, 1, 3), seg(0, 2, 6), seg(0, 4, 9)))
    assert plan.target == 9
    assert [(use.first, use.last) for use in plan.shards[0].segments] == [(1, 3), (4, 6), (7, 9)]


def test_the_clip_of_a_takeover() -> None:
    cut = manifest(Span(1, 0, 1, 7), Span(2, 0, 8, None), generation=2)
    old = [base(0, 0), seg(0, 1, 5), seg(0, 6, 10), seg(0, 11, 15), base(0, 9), base(0, 12)]
    plan = plan_restore(cut, listing(*old))
    assert plan.target == 7 == plan.highest
    assert plan.shards[0].base.lsn == 0
    plan = plan_restore(cut, listing(*old, seg(0, 8, 12, 2), base(0, 7, 2), base(0, 7)))
    assert plan.target == 12
    assert plan.shards[0].base == base(0, 7, 2)
    assert [use.key.generation for use in plan.shards[0].segments] == [2]
    later = plan_restore(cut, listing(*old, seg(0, 8, 12, 2), base(0, 6, 2)))
    assert later.shards[0].base == base(0, 0)  # generation 2 began at 8: its base at 6 is none of the run's


def test_a_finished_run_shows_a_missing_tail() -> None:
    assert plan_restore(manifest(closing=10), listing(*BOTH)).target == 10
    with pytest.raises(ChainGap, match="missing tail.*ends at lsn 10, but shard 1 has only up to 5") as caught:
        plan_restore(manifest(closing=10), listing(*BOTH[:5]))
    assert "--step 5" in caught.value.hint
    assert plan_restore(manifest(closing=10), listing(*BOTH[:5]), target=5).target == 5
    assert plan_restore(manifest(closing=10), listing(*BOTH, seg(0, 11, 12), base(0, 11))).highest == 10


def test_clips() -> None:
    found = listing(*BOTH, seg(0, 11, 15))
    assert clips(manifest(), found, cut="common") == {0: 10, 1: 10}
    assert clips(manifest(), found, cut="common", at=4) == {0: 4, 1: 4}
    assert clips(manifest(), found, cut="common", at=400) == {0: 10, 1: 10}
    assert clips(manifest(), found, cut="each") == {0: 15, 1: 10}
    assert clips(manifest(), listing(base(0, 0)), cut="common") == {0: 0, 1: 0}
    with pytest.raises(ChainError, match="expected a base"):
        clips(manifest(), listing(base(0, 0), seg(0, 1, 5)), cut="common")
    holed = listing(*BOTH, seg(0, 14, 15))
    with pytest.raises(ChainGap):
        clips(manifest(), holed, cut="common")
    assert clips(manifest(), holed, cut="common", at=10) == clips(manifest(), holed, cut="each") == {0: 10, 1: 10}


def test_a_takeover_drops_what_is_above_the_cut() -> None:
    def cut(before: Manifest, at: int, *keys: Key) -> Any:
        return cut_changes(replace(before, generation=before.generation + 1), listing(*keys), "each", {0: at})[
            "lineage"
        ]

    before = manifest(Span(1, 0, 1, 7), Span(2, 0, 8, None), generation=2)
    assert cut(before, 20) == (*before.lineage[:1], Span(2, 0, 8, 20), Span(3, 0, 21, None))
    assert cut(before, 7) == (Span(1, 0, 1, 7), Span(3, 0, 8, None))
    assert cut(before, 3) == (Span(1, 0, 1, 3), Span(3, 0, 4, None))
    assert cut(before, 7, base(0, 7, 2)) == (Span(1, 0, 1, 7), Span(2, 0, 8, 7), Span(3, 0, 8, None))
    assert cut(manifest(Span(1, 0, 1, None)), 0, base(0, 0)) == (Span(1, 0, 1, 0), Span(2, 0, 1, None))


def test_compressor_snapshots_beyond_the_cut_are_dropped() -> None:
    snapshots = (CompressorSnapshot(1, 5, 2), CompressorSnapshot(1, 10, 2))
    before = Manifest(1, "r", 1, "open", (), {}, "bitwise", compressor=snapshots)
    assert cut_changes(before, Listing(), "common", {0: 7, 1: 7})["compressor"] == snapshots[:1]
    assert cut_changes(before, Listing(), "each", {0: 7, 1: 9})["compressor"] == snapshots


def test_named_bases_beyond_the_cut_are_dropped() -> None:
    named = tuple(Base(1, 0, lsn, "a", n, "0" * 8, 10) for n, lsn in enumerate((0, 5, 10)))
    before = Manifest(1, "r", 2, "claim", (Span(1, 0, 1, None),), {}, "bitwise", bases=named)
    assert cut_changes(before, listing(), "common", {0: 7})["bases"] == named[:2]


@pytest.mark.parametrize(
    "end, expected",
    [
        (35, (Kept(5, 9), Kept(21, None))),
        (20, (Kept(5, 9), Kept(21, None))),
        (9, (Kept(5, None),)),
        (6, (Kept(5, None),)),
        (15, (Kept(5, 9), Kept(16, None))),  # it had been given up already
        (3, (Kept(4, None),)),
    ],
)
def test_the_history_goes_on_in_the_range_that_it_is_cut_in(end: int, expected: tuple[Kept, ...]) -> None:
    before = replace(manifest(), kept=(Kept(5, 9), Kept(21, None)))
    found = listing(base(0, end), base(1, end), base(0, 40))
    assert cut_changes(before, found, "common", {0: end, 1: end})["kept"] == expected
