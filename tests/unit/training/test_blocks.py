"""A step taken block by block has the bits of the step over whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.training import blocks
from everstep.training.optimizer import build_optimizer, hyper_parameters
from everstep.training.state import TrainState
from tests.unit.training.test_replay import LR, OPTIMIZERS, RICH, onecycle, replay_everywhere
from tests.unit.training.worlds import same, toy_recipe

SHAPES = {"one": (1,), "none": (), "short": (63,), "exact": (128,), "odd": (7, 29), "long": (1003,), "late": (300,)}
STATELESS = ("sgd",)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 64)


def state_of(kind: str, options: dict[str, Any]) -> TrainState:
    draw = torch.Generator().manual_seed(1)
    params = {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}
    params["half"] = nn.Parameter(torch.randn(200, generator=draw).bfloat16())
    groups = [{"params": list(params.values())[:4]}, {"params": list(params.values())[4:], "lr": 0.03}]
    return TrainState(params, {}, build_optimizer(kind, options, groups))


def gradients(state: TrainState, step: int) -> dict[str, Tensor | None]:
    draw = torch.Generator().manual_seed(step)
    out: dict[str, Tensor | None] = {n: torch.randn(p.shape, generator=draw) for n, p in state.params.items()}
    if step % 3 == 0:
        out["long"] = None
    if step < 4:
        out["late"] = None
    return out


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_blocks_give_the_bits_of_whole_tensors(name: str, threads: int) -> None:
    kind, options = OPTIMIZERS[name]
    whole, cut = state_of(kind, options), state_of(kind, options)
    assert whole.optimizer is not None
    used = set()
    torch.set_num_threads(threads)
    try:
        for step in range(1, 8):
            for group in whole.optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9
            given = gradients(whole, step)
            whole.apply(given)
            cut.replay(step, given, hyper_parameters(whole.optimizer))
            used.add(cut._blocks is not None)
            assert same(dict(cut.tensors()), dict(whole.tensors())), f"step {step}"
    finally:
        torch.set_num_threads(1)
    assert (True in used) == (name not in STATELESS)
    assert all(param.grad is None for param in cut.params.values())


def test_foreach_and_fused_forms_are_taken_whole() -> None:
    for options in (LR | {"foreach": True}, LR | {"fused": True}):
        state = state_of("adamw", options)
        for step in (1, 2, 3):
            state.replay(step, gradients(state, step), hyper_parameters(state.optimizer))  # type: ignore[arg-type]
            assert state._blocks is None


def test_gradients_are_only_read() -> None:
    state = state_of("adamw", LR)
    for step in (1, 2, 3):
        given = gradients(state, step)
        before = {name: None if g is None else g.clone() for name, g in given.items()}
        state.replay(step, given, hyper_parameters(state.optimizer))  # type: ignore[arg-type]
        assert all(g is None or same(g, before[name]) for name, g in given.items())


def test_a_state_that_is_loaded_or_stepped_otherwise_between_is_the_one_that_goes_on() -> None:
    one, other = state_of("adam", LR), state_of("adam", LR)
    hyper = hyper_parameters(one.optimizer)  # type: ignore[arg-type]
    for step in (1, 2, 3, 4, 5, 6):
        given = gradients(one, step)
        one.apply(given)
        if step == 3:
            other.load(one.tensors(), 3)
        elif step == 5:
            other.apply(given)
            other.lsn = 5
        else:
            other.replay(step, given, hyper)
        assert same(dict(other.tensors()), dict(one.tensors())), f"step {step}"


@pytest.mark.parametrize("name", ["adamw", "nesterov", "asgd"])
def test_a_log_replays_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 32)
    kind, options = OPTIMIZERS[name]
    replay_everywhere(toy_recipe(optimizer=kind, optimizer_options=options, **RICH, scheduler_options=onecycle(name)))
    replay_everywhere(toy_recipe(optimizer=kind, optimizer_options=options, compressor="topk", density=0.1))
