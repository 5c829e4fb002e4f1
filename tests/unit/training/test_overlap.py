"""A gradient reduced in stretches while backward runs: the bits of one reduced as a whole, and no trace of aborts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from everstep.core.errors import GroupBroken, TaskError
from everstep.training import overlap
from everstep.training.blueprint import Blueprint
from everstep.training.layout import plan_layout
from tests.unit.training.worlds import ThreadGroup, Toy, Worker, same, step_all, together, toy_recipe, workers

COMPRESSION: dict[str, dict[str, Any]] = {
    "dense": {},
    "replicated": {"compressor": "topk", "density": 0.2},
    "int8": {"compressor": "int8"},
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "STRETCH_BYTES", 100)


def test_stretches_are_whole_parameters_from_the_last_to_the_first() -> None:
    layout = plan_layout(list("abcde"), [torch.empty(n) for n in (10, 5, 30, 20, 6)], [0] * 5, 2)
    cut = overlap._cut(layout.slots)
    assert cut == [range(3, 5), range(2, 3), range(0, 2)]
    assert sorted(at for stretch in cut for at in stretch) == list(range(5))


@pytest.mark.parametrize("compression", COMPRESSION)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bits_are_those_of_one_collective(compression: str, size: int) -> None:
    recipe = {"norm": True, "clip_norm": 0.5, **COMPRESSION[compression]}
    one, other = workers(toy_recipe(**recipe), size), workers(toy_recipe(overlap=False, **recipe), size)
    assert one[0].step.stretches is not None and len(one[0].step.stretches.stretches) > 2
    assert other[0].step.stretches is None
    for _ in range(7):
        got, want = step_all(one), step_all(other)
        assert same(one[0].bits(), other[0].bits()) and same(one[-1].bits(), one[0].bits())
        assert same(got[0].scalars["loss"], want[0].scalars["loss"])
        assert got[0].delta is not None and want[0].delta is not None and got[0].delta.unused == want[0].delta.unused


def test_every_stretch_is_a_collective_and_the_tail_is_the_last() -> None:
    crew = workers(toy_recipe(), 2)
    entered = together(2, lambda group: (crew[group.world_rank].take(group), group.entered)[1])
    stretches = crew[0].step.stretches
    assert stretches is not None and set(entered) == {len(stretches.stretches) + 1}


@pytest.mark.parametrize("compression", COMPRESSION)
def test_an_abort_at_any_collective_leaves_no_trace(compression: str) -> None:
    recipe = toy_recipe(norm=True, **COMPRESSION[compression])
    crew, calm = workers(recipe, 2), workers(recipe, 2)
    step_all(crew, 2)
    step_all(calm, 2)
    stretches = crew[0].step.stretches
    assert stretches is not None
    for collective in range(1, len(stretches.stretches) + 3):  # the tail, and the buffers
        before = crew[0].bits()
        with pytest.raises(GroupBroken):
            together(2, lambda group: crew[group.world_rank].take(group), break_at=collective)
        assert all(same(worker.bits(), before) for worker in crew)
    step_all(crew)
    step_all(calm)
    assert same(crew[0].bits(), calm[0].bits()) and same(crew[1].bits(), calm[1].bits())


def test_alone_there_is_nothing_to_overlap() -> None:
    worker = Worker(Blueprint(toy_recipe()))
    group = together(1, lambda group: (worker.take(group), group)[1])[0]
    assert isinstance(group, ThreadGroup) and group.entered == 1


class Twice(Toy):
    """Reentrant checkpointing of a part that is used twice: its gradient is accumulated in two backward passes."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, _ = batch
        x = checkpoint(model.first, x.requires_grad_(), use_reentrant=True)
        x = checkpoint(model.first, torch.tanh(x), use_reentrant=True)
        return ((x - y) ** 2).mean()


def test_a_gradient_accumulated_twice_is_refused() -> None:
    task = f"{__name__}:Twice"
    with pytest.raises(TaskError, match="first.* was accumulated twice"):
        step_all(workers(replace(toy_recipe(), task=task), 2))
    step_all(workers(replace(toy_recipe(overlap=False), task=task), 2))
