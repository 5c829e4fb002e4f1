"""The train step: a transaction that leaves no trace when it is aborted, and the same bits on every worker."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from everstep.core.errors import GroupBroken, RunFailed
from everstep.training.blueprint import Blueprint
from everstep.training.evaluate import evaluate
from everstep.training.record import payload_crc, unpack
from tests.unit.training.worlds import (
    MICRO_SHARDS,
    WIDTH,
    Channel,
    ThreadGroup,
    Toy,
    Worker,
    batch_of,
    in_threads,
    packed,
    same,
    solo,
    step_all,
    together,
    toy_recipe,
    workers,
)

COMPRESSION = {
    "dense": {},
    "replicated": {"compressor": "topk", "density": 0.1, "residual": "replicated"},
    "survivor": {"compressor": "topk", "density": 0.1, "residual": "survivor"},
    "no residual": {"compressor": "topk", "density": 0.1, "residual": "none"},
    "bitwise": {"determinism": "bitwise"},
    "bitwise replicated": {"compressor": "topk", "density": 0.1, "residual": "replicated", "determinism": "bitwise"},
}
COLLECTIVES = [(name, at) for name in COMPRESSION for at in range(1, 5 if name.startswith("bitwise") else 3)]
SCHEDULE = {"scheduler": "OneCycleLR", "scheduler_options": {"max_lr": 0.1, "total_steps": 30}, "clip_norm": 0.5}


class Abort(Exception):
    """A fault that fires inside a step."""


def abort_at(point: str, lsn: int, *, occurrence: int = 1) -> Any:
    """Return an `at` that raises at the given point, once."""
    seen = [0]

    def at(where: str, step: int) -> None:
        if (where, step) == (point, lsn):
            seen[0] += 1
            if seen[0] == occurrence:
                raise Abort(point)

    return at


def undisturbed(recipe: Any, size: int, steps: int) -> list[Any]:
    crew = workers(recipe, size)
    step_all(crew, steps)
    return [worker.bits() for worker in crew]


def check_abort(recipe: Any, size: int, abort: Any, error: type[BaseException]) -> None:
    """Two steps, an aborted third one, then the third and the fourth: the bits of a run that was never disturbed."""
    crew = workers(recipe, size)
    step_all(crew, 2)
    before = [worker.bits() for worker in crew]
    with pytest.raises(error):
        abort(crew)
    for worker, bits in zip(crew, before, strict=True):
        worker.at = lambda point, lsn: None
        assert same(worker.bits(), bits)
        assert not worker.step.torn
        assert all(param.grad is None for param in worker.blueprint.model.parameters())
        worker.exchange.renew()
    results = [step_all(crew), step_all(crew)]
    assert [r.lsn for pair in results for r in pair] == [3] * size + [4] * size
    assert same([worker.bits() for worker in crew], undisturbed(recipe, size, 4))


# --- a step is a transaction


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("compression", list(COMPRESSION))
@pytest.mark.parametrize("point", ["before_exchange", "after_exchange", "before_commit"])
def test_a_step_aborted_before_its_commit_leaves_no_trace(point: str, compression: str, size: int) -> None:
    recipe = toy_recipe(norm=True, dropout=0.3 if size == 1 else 0.0, **COMPRESSION[compression], **SCHEDULE)

    def abort(crew: list[Worker]) -> None:
        for worker in crew:
            worker.at = abort_at(point, 3)
        step_all(crew)

    check_abort(recipe, size, abort, Abort)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("compression", "collective"), COLLECTIVES)
def test_a_step_aborted_inside_a_collective_leaves_no_trace(collective: int, compression: str, size: int) -> None:
    recipe = toy_recipe(norm=True, dropout=0.3 if size == 1 else 0.0, **COMPRESSION[compression], **SCHEDULE)

    def abort(crew: list[Worker]) -> None:
        together(size, lambda group: crew[group.world_rank].take(group), break_at=collective)

    check_abort(recipe, size, abort, GroupBroken)


def test_a_step_aborted_after_its_second_collective_leaves_no_trace() -> None:
    def abort(crew: list[Worker]) -> None:
        crew[0].at = abort_at("after_exchange", 3, occurrence=2)
        step_all(crew)

    check_abort(toy_recipe(norm=True, dropout=0.3, **SCHEDULE), 1, abort, Abort)


@pytest.mark.parametrize("micro_shard", [0, 2])
def test_a_task_that_raises_leaves_no_trace(micro_shard: int) -> None:
    def broken(lsn: int, at: int) -> Any:
        x, y, branch = batch_of(lsn, at)
        return (x[:, :2] if at == micro_shard else x), y, branch

    recipe = toy_recipe(norm=True, dropout=0.3, **SCHEDULE)
    worker = Worker(Blueprint(recipe))
    step_all([worker], 2)
    before, worker.batches = worker.bits(), broken
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        worker.take(solo())
    worker.batches = batch_of
    assert same(before, worker.bits())
    step_all([worker], 2)
    assert same([worker.bits()], undisturbed(recipe, 1, 4))


def test_many_aborts_in_a_row_change_nothing() -> None:
    recipe = toy_recipe(norm=True, dropout=0.2, **COMPRESSION["replicated"])
    crew = workers(recipe, 1)
    for lsn in range(1, 4):
        for point in ("before_exchange", "after_exchange", "before_commit", "before_exchange"):
            crew[0].at = abort_at(point, lsn)
            with pytest.raises(Abort):
                crew[0].take(solo())
        crew[0].take(solo())
    assert same([crew[0].bits()], undisturbed(recipe, 1, 3))


def test_the_points_are_passed_in_order() -> None:
    seen: list[tuple[str, int]] = []
    worker = Worker(Blueprint(toy_recipe()), at=lambda point, lsn: seen.append((point, lsn)))
    worker.take(solo())
    assert seen == [(p, 1) for p in ("before_exchange", "after_exchange", "before_commit", "after_commit")]


@pytest.mark.parametrize("compression", list(COMPRESSION))
def test_who_missed_a_step_that_a_peer_finished_takes_its_state_and_goes_on(compression: str) -> None:
    recipe = toy_recipe(norm=True, **COMPRESSION[compression], **SCHEDULE)
    crew = workers(recipe, 2)
    step_all(crew, 2)
    crew[1].at = abort_at("before_commit", 3)
    channel = Channel(2)
    out = in_threads([lambda r=r: crew[r].take(ThreadGroup(channel, r)) for r in range(2)])  # type: ignore[misc]
    assert isinstance(out[1], Abort) and out[0].lsn == 3
    giver, taker = crew
    assert (giver.state.lsn, taker.state.lsn) == (3, 2)
    residual = giver.exchange.residual if recipe.residual == "replicated" else None
    taker.state.load(giver.state.tensors(), 3)
    taker.exchange.adopt(3, residual)
    taker.step.align_schedule()
    step_all(crew, 2)
    assert same([worker.bits() for worker in crew], undisturbed(recipe, 2, 5))


# --- what a step leaves for the log


@pytest.mark.parametrize("compression", list(COMPRESSION))
def test_every_worker_leaves_the_same_record(compression: str) -> None:
    crew = workers(toy_recipe(norm=True, **COMPRESSION[compression], **SCHEDULE), 2)
    for _ in range(3):
        one, other = step_all(crew)
        layout = crew[0].blueprint.layout
        for shard in layout.shards:
            pair = [unpack(shard, packed(result, layout)[shard]) for result in (one, other)]
            assert payload_crc(pair[0]) == payload_crc(pair[1])
    assert same(crew[0].state.tensors(), crew[1].state.tensors())


def test_the_scalars_are_those_of_a_plain_training_loop() -> None:
    worker = Worker(Blueprint(toy_recipe(clip_norm=0.05, global_size=16)))
    worker.step.samples_per_epoch = 40
    model, task = worker.blueprint.model, worker.blueprint.task
    losses = [float(task.loss(model, batch_of(1, m)).detach()) for m in range(MICRO_SHARDS)]
    result = worker.take(solo())
    scalars = result.scalars
    assert scalars["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert scalars["clip"] == pytest.approx(0.05 / scalars["grad_norm"], rel=1e-4)
    assert np.linalg.norm(result.delta.values * result.delta.clip) == pytest.approx(0.05, rel=1e-4)  # type: ignore[union-attr]
    assert (scalars["samples"], scalars["data_epoch"], scalars["world_size"], scalars["lr"]) == (16, 0, 1, 0.01)
    seen = [worker.take(solo()).scalars for _ in range(4)]
    assert [(s["samples"], s["data_epoch"]) for s in seen] == [(32, 0), (48, 1), (64, 1), (80, 1)]
    assert result.group_epoch == 1 and result.lsn == 1


def test_no_clipping_below_the_norm() -> None:
    worker = Worker(Blueprint(toy_recipe(clip_norm=1e6)))
    assert worker.take(solo()).scalars["clip"] == 1.0


def test_the_same_bits_as_a_plain_pytorch_loop() -> None:
    worker = Worker(Blueprint(toy_recipe(optimizer="adamw", optimizer_options={"lr": 0.01, "foreach": False})))
    model = Toy().model()
    model.load_state_dict(worker.blueprint.model.state_dict())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, foreach=False)
    for lsn in range(1, 6):
        optimizer.zero_grad()
        for micro_shard in range(MICRO_SHARDS):
            (worker.blueprint.task.loss(model, batch_of(lsn, micro_shard)) / MICRO_SHARDS).backward()
        optimizer.step()
        worker.take(solo())
    assert same(model.state_dict(), worker.blueprint.model.state_dict())


def test_randomness_belongs_to_the_micro_shard_and_the_step() -> None:
    recipe = toy_recipe(dropout=0.5)
    one, other = Worker(Blueprint(recipe)), Worker(Blueprint(recipe))
    torch.manual_seed(1)
    first = one.take(solo())
    torch.manual_seed(2)
    torch.rand(100)
    assert first.delta.values.tobytes() == other.take(solo()).delta.values.tobytes()  # type: ignore[union-attr]


# --- values that are not finite


def broken_batch(lsn: int, micro_shard: int) -> Any:
    x, y, branch = batch_of(lsn, micro_shard)
    return (x * math.inf if (lsn, micro_shard) == (3, 2) else x), y, branch


def without_lsn(bits: dict[str, Any]) -> dict[str, Any]:
    return {key: bits[key] for key in ("state", "residual")}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("compression", list(COMPRESSION))
def test_a_step_with_a_gradient_that_is_not_finite_is_left_out(compression: str, size: int) -> None:
    recipe = toy_recipe(norm=True, on_nonfinite="skip", **COMPRESSION[compression])
    crew = workers(recipe, size, batches=broken_batch)
    step_all(crew, 2)
    before = [without_lsn(worker.bits()) for worker in crew]
    results = step_all(crew)
    assert all(result.delta is None and result.buffers == {} and result.lsn == 3 for result in results)
    assert same([without_lsn(worker.bits()) for worker in crew], before)
    assert [worker.state.lsn for worker in crew] == [3] * size
    assert all(result.delta is not None for result in step_all(crew))
    assert same(crew[0].state.tensors(), crew[-1].state.tensors())
    assert all(bool(torch.isfinite(t).all()) for t in crew[0].state.tensors().values())


@pytest.mark.parametrize("compression", list(COMPRESSION))
def test_a_gradient_that_is_not_finite_can_stop_the_run(compression: str) -> None:
    crew = workers(toy_recipe(norm=True, on_nonfinite="stop", **COMPRESSION[compression]), 2, batches=broken_batch)
    step_all(crew, 2)
    before = [worker.bits() for worker in crew]
    channel = Channel(2)
    out = in_threads([lambda r=r: crew[r].take(ThreadGroup(channel, r)) for r in range(2)])  # type: ignore[misc]
    for error in out:
        assert isinstance(error, RunFailed) and "step 3" in error.message and "not finite" in error.message
        assert "on_nonfinite" in error.hint
    assert same([worker.bits() for worker in crew], before)


def test_a_schedule_moves_on_over_a_step_that_was_left_out() -> None:
    recipe = toy_recipe(on_nonfinite="skip", scheduler="StepLR", scheduler_options={"step_size": 1, "gamma": 0.5})
    worker = Worker(Blueprint(recipe), batches=broken_batch)
    rates = [worker.take(solo()).hyper[0]["lr"] for _ in range(4)]
    assert rates == pytest.approx([0.01, 0.005, 0.0025, 0.00125])


# --- buffers


def test_buffers_are_the_mean_over_micro_shards_from_the_start_of_the_step() -> None:
    crew = workers(toy_recipe(norm=True), 2)
    for lsn in range(1, 4):
        start = {n: t.clone() for n, t in crew[0].step.buffers.tensors.items()}
        model = crew[0].blueprint.model
        ends = []
        for micro_shard in range(MICRO_SHARDS):
            crew[0].state.set_fixed(start)
            model.train()
            model(*batch_of(lsn, micro_shard)[::2])
            ends.append({n: t.clone() for n, t in crew[0].step.buffers.tensors.items()})
        crew[0].state.set_fixed(start)
        step_all(crew)
        for name, value in crew[0].step.buffers.tensors.items():
            assert same(value, crew[1].step.buffers.tensors[name])
            if value.is_floating_point():
                mean = torch.stack([end[name] for end in ends]).mean(0)
                torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)
            else:
                assert int(value) == int(start[name]) + 1 == lsn


def test_buffers_do_not_depend_on_the_world_size() -> None:
    one, two = workers(toy_recipe(norm=True), 1), workers(toy_recipe(norm=True), 2)
    name = "buffer/norm.num_batches_tracked"
    for lsn in range(1, 4):
        step_all(one)
        step_all(two)
        counts = [int(worker.step.buffers.tensors[name]) for worker in (*one, *two)]
        assert counts == [lsn] * 3
        if lsn == 1:  # later the parameters differ in their last bits
            for buffer in ("running_mean", "running_var"):
                values = [crew[0].step.buffers.tensors[f"buffer/norm.{buffer}"] for crew in (one, two)]
                torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-6)


class Counting(nn.Module):
    """Buffers of several types, written on some steps or micro-shards only."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("high", torch.full((), -math.inf))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("still", torch.arange(3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count(x, branch)
        return self.line(x)  # type: ignore[no-any-return]

    def count(self, x: Tensor, branch: bool) -> None:
        self.calls += 1
        self.total += 1
        if branch:
            self.seen |= True


class Counter(Toy):
    def model(self) -> nn.Module:
        return Counting()


class Highest(Counting):
    def count(self, x: Tensor, branch: bool) -> None:
        self.high.copy_(torch.maximum(self.high, x.max()))  # as an observer of ranges does


class Ranging(Toy):
    def model(self) -> nn.Module:
        return Highest()


class Rebinding(Counting):
    def count(self, x: Tensor, branch: bool) -> None:
        self.calls = self.calls + 1


class Careless(Toy):
    def model(self) -> nn.Module:
        return Rebinding()


def own_recipe(task: str, **changes: Any) -> Any:
    recipe = toy_recipe(**changes)
    return type(recipe)(**{**vars(recipe), "task": f"{__name__}:{task}"})


def test_only_changed_buffers_are_exchanged_and_logged() -> None:
    crew = workers(own_recipe("Counter"), 2)
    names = [set(step_all(crew)[0].buffers) for _ in range(3)]
    assert names == [{"buffer/calls", "buffer/total"}] * 2 + [{"buffer/calls", "buffer/total", "buffer/seen"}]
    for worker in crew:
        model = worker.blueprint.model
        assert (int(model.calls), float(model.total)) == (3, 3.0) and bool(model.seen.all())
    assert "buffer/passing" not in crew[0].state.fixed


def test_a_model_without_changing_buffers_needs_one_collective_a_step() -> None:
    group, other = solo(), solo()
    Worker(Blueprint(toy_recipe())).take(group)
    Worker(Blueprint(toy_recipe(norm=True))).take(other)
    assert (group.entered, other.entered) == (1, 2)


def test_a_buffer_that_starts_at_infinity_becomes_a_mean_of_what_was_seen() -> None:
    worker = Worker(Blueprint(own_recipe("Ranging")))
    worker.take(solo())
    wanted = np.mean([float(batch_of(1, m)[0].max()) for m in range(MICRO_SHARDS)])
    assert float(worker.blueprint.model.high) == pytest.approx(wanted, rel=1e-5)  # type: ignore[arg-type]


def test_a_buffer_that_is_bound_anew_is_part_of_the_state_too() -> None:
    worker = Worker(Blueprint(own_recipe("Careless")))
    worker.take(solo())
    assert int(worker.blueprint.model.calls) == 1  # type: ignore[arg-type]
    assert int(worker.state.tensors()["buffer/calls"]) == 1


# --- evaluation


class Ten(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.full((WIDTH,), float(index)), torch.zeros(WIDTH), 0


class Measured(Toy):
    def model(self) -> nn.Module:
        return nn.Identity()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return batch[0].mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"square": (batch[0] ** 2).mean(), "one": 1.0}


@pytest.mark.parametrize(("samples", "size"), [(10, 1), (10, 2), (7, 2), (3, 2)])
def test_evaluation_is_the_mean_over_samples_the_same_on_every_worker(samples: int, size: int) -> None:
    def job(group: ThreadGroup) -> dict[str, float]:
        blueprint = SimpleNamespace(task=Measured(), model=nn.Identity(), recipe=toy_recipe_of_three)
        return evaluate(blueprint, Ten(samples), group, torch.device("cpu"), lambda: None)  # type: ignore[arg-type]

    toy_recipe_of_three = replace(toy_recipe(), global_size=6, micro_shards=2)
    ids = np.arange(samples)
    for values in together(size, job):
        assert values == pytest.approx(
            {"loss": ids.mean(), "square": (ids**2).mean(), "one": 1.0, "samples": samples}, rel=1e-6
        )
