"""Replay: records merged shard by shard lead to the very bits of the live state, whatever the cut."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from everstep.core.errors import SettingsError, StateMismatch
from everstep.training.blueprint import Blueprint
from everstep.training.record import unpack
from everstep.training.shard_state import from_batches, to_batches
from everstep.training.state import combine_digests
from tests.unit.training.worlds import (
    WIDTH,
    Toy,
    Worker,
    batch_of,
    packed,
    same,
    solo,
    step_all,
    toy_recipe,
    uses_branch,
    whole_digest,
    whole_tensors,
    workers,
)

SPLITS = (1, 2, 3, 5)
STEPS = 7
LR = {"lr": 0.01}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", LR | {"weight_decay": 0.01}),
    "nesterov": ("sgd", LR | {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "dampened": ("sgd", LR | {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
    "adam": ("adam", LR | {"weight_decay": 0.01}),
    "amsgrad": ("adam", LR | {"amsgrad": True}),
    "adamw": ("adamw", LR),
    "rmsprop": ("torch.optim:RMSprop", LR | {"momentum": 0.5, "centered": True}),
    "adagrad": ("torch.optim:Adagrad", LR | {"lr_decay": 0.01}),
    "nadam": ("torch.optim:NAdam", LR),
    "radam": ("torch.optim:RAdam", LR),
    "adamax": ("torch.optim:Adamax", LR),
    "adadelta": ("torch.optim:Adadelta", LR),
    "rprop": ("torch.optim:Rprop", LR),
    "asgd": ("torch.optim:ASGD", LR | {"t0": 3}),
}
PLAIN: dict[str, Any] = {}
RICH: dict[str, Any] = {"task": "Grouped", "clip_norm": 0.3, "scheduler": "OneCycleLR"}


def onecycle(name: str) -> dict[str, Any]:
    """Options; where an optimizer has betas or momentum, the schedule moves them too."""
    moves = name not in ("sgd", "adagrad", "adadelta", "rprop", "asgd")
    return {"max_lr": 0.05, "total_steps": 20, "cycle_momentum": moves}


def replay_everywhere(recipe: Any, steps: int = STEPS, **more: Any) -> Worker:
    """Take live steps; replay the records on every split and compare after every step."""
    live = Worker(Blueprint(recipe), **more)
    blueprints = {split: Blueprint(type(recipe)(**{**vars(recipe), "shards": split})) for split in SPLITS}
    replicas = {split: [b.shard_state(s) for s in b.layout.shards] for split, b in blueprints.items()}
    assert {split: len(states) - 1 for split, states in replicas.items()} == {split: split for split in SPLITS}
    for lsn in range(1, steps + 1):
        result = live.take(solo())
        live.results.append(result)
        wanted = live.state.digest()
        for split, states in replicas.items():
            buffers = packed(result, blueprints[split].layout)
            for state in states:
                state.merge(unpack(state.shard, buffers[state.shard]))
            assert whole_digest(states) == wanted, f"{split} shards, step {lsn}"
    for states in replicas.values():
        assert same(whole_tensors(states), live.state.tensors())
        assert all(state.lsn == steps for state in states)
    return live


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
@pytest.mark.parametrize("setting", ["plain", "rich"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_replay_gives_the_bits_of_the_live_run(name: str, setting: str, foreach: bool) -> None:
    kind, options = OPTIMIZERS[name]
    extra = PLAIN if setting == "plain" else RICH | {"scheduler_options": onecycle(name)}
    live = replay_everywhere(toy_recipe(optimizer=kind, optimizer_options=options | {"foreach": foreach}, **extra))
    assert live.blueprint.exactness == "bitwise"
    if setting == "rich":
        assert any(result.scalars["clip"] < 1 for result in live.results)
        assert len({result.scalars["lr"] for result in live.results}) == STEPS
        moved = {json.dumps(h.get("betas") or h.get("momentum")) for r in live.results for h in r.hyper}
        assert len(moved) > 1 or not onecycle(name)["cycle_momentum"]


@pytest.mark.parametrize("residual", ["replicated", "survivor", "none"])
def test_a_sparse_log_replays(residual: str) -> None:
    replay_everywhere(toy_recipe(compressor="topk", density=0.1, residual=residual, clip_norm=0.05))


def test_a_log_with_buffers_and_dropout_replays() -> None:
    live = replay_everywhere(toy_recipe(norm=True, dropout=0.3))
    assert all(set(r.buffers) >= {"buffer/norm.running_mean", "buffer/norm.num_batches_tracked"} for r in live.results)


def test_a_log_with_skipped_steps_replays() -> None:
    def batches(lsn: int, micro_shard: int) -> Any:
        x, y, branch = batch_of(lsn, micro_shard)
        return (x * float("inf") if (lsn, micro_shard) == (3, 2) else x), y, branch

    live = replay_everywhere(toy_recipe(on_nonfinite="skip", norm=True), batches=batches)
    assert [result.delta is None for result in live.results] == [lsn == 3 for lsn in range(1, STEPS + 1)]


def test_two_workers_log_replays_and_both_hold_the_same_bits() -> None:
    crew = workers(toy_recipe(norm=True), 2)
    states = [crew[0].blueprint.shard_state(s) for s in crew[0].blueprint.layout.shards]
    for _ in range(4):
        result = step_all(crew)[1]
        for state in states:
            state.merge(unpack(state.shard, packed(result, crew[0].blueprint.layout)[state.shard]))
        assert crew[0].state.digest() == crew[1].state.digest() == whole_digest(states)


# --- None is not zero


@pytest.mark.parametrize("name", ["nesterov", "adam", "adamw", "rmsprop"])
def test_a_parameter_without_a_gradient_stands_still(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    worker = Worker(Blueprint(toy_recipe(optimizer=kind, optimizer_options=options)))
    slots = worker.blueprint.layout.slots
    for lsn in range(1, 8):
        before = {n: t.clone() for n, t in worker.state.tensors().items()}
        result = worker.take(solo())
        after = worker.state.tensors()
        idle = {slots[at].name for at in result.delta.unused}  # type: ignore[union-attr]
        assert idle == (set() if uses_branch(lsn) else {"branch.weight", "branch.bias"})
        touched = {n for n in after if n not in before or not same(before[n], after[n])}
        assert any("branch" in n for n in touched) == uses_branch(lsn)


def test_a_zero_gradient_is_not_none() -> None:
    recipe = toy_recipe(optimizer="sgd", optimizer_options={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1})
    ends = []
    for gradient in (None, 0.0):
        state = Blueprint(recipe).live_state()
        ones = {name: torch.ones_like(p) for name, p in state.params.items()}
        state.apply(ones)
        state.apply({**ones, "gain": None if gradient is None else torch.tensor(gradient)})
        ends.append({n: t.clone() for n, t in state.tensors().items()})
    differing = {n for n in ends[0] if not same(ends[0][n], ends[1][n])}
    assert differing == {"param/gain", "optimizer/gain/momentum_buffer"}


def test_frozen_and_tied_parameters_are_in_the_state_once() -> None:
    blueprint = Blueprint(toy_recipe())
    names = set(blueprint.live_state().tensors())
    assert {"param/shift", "param/second.weight"} <= names and "param/head.weight" not in names
    assert "shift" not in {slot.name for slot in blueprint.layout.slots}
    live = Worker(blueprint)
    shift = live.state.fixed["param/shift"].clone()
    live.take(solo())
    assert same(shift, live.state.fixed["param/shift"])
    assert blueprint.model.head.weight is blueprint.model.second.weight


def test_a_bf16_parameter_keeps_its_type_and_moves() -> None:
    live = Worker(Blueprint(toy_recipe()))
    before = live.state.params["scale"].detach().clone()
    live.take(solo())
    assert live.state.params["scale"].dtype == torch.bfloat16
    assert not torch.equal(before, live.state.params["scale"])


# --- the delta is what the optimizer consumed


class Greedy(Optimizer):
    """An optimizer of a user's own that uses the gradient as scratch memory, as torch's once did."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=0.5).mul_(group["lr"])
                    p.sub_(p.grad)


CONSUMERS = {
    "nesterov foreach": ("sgd", LR | {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True}),
    "nesterov for-loop": ("sgd", LR | {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": False}),
    "adam foreach": ("adam", LR | {"weight_decay": 0.1, "foreach": True, "maximize": True}),
    "adagrad foreach": ("torch.optim:Adagrad", LR | {"weight_decay": 0.1, "foreach": True, "maximize": True}),
    "rprop foreach": ("torch.optim:Rprop", LR | {"foreach": True}),
    "fused": ("adamw", LR | {"fused": True}),
    "a user's own": ("tests.unit.training.test_replay:Greedy", {"lr": 0.1}),
}


@pytest.mark.parametrize("name", list(CONSUMERS))
def test_the_logged_delta_is_the_summed_gradient_whatever_the_optimizer_does_to_it(name: str) -> None:
    kind, options = CONSUMERS[name]
    worker = Worker(Blueprint(toy_recipe(optimizer=kind, optimizer_options=options)))
    for lsn in range(1, 5):
        naive = _naive_gradient(worker, lsn)
        result = worker.take(solo())
        assert result.delta is not None
        assert result.delta.values.tobytes() == naive.numpy().tobytes(), f"step {lsn}"


def _naive_gradient(worker: Worker, lsn: int) -> torch.Tensor:
    """One backward pass a micro-shard on a copy of the parameters, summed by autograd."""
    task, model = worker.blueprint.task, Toy().model()
    model.load_state_dict(worker.blueprint.model.state_dict())
    for micro_shard in range(4):
        (task.loss(model, batch_of(lsn, micro_shard)) / 4).backward()
    params = dict(model.named_parameters())
    grads = [params[slot.name].grad for slot in worker.blueprint.layout.slots]
    shapes = [slot.stop - slot.start for slot in worker.blueprint.layout.slots]
    return torch.cat(
        [torch.zeros(n) if g is None else g.float().reshape(-1) for g, n in zip(grads, shapes, strict=True)]
    )


def test_deltas_of_the_last_steps_stay_as_they_were() -> None:
    window = 3
    worker = Worker(Blueprint(toy_recipe()), window=window)
    held = []
    for _ in range(12):
        result = worker.take(solo())
        held.append((result, result.delta.values.copy()))  # type: ignore[union-attr]
        for old, copy in held[-window - 1 :]:
            assert old.delta.values.tobytes() == copy.tobytes()  # type: ignore[union-attr]


# --- load


def reloaded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return from_batches(to_batches(tensors))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_state_goes_through_a_base_and_on_as_if_nothing_was(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    recipe = toy_recipe(optimizer=kind, optimizer_options=options, norm=True)
    live = Worker(Blueprint(recipe))
    for _ in range(4):
        live.take(solo())
    again = Worker(Blueprint(type(recipe)(**{**vars(recipe), "seed": 3})))
    with torch.no_grad():
        for param in again.blueprint.model.parameters():
            param.add_(1)
    again.state.load(reloaded(live.state.tensors()), live.state.lsn)
    again.step.align_schedule()
    assert again.state.digest() == live.state.digest() and again.state.lsn == 4
    for _ in range(3):
        live.take(solo())
        again.take(solo())
    assert same(live.bits(), again.bits())


class Counting(torch.optim.SGD):
    """A user's own optimizer, with plain numbers among its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                slot = self.state[param]
                slot["count"] = slot.get("count", 0) + 3
                slot["rate"], slot["on"], slot["empty"] = 0.1, True, torch.empty(0, 2)


def test_scalars_of_an_optimizer_survive_with_their_type() -> None:
    recipe = replace(toy_recipe(), optimizer=f"{__name__}:Counting", optimizer_options={"lr": 0.1})
    state = Blueprint(recipe).live_state()
    state.apply({name: torch.ones_like(p) for name, p in state.params.items()})
    other = Blueprint(recipe).live_state()
    other.load(reloaded(state.tensors()), 1)
    assert other.digest() == state.digest()
    got = other.optimizer.state[other.params["first.weight"]]  # type: ignore[union-attr]
    assert (got["count"], got["rate"], bool(got["on"])) == (3, 0.1, True)
    assert isinstance(got["count"], int) and isinstance(got["rate"], float)
    assert got["empty"].shape == (0, 2)


def test_a_loaded_state_shares_no_memory_with_what_it_came_from() -> None:
    one, other = Blueprint(toy_recipe()).live_state(), Blueprint(toy_recipe()).live_state()
    one.apply({name: torch.ones_like(p) for name, p in one.params.items()})
    other.load(one.tensors(), 1)
    digest = one.digest()
    other.apply({name: torch.ones_like(p) for name, p in other.params.items()})
    assert one.digest() == digest != other.digest()


def test_another_models_state_is_refused() -> None:
    state = Blueprint(toy_recipe(norm=True)).live_state()
    good = dict(state.tensors())
    name = "param/first.weight"
    with pytest.raises(StateMismatch, match=r"missing \['buffer/norm.num_batches_tracked'"):
        state.load(Blueprint(toy_recipe()).live_state().tensors(), 1)
    with pytest.raises(StateMismatch, match="unexpected"):
        state.load({**good, "param/more": torch.ones(2)}, 1)
    with pytest.raises(StateMismatch, match=r"first.weight: expected \(6, 6\)"):
        state.load({**good, name: torch.ones(WIDTH, WIDTH + 1)}, 1)
    with pytest.raises(StateMismatch, match="float64"):
        state.load({**good, name: good[name].double()}, 1)


def test_another_optimizers_state_is_refused() -> None:
    recipe = toy_recipe(optimizer="sgd", optimizer_options={"lr": 0.1, "momentum": 0.9})
    worker = Worker(Blueprint(recipe))
    worker.take(solo())
    adam = Worker(Blueprint(toy_recipe(optimizer="adam")))
    adam.take(solo())
    with pytest.raises(StateMismatch):
        adam.state.load(worker.state.tensors(), 1)


def test_a_momentum_of_another_shape_is_refused() -> None:
    worker = Worker(Blueprint(toy_recipe(optimizer="adam")))
    worker.take(solo())
    wrong = {**worker.state.tensors(), "optimizer/first.weight/exp_avg": torch.ones(2)}
    with pytest.raises(StateMismatch):
        worker.state.load(wrong, 1)


def test_steps_come_in_order() -> None:
    live = Worker(Blueprint(toy_recipe()))
    states = [live.blueprint.shard_state(s) for s in live.blueprint.layout.shards]
    first, second = (packed(live.take(solo()), live.blueprint.layout) for _ in range(2))
    for state in states:
        with pytest.raises(StateMismatch, match="step 2 cannot follow the state of step 0; expected 1"):
            state.merge(unpack(state.shard, second[state.shard]))
        state.merge(unpack(state.shard, first[state.shard]))
        with pytest.raises(StateMismatch, match="expected 2"):
            state.merge(unpack(state.shard, first[state.shard]))


# --- digests


@pytest.mark.parametrize("norm", [False, True])
def test_digests_of_shards_combine_to_the_digest_of_the_whole(norm: bool) -> None:
    for split in SPLITS:
        live = Worker(Blueprint(toy_recipe(norm=norm, shards=split)))
        live.take(solo())
        parts: dict[str, str] = {}
        for shard in live.blueprint.layout.shards:
            state = live.blueprint.shard_state(shard)
            mine = set(state.state.tensors()) | {f"param/{n}" for n in state.state.params}
            whole = live.state.tensor_digests()
            part = {n: d for n, d in whole.items() if n in mine or _owner(n) in state.state.params}
            assert not set(parts) & set(part)
            parts |= part
        assert combine_digests(parts) == live.state.digest()


def _owner(full: str) -> str:
    return full.removeprefix("optimizer/").rpartition("/")[0] if full.startswith("optimizer/") else ""


def test_a_digest_sees_one_bit_a_type_and_a_name() -> None:
    state = Blueprint(toy_recipe()).live_state()
    digest = state.digest()
    gain = state.params["gain"]
    with torch.no_grad():
        gain.copy_(torch.nextafter(gain, torch.tensor(2.0)))
    assert state.digest() != digest
    assert combine_digests({"a": "1", "b": "2"}) == combine_digests({"b": "2", "a": "1"})
    assert combine_digests({"a": "1", "b": "2"}) != combine_digests({"a": "2", "b": "1"})


@pytest.mark.parametrize("split", SPLITS)
def test_logged_digests_are_those_of_the_replicas(split: int) -> None:
    recipe = toy_recipe(shards=split, norm=True, digest_every=2)
    live = Worker(Blueprint(recipe), owned=tuple(range(split + 1)))
    states = [live.blueprint.shard_state(s) for s in live.blueprint.layout.shards]
    for lsn in range(1, 5):
        result = live.take(solo())
        assert set(result.digests) == (set(range(split + 1)) if lsn % 2 == 0 else set())
        for state in states:
            state.merge(unpack(state.shard, packed(result, live.blueprint.layout)[state.shard]))
            assert result.digests.get(state.shard, state.state.digest()) == state.state.digest()


def test_a_replica_that_is_off_is_found_at_the_next_logged_digest() -> None:
    live = Worker(Blueprint(toy_recipe(digest_every=2)), owned=(0, 1, 2))
    state = live.blueprint.shard_state(1)
    with torch.no_grad():
        next(iter(state.state.params.values())).add_(1)
    first, second = (packed(live.take(solo()), live.blueprint.layout)[1] for _ in range(2))
    state.merge(unpack(1, first))
    with pytest.raises(StateMismatch, match="shard 1: .*step 2"):
        state.merge(unpack(1, second))
    lax = live.blueprint.shard_state(1)
    lax.verify = False
    with torch.no_grad():
        next(iter(lax.state.params.values())).add_(1)
    for data in (first, second):
        lax.merge(unpack(1, data))
    assert lax.lsn == 2


# --- what a blueprint and an optimizer promise


class Generator(Toy):
    """Groups as torch's own examples write them."""

    def parameter_groups(self, model: nn.Module) -> Any:
        return [{"params": (p for p in model.parameters() if p.requires_grad), "lr": 0.5}]


def test_a_parameter_group_may_be_an_iterator() -> None:
    blueprint = Blueprint(toy_recipe(task="Toy"))
    lazy = Blueprint(type(blueprint.recipe)(**{**vars(blueprint.recipe), "task": f"{__name__}:Generator"}))
    assert lazy.layout == blueprint.layout


def test_exactness_is_stated() -> None:
    assert Blueprint(toy_recipe(optimizer="adamw")).exactness == "bitwise"
    assert Blueprint(toy_recipe(optimizer="adamw", optimizer_options=LR | {"fused": True})).exactness == "close"
    assert Blueprint(toy_recipe(optimizer=f"{__name__}:Greedy", optimizer_options={})).exactness == "close"


def test_hyper_parameters_of_each_group_are_those_of_the_task() -> None:
    worker = Worker(Blueprint(toy_recipe(task="Grouped", optimizer="adam", optimizer_options=LR)))
    hyper = worker.take(solo()).hyper
    assert [(h["lr"], h["weight_decay"]) for h in hyper] == [(0.02, 0.0), (0.01, 0)]
    assert all("params" not in h and "foreach" not in h and h["betas"] == [0.9, 0.999] for h in hyper)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"optimizer_options": {"lrr": 0.1}}, "did you mean 'lr'"),
        ({"optimizer_options": {"lr": -1.0}}, "refuses its options"),
        ({"optimizer": "torch.optim:LBFGS"}, "several times a step"),
        ({"optimizer": "torch.nn:Linear"}, "expected a torch.optim.Optimizer"),
        ({"scheduler": "StepLRR"}, "did you mean 'StepLR'"),
        ({"scheduler": "ReduceLROnPlateau"}, "depends on measured losses"),
        ({"scheduler": "StepLR", "scheduler_options": {"gama": 1}}, "refuses its options"),
    ],
)
def test_what_cannot_be_used_is_refused_with_advice(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        Worker(Blueprint(toy_recipe(**changes)))


def test_a_schedule_is_a_function_of_the_step() -> None:
    recipe = toy_recipe(task="Grouped", scheduler="OneCycleLR", scheduler_options=onecycle("adamw"))
    live = Worker(Blueprint(recipe))
    for _ in range(5):
        live.take(solo())
    late = Worker(Blueprint(recipe))
    late.state.load(live.state.tensors(), 5)
    late.step.align_schedule()
    assert same(live.bits()["groups"], late.bits()["groups"])
    live.step.align_schedule()
    assert same(live.bits()["groups"], late.bits()["groups"])
