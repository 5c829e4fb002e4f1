"""What a run's events say about its history."""

from __future__ import annotations

from typing import Any

from everstep.training.history import (
    best,
    bodies,
    evaluation_name,
    evaluations,
    gaps,
    rewind_name,
    size_name,
    sizes,
    sizes_between,
)


def told(*entries: tuple[int, int, float], rewinds: tuple[tuple[int, int], ...] = ()) -> dict[str, dict[str, Any]]:
    """Events of evaluations (lsn, generation, loss) and of goings back (generation, step)."""
    events: dict[str, dict[str, Any]] = {
        evaluation_name(lsn, generation): {"lsn": lsn, "generation": generation, "loss": loss}
        for lsn, generation, loss in entries
    }
    return events | {rewind_name(g): {"generation": g, "step": step, "skipped_batches": 0} for g, step in rewinds}


def seen(events: dict[str, dict[str, Any]]) -> list[tuple[int, float]]:
    return [(body["lsn"], body["loss"]) for body in evaluations(events)]


def test_evaluations_are_in_order_and_best_is_the_lowest() -> None:
    events = told((20, 1, 0.5), (10, 1, 0.9), (30, 2, 0.5))
    assert seen(events) == [(10, 0.9), (20, 0.5), (30, 0.5)]
    assert best(events) == {"lsn": 20, "generation": 1, "loss": 0.5}
    assert best({}) is None and evaluations({}) == []


def test_a_rewind_makes_what_came_after_it_void() -> None:
    events = told((10, 1, 0.9), (20, 1, 0.1), (30, 1, 0.05), (20, 2, 0.4), rewinds=((2, 15),))
    assert seen(events) == [(10, 0.9), (20, 0.4)]
    assert (best(events) or {})["lsn"] == 20


def test_the_step_that_was_gone_back_to_stays() -> None:
    assert seen(told((20, 1, 0.3), (30, 1, 0.1), rewinds=((2, 20),))) == [(20, 0.3)]


def test_several_rewinds() -> None:
    events = told((10, 1, 0.9), (30, 1, 0.1), (30, 2, 0.2), (40, 2, 0.15), (40, 4, 0.5), rewinds=((2, 20), (4, 30)))
    assert seen(events) == [(10, 0.9), (30, 0.2), (40, 0.5)]


def test_a_resume_makes_nothing_void_and_the_later_generation_counts() -> None:
    assert seen(told((10, 1, 0.9), (20, 1, 0.5), (20, 3, 0.5001))) == [(10, 0.9), (20, 0.5001)]


def test_evaluations_of_the_first_runs_have_no_generation() -> None:
    events: dict[str, Any] = {
        "eval-000000000003": {"lsn": 3, "loss": 0.5},
        "eval-000000000006": {"lsn": 6, "loss": 0.4},
    }
    assert [body["lsn"] for body in evaluations(events | told(rewinds=((2, 4),)))] == [3]


def test_bodies_are_sorted_by_name() -> None:
    assert bodies({"gap-2": {"a": 2}, "gap-1": {"a": 1}, "x": {}}, "gap-") == [{"a": 1}, {"a": 2}]


def resized(*rows: tuple[int, int, int]) -> dict[str, dict[str, Any]]:
    """(generation, lsn, size), one group epoch after the other."""
    return {
        size_name(lsn, g, epoch): {"lsn": lsn, "generation": g, "size": size}
        for epoch, (g, lsn, size) in enumerate(rows)
    }


def test_world_sizes_are_in_order_and_rewinds_void_them() -> None:
    assert sizes(resized((1, 0, 2), (1, 40, 3), (1, 7, 1))) == [(0, 2), (7, 1), (40, 3)]
    assert sizes(resized((1, 0, 2), (1, 40, 3), (2, 40, 1))) == [(0, 2), (40, 1)]
    assert sizes(resized((1, 0, 2), (1, 9, 1), (1, 9, 3))) == [(0, 2), (9, 3)]  # no step between the two
    assert sizes(resized((1, 0, 1), (1, 9, 2), (1, 9, 1))) == [(0, 1)]
    rewound = {rewind_name(2): {"generation": 2, "step": 20}}
    assert sizes(resized((1, 0, 2), (1, 10, 3), (1, 40, 4), (2, 20, 1)) | rewound) == [(0, 2), (10, 3), (20, 1)]


def test_the_sizes_that_steps_were_taken_with() -> None:
    pairs = [(0, 2), (10, 3), (20, 2)]
    assert sizes_between(pairs, 0, 10) == {2}
    assert sizes_between(pairs, 9, 11) == {2, 3}
    assert sizes_between(pairs, 10, 20) == {3}
    assert sizes_between(pairs, 20, 25) == {2}
    assert sizes_between(pairs, 5, 25) == {2, 3}
    assert sizes_between([], 0, 5) == set()


def test_gaps_of_several_writers_are_one() -> None:
    def gap(first: int, last: int) -> dict[str, object]:
        return {"first": first, "last": last, "reason": "r"}

    events = {"gap-9-s0001": gap(4, 9), "gap-9-s0000": gap(6, 9), "gap-30": gap(20, 30), "gap-12": gap(10, 12)}
    assert gaps(events) == [gap(4, 12), gap(20, 30)]
