"""From stored objects to states: any step, around damage, and what the commands make of a stored run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from everstep.core.errors import ChainError, ChainGap, StateMismatch, StepNotKept
from everstep.storage.chain import Chain
from everstep.storage.keys import BaseKey, DataKey, SegmentKey, inside
from everstep.storage.manifest import CompressorSnapshot
from everstep.storage.memory import MemoryStore
from everstep.training.blueprint import Blueprint
from everstep.training.inspect import FAULT_KEYS, describe, export
from everstep.training.recipe import Recipe
from everstep.training.record import unpack
from everstep.training.restore import best_snapshot, read_residual, restore
from everstep.training.shard_state import to_batches
from tests.unit.training.worlds import Worker, packed, same, solo, toy_recipe, whole_digest, whole_tensors

STEPS = 9
CUT = 3  # steps a segment
BASES = (0, 3, 6)


class Stored:
    """A short run in a store: segments of three steps, bases at 0, 3 and 6, and the live digests."""

    def __init__(self, recipe: Recipe, *, bases: tuple[int, ...] = BASES, owned: bool = False) -> None:
        self.recipe, self.store = recipe, MemoryStore()
        worker = Worker(Blueprint(recipe))
        worker.owned = tuple(worker.blueprint.layout.shards) if owned else ()
        self.blueprint = Blueprint(recipe)
        self.shards = worker.blueprint.layout.shards
        self.chain = Chain.create(self.store, "r", settings={}, shards=len(self.shards), exactness="bitwise")
        self.digests, self.tensors = {0: worker.state.digest()}, {}
        self.worker = worker
        replicas = {s: worker.blueprint.shard_state(s) for s in self.shards}
        self._bases(replicas)
        records: dict[int, dict[int, Any]] = {}
        for lsn in range(1, STEPS + 1):
            records[lsn] = packed(worker.take(solo()), worker.blueprint.layout)
            self.digests[lsn] = worker.state.digest()
            for shard, state in replicas.items():
                state.merge(unpack(shard, records[lsn][shard]))
            if lsn % CUT == 0:
                for shard in self.shards:
                    batches = [unpack(shard, records[at][shard]) for at in range(lsn - CUT + 1, lsn + 1)]
                    self.chain.put_segment(shard, lsn - CUT + 1, lsn, batches)
            if lsn in bases:
                self._bases(replicas)
        self.tensors = {name: t.clone() for name, t in worker.state.tensors().items()}

    def _bases(self, replicas: dict[int, Any]) -> None:
        for shard, state in replicas.items():
            self.chain.put_base(shard, state.lsn, to_batches(state.state.tensors()))

    def damage(self, kind: type[BaseKey | SegmentKey], shard: int, lsn: int) -> DataKey:
        """Flip one bit in the middle of an object; return its key."""
        for key, _ in self.chain.listing().objects:
            if isinstance(key, kind) and key.shard == shard and lsn == getattr(key, "lsn", getattr(key, "first", None)):
                name = f"r/{key.path}"
                data, when = self.store._objects[name]
                at = len(data) // 2
                self.store._objects[name] = (data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], when)
                return key
        raise AssertionError("no such object")


@pytest.fixture
def stored() -> Stored:
    return Stored(toy_recipe(norm=True, shards=2))


def test_every_step_is_restored_to_the_bits_of_the_live_run(stored: Stored) -> None:
    for target in range(STEPS + 1):
        states, plan, damage = restore(stored.chain, stored.blueprint, target=target)
        assert whole_digest(list(states.values())) == stored.digests[target]
        assert plan.target == target and not damage and {state.lsn for state in states.values()} == {target}
        assert {part.base.lsn for part in plan.shards} == {max(b for b in BASES if b <= target)}
    states, plan, _ = restore(stored.chain, stored.blueprint)
    assert plan.target == STEPS and same(whole_tensors(list(states.values())), stored.tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {"compressor": "topk", "density": 0.1},
        {"optimizer": "sgd", "optimizer_options": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}},
        {"scheduler": "OneCycleLR", "scheduler_options": {"max_lr": 0.1, "total_steps": 20}, "task": "Grouped"},
    ],
)
def test_other_recipes_restore_as_well(changes: dict[str, Any]) -> None:
    stored = Stored(toy_recipe(shards=3, **changes), owned=True)
    for target in (1, 5, STEPS):
        states, _, _ = restore(stored.chain, stored.blueprint, target=target)
        assert whole_digest(list(states.values())) == stored.digests[target]


def test_single_shards_can_be_restored(stored: Stored) -> None:
    states, plan, _ = restore(stored.chain, stored.blueprint, target=5, shards=[2])
    assert list(states) == [2] and plan.target == 5 and states[2].lsn == 5


def test_a_restored_run_goes_on_as_if_nothing_was(stored: Stored) -> None:
    states, _, _ = restore(stored.chain, stored.blueprint, target=4)
    worker = Worker(Blueprint(stored.recipe))
    worker.state.load(whole_tensors(list(states.values())), 4)
    worker.step.align_schedule()
    for lsn in range(5, STEPS + 1):
        worker.take(solo())
        assert worker.state.digest() == stored.digests[lsn]


# --- damage


@pytest.mark.parametrize("shard", [0, 1])
def test_an_older_base_stands_in_for_a_damaged_one(stored: Stored, shard: int) -> None:
    key = stored.damage(BaseKey, shard, 6)
    states, plan, damage = restore(stored.chain, stored.blueprint)
    assert whole_digest(list(states.values())) == stored.digests[STEPS]
    assert list(damage) == [key] and key.path in damage[key] and "checksum" in damage[key]
    assert {part.shard: part.base.lsn for part in plan.shards} == {s: 3 if s == shard else 6 for s in stored.shards}
    deeper = stored.damage(BaseKey, shard, 3)
    states, _, damage = restore(stored.chain, stored.blueprint)
    assert whole_digest(list(states.values())) == stored.digests[STEPS] and set(damage) == {key, deeper}


def test_without_a_whole_base_the_message_names_the_damaged_ones(stored: Stored) -> None:
    keys = [stored.damage(BaseKey, 1, lsn) for lsn in BASES]
    with pytest.raises(ChainError) as caught:
        restore(stored.chain, stored.blueprint)
    assert all(key.path in caught.value.message for key in keys) and caught.value.hint


def test_a_damaged_last_segment_gives_the_step_before_and_is_told(stored: Stored) -> None:
    key = stored.damage(SegmentKey, 2, 7)
    states, plan, damage = restore(stored.chain, stored.blueprint)
    assert plan.target == 6 and whole_digest(list(states.values())) == stored.digests[6]
    assert list(damage) == [key] and key.path in damage[key]
    with pytest.raises(ChainError) as caught:
        restore(stored.chain, stored.blueprint, target=9)
    assert key.path in caught.value.message and "checksum" in caught.value.message and caught.value.hint
    states, _, damage = restore(stored.chain, stored.blueprint, target=6)
    assert whole_digest(list(states.values())) == stored.digests[6] and not damage


def test_a_damaged_segment_in_the_middle_is_named_in_a_typed_error() -> None:
    stored = Stored(toy_recipe(shards=2), bases=())
    key = stored.damage(SegmentKey, 2, 4)
    for target in (None, 5, 8):
        with pytest.raises(ChainGap) as caught:
            restore(stored.chain, stored.blueprint, target=target)
        assert key.path in caught.value.message and "checksum" in caught.value.message and caught.value.hint
    states, _, _ = restore(stored.chain, stored.blueprint, target=3)
    assert whole_digest(list(states.values())) == stored.digests[3]


def test_a_later_base_bridges_a_damaged_segment(stored: Stored) -> None:
    key = stored.damage(SegmentKey, 1, 4)
    states, _, damage = restore(stored.chain, stored.blueprint)
    assert whole_digest(list(states.values())) == stored.digests[STEPS] and not damage
    with pytest.raises(ChainError) as caught:
        restore(stored.chain, stored.blueprint, target=5)
    assert key.path in caught.value.message


def test_damage_in_several_shards_is_named_altogether(stored: Stored) -> None:
    keys = [stored.damage(BaseKey, 0, 6), stored.damage(BaseKey, 1, 6), stored.damage(BaseKey, 1, 3)]
    keys.append(stored.damage(SegmentKey, 2, 7))
    states, plan, damage = restore(stored.chain, stored.blueprint)
    assert plan.target == 6 and whole_digest(list(states.values())) == stored.digests[6]
    assert set(damage) == set(keys) and all(key.path in damage[key] for key in keys)
    with pytest.raises(ChainError) as caught:
        restore(stored.chain, stored.blueprint, target=STEPS)
    assert all(key.path in caught.value.message for key in (keys[0], keys[1], keys[3]))


def test_a_missing_object_is_planned_around(stored: Stored) -> None:
    listing = stored.chain.listing()
    gone = next(key for key in listing.bases(1) if key.lsn == 6)

    class Stale(Chain):
        def listing(self) -> Any:
            return listing

    stored.store.delete(f"r/{gone.path}")
    chain = Stale(stored.store, "r", stored.chain.manifest)
    states, _, damage = restore(chain, stored.blueprint)
    assert whole_digest(list(states.values())) == stored.digests[STEPS] and list(damage) == [gone]


def test_excluded_objects_are_not_used(stored: Stored) -> None:
    later = frozenset(key for key in stored.chain.listing().bases() if key.lsn > 0)
    states, plan, _ = restore(stored.chain, stored.blueprint, exclude=later)
    assert {part.base.lsn for part in plan.shards} == {0}
    assert whole_digest(list(states.values())) == stored.digests[STEPS]


def test_a_step_that_is_not_kept_is_refused(stored: Stored) -> None:
    with pytest.raises(StepNotKept, match="0 to 9"):
        restore(stored.chain, stored.blueprint, target=10)


def test_a_replay_that_does_not_lead_to_the_logged_digest_is_refused() -> None:
    stored = Stored(toy_recipe(shards=2, digest_every=2), bases=(), owned=True)
    state = stored.blueprint.shard_state(1)
    with torch.no_grad():
        next(iter(state.state.params.values())).add_(1)
    later = frozenset(stored.chain.listing().bases(1))
    stored.chain.put_base(1, 0, to_batches(state.state.tensors()))
    restore(stored.chain, stored.blueprint, target=1, exclude=later)
    with pytest.raises(StateMismatch, match="shard 1: .*step 2"):
        restore(stored.chain, stored.blueprint, target=5, exclude=later)


def test_another_models_log_is_refused(stored: Stored) -> None:
    with pytest.raises(StateMismatch, match="another model"):
        restore(stored.chain, Blueprint(toy_recipe(shards=2)))


# --- compressor state


def test_residuals_come_back_slice_by_slice(stored: Stored) -> None:
    parts = {0: torch.randn(5), 1: torch.randn(4)}
    for number, part in parts.items():
        stored.chain.put_compressor(4, number, to_batches({"residual": part}), {"slices": "2"})
    assert same(read_residual(stored.chain, CompressorSnapshot(1, 4, 2)), parts)
    assert best_snapshot(stored.chain, 9) is None
    stored.chain.update(compressor=(CompressorSnapshot(1, 2, 2), CompressorSnapshot(1, 4, 2)))
    assert best_snapshot(stored.chain, 9) == best_snapshot(stored.chain, 4) == CompressorSnapshot(1, 4, 2)
    assert best_snapshot(stored.chain, 3) == CompressorSnapshot(1, 2, 2) and best_snapshot(stored.chain, 1) is None


# --- what the commands make of it


def test_describe_says_what_can_be_restored(stored: Stored) -> None:
    stored.chain.add_event("eval-000000000003", {"lsn": 3, "loss": 0.5})
    stored.chain.add_event("eval-000000000006", {"lsn": 6, "loss": 0.25})
    stored.chain.add_event("healing-1", dict.fromkeys(FAULT_KEYS, 0) | {"kind": "worker_lost", "began": 1.0})
    stored.store.put("r/notes.txt", b"mine")
    found = describe(stored.chain)
    assert (found["segments"], found["bases"], found["shards"]) == (9, list(BASES), 3)
    assert (found["last_restorable"], found["highest_seen"], found["damage"]) == (STEPS, STEPS, None)
    assert found["best"] == {"lsn": 6, "loss": 0.25} and found["faults"] == [
        dict.fromkeys(FAULT_KEYS, 0) | {"kind": "worker_lost"}
    ]
    assert found["strays"] == ["notes.txt"] and found["bytes_logged"] > 0 and found["bytes_bases"] > 0
    gone = next(key for key in stored.chain.listing().segments(1) if key.first == 7)
    stored.store.delete(f"r/{gone.path}")
    assert describe(stored.chain)["last_restorable"] == 6
    for key in stored.chain.listing().bases(2):
        stored.store.delete(f"r/{key.path}")
    assert "shard 2" in describe(stored.chain)["damage"]


@pytest.mark.parametrize("step", [None, 4, "best"])
def test_export_writes_what_other_tools_read(stored: Stored, tmp_path: Path, step: Any) -> None:
    stored.chain.add_event("eval-000000000006", {"lsn": 6, "loss": 0.25})
    lsn = {None: STEPS, "best": 6}.get(step, step)
    found = export(stored.chain, stored.recipe, step, str(tmp_path / "new"))
    assert found["step"] == lsn and found["digest"] == stored.digests[lsn] and not found["damaged_objects_left_out"]
    weights = load_file(found["safetensors"])
    whole = torch.load(found["state_dict"], weights_only=True)
    assert whole["lsn"] == lsn and same(dict(whole["model"]), weights)
    fresh = Blueprint(stored.recipe)
    fresh.model.load_state_dict(weights)
    optimizer = fresh.live_state().optimizer
    assert optimizer is not None
    optimizer.load_state_dict(whole["optimizer"])
    restored, _, _ = restore(stored.chain, stored.blueprint, target=lsn)
    wanted = whole_tensors(list(restored.values()))
    params = dict(fresh.model.named_parameters())
    assert all(same(params[n.removeprefix("param/")].detach(), t) for n, t in wanted.items() if n.startswith("param/"))
    assert same(optimizer.state[params["gain"]]["exp_avg"], wanted["optimizer/gain/exp_avg"])


def test_export_of_a_damaged_run_says_what_was_left_out(stored: Stored, tmp_path: Path) -> None:
    key = stored.damage(BaseKey, 1, 6)
    assert export(stored.chain, stored.recipe, None, str(tmp_path))["damaged_objects_left_out"] == [inside("r", key)]


def test_there_is_no_best_step_without_an_evaluation(stored: Stored, tmp_path: Path) -> None:
    with pytest.raises(StepNotKept, match="no evaluation"):
        export(stored.chain, stored.recipe, "best", str(tmp_path))
