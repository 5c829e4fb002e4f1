"""The scaling policy: how many, when, who leaves; and a run of a thousand workers, simulated."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from everstep.core import clock
from everstep.platform.controller import Controller
from everstep.platform.policies import FailurePolicy
from everstep.platform.scaling import LAST_CALL_S, WORTH_S, ScalingPolicy
from everstep.platform.states import (
    Ask,
    Decision,
    Facts,
    NewcomerFacts,
    Pause,
    Prepare,
    Regroup,
    ReplaceCheckpointers,
    Scaling,
    Wait,
    WorkerFacts,
)

POLICY = ScalingPolicy(least=1, most=4, spares=1, micro_shards=8)


def group(size: int, leaving: dict[int, float] | None = None) -> tuple[WorkerFacts, ...]:
    gone = leaving or {}
    return tuple(WorkerFacts(f"w{rank}", rank, lsn=5, leaves_s=gone.get(rank)) for rank in range(size))


def decide(size: int, policy: ScalingPolicy = POLICY, leaving: dict[int, float] | None = None, **more: Any) -> Decision:
    newcomers = NewcomerFacts(**{key: more.pop(key) for key in ("asked", "built", "preparing", "ready") if key in more})
    return policy.decide(Facts(group(size, leaving), newcomers=newcomers, **more))


@pytest.mark.parametrize(
    ("least", "most", "micro_shards", "target"),
    [(1, 3, 6, 3), (1, 3, 4, 2), (3, 3, 4, 3), (1, 8, 8, 8), (2, 7, 8, 4), (1, 100, 4, 4), (1, 1, 9, 1)],
)
def test_no_more_workers_than_make_a_step_shorter(least: int, most: int, micro_shards: int, target: int) -> None:
    assert ScalingPolicy(least, most, 0, micro_shards).target == target


def test_a_full_group_with_its_spare_is_left_alone() -> None:
    assert isinstance(decide(4, asked=1, built=1), Wait)


def test_what_is_missing_is_asked_for_and_what_is_too_much_given_back() -> None:
    assert decide(2) == Ask("asking Ray for 3 workers (2 to train beside 2, 1 to wait)", 3)
    assert decide(4, asked=3) == Ask("giving back 2 workers (0 to train beside 4, 1 to wait)", 1)
    assert isinstance(decide(2, asked=3), Wait)


def test_newcomers_catch_up_then_join_at_a_border() -> None:
    prepare = decide(2, asked=3, built=3)
    assert isinstance(prepare, Prepare) and prepare.count == 2  # the third is a spare
    assert isinstance(decide(2, asked=3, built=3, preparing=2), Wait)
    pause = decide(2, asked=3, built=3, preparing=1, ready=1)
    assert isinstance(pause, Pause) and "2 -> 3" in pause.reason
    assert isinstance(decide(2, asked=3, built=3, ready=2, pausing=True), Wait)


def test_nobody_is_asked_for_who_would_come_too_late() -> None:
    assert isinstance(decide(2, asked=1, left_s=WORTH_S - 1), Wait)
    assert isinstance(decide(2, asked=1, left_s=WORTH_S + 1), Ask)
    assert isinstance(decide(2, asked=3, left_s=1.0), Wait)  # who is on the way may come
    assert isinstance(decide(1, replace(POLICY, least=2), left_s=1.0), Ask)  # below min there is no going on


def test_a_node_that_is_taken_away_is_left() -> None:
    leave = decide(3, leaving={1: 100.0}, asked=2)
    assert isinstance(leave, Pause) and "world rank 1" in leave.reason
    fixed = ScalingPolicy(3, 3, 0, 6)
    assert isinstance(decide(3, fixed, {1: 100.0}), Ask)  # somebody has to come first
    assert isinstance(decide(3, fixed, {1: 100.0}, asked=1, built=1), Prepare)
    assert isinstance(decide(3, fixed, {1: 100.0}, asked=1, built=1, ready=1), Pause)
    assert isinstance(decide(3, fixed, {1: LAST_CALL_S - 1}, asked=1), Pause)  # the node is worth less than its steps


def test_a_regroup_names_who_leaves_and_the_size() -> None:
    seen = Facts(group(3, {2: 50.0}))
    assert POLICY.placed(Regroup("x", "resize"), seen) == Regroup("x", "resize", leave=("w2",), size=4)
    assert POLICY.placed(Regroup("x", "hang", ("w2",)), seen).leave == ()  # killed anyway
    fixed = ScalingPolicy(3, 3, 0, 6)
    assert fixed.placed(Regroup("x", "worker_lost"), seen).leave == ()  # it may train until the node is gone
    assert fixed.placed(Regroup("x", "resize"), seen).leave == ("w2",)


class Fleet:
    """A simulated run: workers take steps, die, hang and are preempted; newcomers take their time; one clock."""

    def __init__(self, size: int, steps: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.steps, self.lsn, self.now, self.count = steps, 0, 0.0, 0
        self.members = [self._fresh() for _ in range(size)]
        self.newcomers: list[list[float]] = []  # [built at, ready at]
        self.outcomes: dict[str, str] = {}
        self.leaves: dict[str, float] = {}
        self.pausing = False
        self.ticks: list[float] = []
        self.sizes: list[int] = [size]
        self.began = 0.0

    def _fresh(self) -> str:
        self.count += 1
        return f"w{self.count}"

    def start(self) -> None:
        pass

    def observe(self) -> Facts:
        if self.began:
            self.ticks.append(clock.monotonic() - self.began)
        self.now += 0.1
        if not self.outcomes:
            self._step()
        built = sum(self.now > at for at, _ in self.newcomers)
        ready = sum(self.now > at for _, at in self.newcomers)
        preparing = sum(at < float("inf") for _, at in self.newcomers) - ready
        workers = tuple(
            WorkerFacts(name, rank, self.outcomes.get(name), self.lsn, leaves_s=self.leaves.get(name))
            for rank, name in enumerate(self.members)
        )
        there = NewcomerFacts(len(self.newcomers), built, preparing, ready)
        left = 0.1 * (self.steps - self.lsn)
        seen = Facts(workers, newcomers=there, pausing=self.pausing, left_s=left)
        self.began = clock.monotonic()
        return seen

    def _step(self) -> None:
        chance = self.random.random()
        if self.lsn + 1 < self.steps and chance < 0.05:
            for name in self.random.sample(self.members, max(len(self.members) // 50, 1)):
                self.outcomes[name] = "dead"
            for name in self.members:
                self.outcomes.setdefault(name, "broken")
            return
        if chance < 0.08:
            self.leaves[self.random.choice(self.members)] = 60.0
        self.lsn += 1
        if self.lsn == self.steps:
            self.outcomes = dict.fromkeys(self.members, "finished")
        elif self.pausing:
            self.outcomes = dict.fromkeys(self.members, "stopped")

    def resize(self, decision: Scaling) -> None:
        if isinstance(decision, Ask):
            while len(self.newcomers) < decision.count:
                self.newcomers.append([self.now + self.random.uniform(1, 20), float("inf")])
            self.newcomers = sorted(self.newcomers)[: decision.count]
        elif isinstance(decision, Prepare):
            idle = [one for one in self.newcomers if self.now > one[0] and one[1] == float("inf")]
            assert len(idle) >= decision.count
            for one in idle[: decision.count]:
                one[1] = self.now + self.random.uniform(0.1, 2)
        else:
            assert not self.pausing
            self.pausing = True

    def regroup(self, decision: Regroup) -> None:
        alive = [n for n in self.members if self.outcomes.get(n) != "dead" and n not in decision.leave]
        built = sorted(one for one in self.newcomers if self.now > one[0])
        joining = built[: max(decision.size - len(alive), 0)]
        self.newcomers = [one for one in self.newcomers if one not in joining]
        self.members = alive + [self._fresh() for _ in joining]
        self.outcomes, self.pausing = {}, False
        self.leaves = {name: left for name, left in self.leaves.items() if name in self.members}
        self.sizes.append(len(self.members))

    def replace_checkpointers(self, decision: ReplaceCheckpointers) -> None:
        raise AssertionError("there is none")

    def finish(self, *, stopped: bool) -> None:
        assert self.lsn == self.steps and not stopped


def test_a_thousand_workers_are_decided_about_in_milliseconds() -> None:
    fleet = Fleet(1000, 1500, seed=7)
    lines: list[str] = []
    controller = Controller(
        fleet, FailurePolicy(hang_timeout_s=10, storage_timeout_s=60), ScalingPolicy(100, 1000, 20, 4000), lines.append
    )
    ended = controller.run()
    assert ended.error is None and fleet.lsn == 1500
    changes = [after - before for before, after in pairwise(fleet.sizes)]
    assert min(changes) < 0 < max(changes) and min(fleet.sizes) > 500  # it shrank again and again, and came back
    assert all(lines) and len(lines) < 3 * 1500
    ticks = sorted(fleet.ticks)
    print(f"ticks {len(ticks)}, median {ticks[len(ticks) // 2] * 1e3:.3f} ms, longest {ticks[-1] * 1e3:.3f} ms")
