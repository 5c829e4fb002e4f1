"""What changed between two steps: by tensor, against the live states."""

from __future__ import annotations

import json

import pytest
import torch

from everstep.core.errors import StepNotKept
from everstep.training.diff import _row, diff
from everstep.training.restore import restore
from tests.unit.training.test_restore import Stored
from tests.unit.training.worlds import toy_recipe, whole_tensors


@pytest.fixture
def stored() -> Stored:
    return Stored(toy_recipe(norm=True, shards=2))


def test_every_tensor_is_compared_and_the_most_changed_come_first(stored: Stored) -> None:
    found = diff(stored.chain, stored.recipe, 3, 7)
    states = [whole_tensors(list(restore(stored.chain, stored.blueprint, target=t)[0].values())) for t in (3, 7)]
    kinds = {"parameters": "param/", "optimizer": "optimizer/", "buffers": "buffer/"}
    rows = {kinds[title] + row["tensor"]: row for title in kinds for row in found[title]}
    assert set(rows) == set(states[0])
    for name, row in rows.items():
        old, new = (state[name].double() for state in states)
        assert row["l2"] == pytest.approx(float((new - old).norm())) and row["elements"] == old.numel()
        assert row["max_abs"] == pytest.approx(float((new - old).abs().max())) and row["only"] is None
        assert row["changed"] == int((states[0][name] != states[1][name]).sum())
        assert row["relative"] == (pytest.approx(float((new - old).norm() / old.norm())) if old.norm() else None)
    for title in kinds:
        ranks = [float("inf") if row["relative"] is None else row["relative"] for row in found[title]]
        assert ranks == sorted(ranks, reverse=True)
    frozen = rows["param/shift"]
    assert (frozen["l2"], frozen["relative"], frozen["changed"]) == (0.0, 0.0, 0)
    assert found["parameters_relative"] > 0
    assert not stored.store.list("r/pins/")
    json.dumps(found)


def test_a_step_does_not_differ_from_itself(stored: Stored) -> None:
    found = diff(stored.chain, stored.recipe, 5, 5)
    rows = found["parameters"] + found["optimizer"] + found["buffers"]
    assert rows and all((row["l2"], row["changed"], row["relative"]) == (0.0, 0, 0.0) for row in rows)


def test_what_is_there_at_one_of_the_steps_only(stored: Stored) -> None:
    found = diff(stored.chain, stored.recipe, 0, 4)  # the optimizer has nothing before its first step
    assert found["optimizer"] and all(row["only"] == 4 for row in found["optimizer"])
    assert all(row["relative"] is None and row["norm_a"] == 0 for row in found["optimizer"] if row["l2"])
    assert all(row["only"] is None for row in found["parameters"])
    assert all(row["only"] == 4 for row in diff(stored.chain, stored.recipe, 4, 0)["optimizer"])


def test_bits_are_counted() -> None:
    old, new = torch.tensor([0.0, float("nan"), 1.0]), torch.tensor([-0.0, float("nan"), 2.0])
    assert _row(old, new, 1, 2)["changed"] == 2
    half = torch.ones(3, dtype=torch.bfloat16)
    assert _row(half, half * 2, 1, 2)["changed"] == 3
    assert _row(torch.ones(0), torch.ones(0), 1, 2)["changed"] == 0


def test_a_step_that_is_not_kept(stored: Stored) -> None:
    with pytest.raises(StepNotKept, match="step 10"):
        diff(stored.chain, stored.recipe, 5, 10)
