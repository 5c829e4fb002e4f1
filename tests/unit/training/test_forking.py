"""Forks at the level of states: the parent's bits, with the parent gone too; what is refused; where residuals start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everstep.core.errors import RunExists, SettingsError, StepNotKept
from everstep.storage.chain import Chain
from everstep.storage.collect import delete_run
from everstep.storage.manifest import CompressorSnapshot, Origin
from everstep.training.blueprint import Blueprint
from everstep.training.forking import check_fork, residual_of, start_fork
from everstep.training.inspect import describe
from everstep.training.restore import restore
from everstep.training.shard_state import to_batches
from everstep.training.verify import verify
from tests.unit.training.test_restore import STEPS, Stored
from tests.unit.training.worlds import toy_recipe, whole_digest


@pytest.fixture
def stored() -> Stored:
    return Stored(toy_recipe(norm=True, shards=2))


def begun(stored: Stored, step: int = 5, run: str = "f", **changes: Any) -> dict[str, Any]:
    new = replace(stored.recipe, **changes)
    return start_fork(stored.chain, step, run, stored.recipe, new, {"run": {"name": run}})


@pytest.mark.parametrize("step", [0, 3, 5, STEPS])
def test_a_fork_has_the_bits_of_its_parent_with_the_parent_gone_too(stored: Stored, step: int) -> None:
    facts = begun(stored, step)
    assert (facts["origin"], facts["step"], facts["residual"]) == (f"r@{step}", step, "none")
    child = Chain.open(stored.store, "f")
    assert child.manifest.origin == Origin("r", step) and child.manifest.settings == {"run": {"name": "f"}}

    for gone in (False, True):
        states, plan, damage = restore(child, stored.blueprint)
        assert plan.target == step and not damage and whole_digest(list(states.values())) == stored.digests[step]
        if not gone:
            delete_run(stored.chain)
    assert verify(stored.store, "f", lambda _: stored.recipe)["problems"] == []
    held = describe(child)
    assert (held["origin"], held["segments"], held["shared_objects"]) == (f"r@{step}", 0, facts["shared_objects"])
    assert held["last_restorable"] == step and held["rounds"][0]["shards"] == 3


def test_the_parent_says_who_was_forked_from_it(stored: Stored) -> None:
    begun(stored, 5, "f")
    begun(stored, 6, "g")
    assert [fork["run"] for fork in describe(stored.chain)["forks"]] == ["f", "g"]
    assert all(fork["objects"] > 0 for fork in describe(stored.chain)["forks"])


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"task_options": {"norm": False}}, ["parameters and buffers", "norm.weight", "nothing here"]),
        ({"optimizer_options": {"lr": 0.01, "amsgrad": True}}, ["the optimizer's state", "max_exp_avg_sq"]),
        ({"optimizer": "sgd", "optimizer_options": {"lr": 0.1}}, ["the optimizer's state", "AdamW", "SGD"]),
        ({"shards": 1}, ["the cut into shards", "shard 2 in the parent", "shard 1 here"]),
    ],
)
def test_what_the_parents_state_does_not_fit_is_refused_by_name(
    stored: Stored, changes: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        begun(stored, **changes)
    assert all(part in caught.value.message for part in parts) and "new run" in caught.value.hint
    assert not Chain.exists(stored.store, "f") and not stored.store.list("r/pins/")


def test_groups_are_compared() -> None:
    with pytest.raises(SettingsError, match="optimizer groups: .*group 0 in the parent, group 1 here"):
        check_fork(Blueprint(toy_recipe()), Blueprint(toy_recipe("Grouped")))


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer_options": {"lr": 0.5, "weight_decay": 0.1, "betas": [0.8, 0.9]}},
        {"seed": 99, "clip_norm": 0.1},
        {"task_options": {"norm": True, "dropout": 0.5}},
        {"compressor": "topk", "density": 0.1},
        {"scheduler": "ExponentialLR", "scheduler_options": {"gamma": 0.9}},
    ],
)
def test_what_may_change(stored: Stored, changes: dict[str, Any]) -> None:
    begun(stored, **changes)
    states, _, _ = restore(Chain.open(stored.store, "f"), Blueprint(replace(stored.recipe, **changes)))
    assert whole_digest(list(states.values())) == stored.digests[5]


def test_a_fork_that_cannot_be(stored: Stored) -> None:
    with pytest.raises(StepNotKept, match="step 10"):
        begun(stored, STEPS + 1)
    with pytest.raises(RunExists):
        begun(stored, 5, "r")


def test_where_the_residual_starts() -> None:
    recipe = toy_recipe(norm=True, shards=2, compressor="topk", density=0.1)
    stored = Stored(recipe)
    for number in (0, 1):
        stored.chain.put_compressor(5, number, to_batches({"residual": stored.tensors["param/gain"]}), {})
    stored.chain.update(compressor=(CompressorSnapshot(1, 5, 2),))

    assert begun(stored, 5, "with")["residual"] == "snapshot"
    assert [s.run for s in Chain.open(stored.store, "with").manifest.compressor] == ["r"]
    found = begun(stored, 4, "without")
    assert (found["residual"], found["parent_snapshots"]) == ("zero", [5])
    assert begun(stored, 5, "other", residual="survivor")["residual"] == "zero"
    assert Chain.open(stored.store, "other").manifest.compressor == ()
    assert begun(stored, 5, "denser", density=0.5)["residual"] == "snapshot"
    assert residual_of(recipe, toy_recipe(), stored.chain.manifest, 5)["start"] == "none"
    assert begun(stored, 5, "none", compressor="none")["residual"] == "none"
    assert Chain.open(stored.store, "none").manifest.compressor == ()
