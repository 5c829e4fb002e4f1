"""Runs lived at random against a dictionary of what each step's state must be.

Each operation may die at any named point (`crash_points.POINTS`), or be stopped there while others go on: takeovers,
zombies, collections, forks, deletions, clocks. 2,000 lives in memory; `EVERSTEP_MACHINE_STORE=file:/folder` or
`s3://bucket/prefix` makes all of them live there, `EVERSTEP_MACHINE_SEED` makes them other lives.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from everstep.core import clock, ids
from everstep.storage import retention
from everstep.storage.chain import Chain
from everstep.storage.collect import collect_all, delete_run
from everstep.storage.manifest import Manifest
from everstep.storage.memory import MemoryStore
from everstep.storage.pins import RESTORE_S
from everstep.storage.retention import Retention
from everstep.storage.store import Store, open_store
from tests.unit.storage.chain_model import SHARDS, Ids, Observed, RunModel
from tests.unit.storage.chain_operations import Arm, Operations
from tests.unit.storage.crash_points import POINTS, Point

small = st.integers(0, 11)
OPERATIONS = (
    "commit", "commit", "commit", "merge", "round", "round", "snapshot", "takeover", "zombie", "gc", "gc", "fork",
    "hold", "begin", "finish", "read", "delete", "clock", "gap", "restore",
)  # fmt: skip


class ChainMachine(Operations, RuleBasedStateMachine):
    """`busy` runs, and operations inside one another, are how several processes look that act at the same time."""

    hits: Counter[str] = Counter()
    url = os.environ.get("EVERSTEP_MACHINE_STORE", "memory:")

    def __init__(self) -> None:
        self._before = (clock.wall, ids.uuid, retention.MANIFESTS_KEPT, retention.BATCH)
        real = clock.wall
        clock.wall = (lambda: 1e9 + self.moved) if self.url == "memory:" else (lambda: real() + self.moved)
        ids.uuid = Ids()  # type: ignore[assignment]
        retention.MANIFESTS_KEPT, retention.BATCH = 2, 4
        RuleBasedStateMachine.__init__(self)
        Operations.__init__(self, Observed(new_store(self.url)))
        self.store.on_manifest = self._on_manifest  # type: ignore[method-assign]

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None and self.models:
                self._end()
        finally:
            clock.wall, ids.uuid, retention.MANIFESTS_KEPT, retention.BATCH = self._before

    @initialize(
        rounds=st.integers(1, 2),
        every=st.sampled_from([0, 0, 2]),
        age=st.sampled_from([0.0, 0.0, 50.0]),
        residual=st.sampled_from([False, False, True]),
    )
    def create(self, rounds: int, every: int, age: float, residual: bool) -> None:
        self.keep = Retention(rounds, every, young_s=age, min_age_s=age, residual=residual)
        chain = Chain.create(self._process(), "r", settings={}, shards=SHARDS, exactness="bitwise")
        self.models["r"] = RunModel("r", chain)
        for shard in range(SHARDS):
            self._base(self.models["r"], chain, shard, 0)

    @rule(name=st.sampled_from(OPERATIONS), run=small, a=small, b=small)
    def act(self, name: str, run: int, a: int, b: int) -> None:
        self._do(name, run, a, b, None)

    @rule(point=st.sampled_from(POINTS), run=small, a=small, b=small)
    def die(self, point: Point, run: int, a: int, b: int) -> None:
        self._do(point.operation, run, a, b, lambda process: process.arm(point))

    @rule(
        point=st.sampled_from(POINTS),
        run=small,
        a=small,
        b=small,
        meanwhile=st.lists(st.tuples(st.sampled_from(OPERATIONS), small, small, small), min_size=1, max_size=4),
    )
    def stop(self, point: Point, run: int, a: int, b: int, meanwhile: list[tuple[str, int, int, int]]) -> None:
        def others() -> None:
            self.depth += 1
            for name, *numbers in meanwhile:
                self._do(name, *numbers, None)
            self.depth -= 1

        self._do(point.operation, run, a, b, lambda process: process.arm(point, others))

    @invariant()
    def nothing_is_lost(self) -> None:
        for name in self.touched & set(self.models):
            if not self.models[name].deleted:
                self.models[name].check(self.store)
        self.touched.clear()

    def _do(self, name: str, run: int, a: int, b: int, arm: Arm) -> None:
        """Let one process do one thing, perhaps die or be stopped in it; then see what there is."""
        alive = [model for model in self.models.values() if not model.deleted]
        several = list(self.models.values()) if name in ("delete", "zombie") else alive
        if not several:
            return
        model = several[run % len(several)]
        if name not in ("clock", "hold", "begin", "finish", "read", "restore"):
            self.touched.add(model.name)
        writes = name in ("commit", "merge", "round", "snapshot", "gap")
        if writes and (model.writer is None or model.busy):
            return
        model.busy = model.busy or writes
        deleted = model.deleted
        try:
            getattr(self, name)(model, a, b, arm)
        finally:
            model.haunted |= bool(arm) and model.deleted and not deleted
            if writes:
                model.busy = False

    def _on_manifest(self, before: Manifest, after: Manifest) -> None:
        model = self.models.get(after.run)
        if model is not None and after.state == "deleted":
            model.dismiss()
            model.deleted = True
            return
        if model is not None and (before.state, after.state) == ("claim", "open"):
            common, at = self.takers[-1]
            model.adopt(after, common=common, at=at)
        same = (before.generation, before.state) == (after.generation, after.state)
        gone = set(before.bases) - set(after.bases) or set(after.dropped) - set(before.dropped)
        if model is not None and same and (gone or before.kept != after.kept):
            model.collected(before, self.keep)

    def _end(self) -> None:
        """Every kept step has a plan; when all is deleted, children first, nothing is left."""
        for model in self.models.values():
            if not model.deleted:
                model.check(self.store)
                model.check_all(self.store)
                model.check_step(self.store, model.end())
        while self.restores:
            self.finish(model, 0, 0, None)
        self.moved += 2 * RESTORE_S
        for model in list(self.models.values()):
            if not model.deleted:
                chain = Chain.open(self.store, model.name)
                if chain.manifest.state != "claim":
                    collect_all(chain, self.keep)
                    model.check_all(self.store)
        haunted = {model.name for model in self.models.values() if model.haunted}
        for name in sorted(set(self._present()) - haunted, key=self._age, reverse=True):
            delete_run(Chain.open(self.store, name, deleted_too=True))
        assert [info.key for info in self.store.list("") if info.key.partition("/")[0] not in haunted] == []

    def _age(self, name: str) -> int:
        origin = self.store.manifests[name].origin
        return 0 if origin is None else 1 + self._age(origin.run)


def new_store(url: str) -> Store:
    return MemoryStore() if url == "memory:" else open_store(f"{url}/{ids.new_id()}-{os.urandom(4).hex()}")


def lives(count: int) -> settings:
    return settings(
        max_examples=count, stateful_step_count=18, deadline=None, database=None, print_blob=False,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip


def live(number: int, count: int, url: str | None = None) -> Counter[str]:
    """Live `count` lives; return how often each point was hit."""

    class Lives(ChainMachine):
        hits: Counter[str] = Counter()

    Lives.url = url or ChainMachine.url
    first = int(os.environ.get("EVERSTEP_MACHINE_SEED", "0"))
    run_state_machine_as_test(seed(100 * first + number)(Lives), settings=lives(count))
    return Lives.hits


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(4))
def test_500_lives(number: int) -> None:
    hits = live(number, int(os.environ.get("EVERSTEP_MACHINE_LIVES", "500")))
    print("\ncrash point | times hit")
    for point in POINTS:
        print(f"{point.name} | {hits[point.name]}")
    assert {point.name for point in POINTS} <= set(hits)


@pytest.mark.timeout(240)
def test_some_lives_in_a_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        live(4, 20, f"file:{folder}")
