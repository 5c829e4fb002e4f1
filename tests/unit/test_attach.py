"""Library mode without Ray: what a loop's steps become in the log replays to the loop's own bits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import everstep
from everstep.actors.log import Log
from everstep.actors.log_words import Opened, Progress
from everstep.actors.moving import to_arrays
from everstep.core.errors import EverstepError, SettingsError, StateMismatch, TaskError
from everstep.platform.settings import from_dict
from everstep.tasks.described import NAME, Described, check_same
from everstep.training.blueprint import Blueprint
from everstep.training.generators import captured, undisturbed
from everstep.training.live import LiveModel
from everstep.training.ranks import Ranks
from everstep.training.recipe import Recipe
from everstep.training.record import StepResult, pack, unpack
from everstep.training.state import combine_digests
from tests.unit.training.worlds import Net, batch_of

Make = Callable[[nn.Module], Optimizer]


class Own(Optimizer):
    """Somebody's own: sign descent."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad.sign(), alpha=-group["lr"])


def grouped(model: nn.Module) -> Optimizer:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    slow = [p for n, p in named if n.startswith(("branch", "gain"))]
    rest = [p for n, p in named if not n.startswith(("branch", "gain"))]
    return torch.optim.AdamW([{"params": rest}, {"params": slow, "lr": 0.001, "weight_decay": 0.0}], lr=0.01)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda m: torch.optim.SGD(trainable(m), lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "foreach": lambda m: torch.optim.SGD(trainable(m), lr=0.02, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda m: torch.optim.Adam(trainable(m), lr=0.01, amsgrad=True),
    "adamw-groups": grouped,
    "named": lambda m: torch.optim.AdamW([(n, p) for n, p in m.named_parameters() if p.requires_grad], lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(trainable(m), lr=0.01, centered=True),
    "own": lambda m: Own(trainable(m)),
}


class Replay:
    """In the place of keeper and checkpoint actors: merges each record at once, in states made from the description."""

    def __init__(self, live: LiveModel, shards: int) -> None:
        name, options = live.optimizer_options()
        plain = json.loads(json.dumps({"task": live.description(), "optimizer": options}))
        with undisturbed():
            self.blueprint = Blueprint(
                Recipe(NAME, plain["task"], shards=shards, optimizer=name, optimizer_options=plain["optimizer"])
            )
        assert self.blueprint.layout == live.layout
        self.states = [self.blueprint.shard_state(shard) for shard in live.layout.shards]
        for state in self.states:
            state.state.load({n: t for n, t in live.state.tensors().items() if state.state.owns(n)}, 0)
        self.progress, self.failure = Progress(), None
        self.records: list[dict[int, pa.RecordBatch]] = []

    def offer(self, result: StepResult) -> None:
        layout = self.blueprint.layout
        self.records.append({s: unpack(s, pack(result, layout, s)) for s in layout.shards})
        for shard, batch in self.records[-1].items():
            self.states[shard].merge(batch)

    def digest(self) -> str:
        return combine_digests({n: d for state in self.states for n, d in state.state.tensor_digests().items()})

    def hyper(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.records[-1][1].column("hyper")[0].as_py())[0]
        return found

    def state(self) -> tuple[int, dict[str, Any]]:
        return self.states[0].lsn, to_arrays({n: t for s in self.states for n, t in s.state.tensors().items()})

    def arrived(self, lsn: int, timeout_s: float) -> bool:
        return True

    def release(self, *, end: bool) -> int:
        return 0

    def check(self) -> None: ...

    def stop(self) -> None: ...


class Loop:
    """A loop with everything in it that replay could stumble over."""

    def __init__(self, make: Make, *, shards: int = 3, replay: Replay | None = None, schedule: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Net(norm=True, dropout=0.3)
        self.optimizer = make(self.model)
        self.scheduler: LRScheduler | None = None
        if schedule:
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.live = LiveModel(self.model, self.optimizer, shards=shards, window=2)
        self.link = replay or Replay(self.live, shards)
        settings = from_dict({"run": {"name": "r", "digest_every": 2}, "task": {"name": NAME}})
        self.log = Log(
            self.live, self.link, Opened(1, self.link.states[0].lsn, replay is None, "bitwise"), Ranks(0, 1),  # type: ignore[arg-type]
            scheduler=self.scheduler, settings=settings, own=False,
        )  # fmt: skip

    def backward(self) -> None:
        x, y, branch = batch_of(self.log.lsn + 1, 0)
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x, branch), y).backward()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.log.step(0.5, cursor={"at": self.log.lsn + 1}, rng=True)


@pytest.fixture(autouse=True)
def _loops_end() -> Iterator[None]:
    with undisturbed():
        yield


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_replays_to_the_live_bits(name: str) -> None:
    loop = Loop(OPTIMIZERS[name])
    for _ in range(7):
        loop.steps(1)
        assert loop.link.digest() == loop.live.digest()
    assert any(r[1].column("digest")[0].as_py() for r in loop.link.records) == (name != "own")


@pytest.mark.parametrize("name", ["momentum", "adamw-groups", "named"])
def test_a_restored_loop_goes_on_with_the_same_bits(name: str) -> None:
    through, broken = Loop(OPTIMIZERS[name], schedule=True), Loop(OPTIMIZERS[name], schedule=True)
    torch.manual_seed(5)
    through.steps(9)
    torch.manual_seed(5)
    broken.steps(4)

    again = Loop(OPTIMIZERS[name], replay=broken.link, schedule=True)
    state = again.log.restore()
    assert state is not None and (state.step, state.cursor, state.exactness) == (4, {"at": 4}, "bitwise")
    again.steps(5)
    assert again.live.digest() == through.live.digest()


def test_hyper_parameters_are_those_of_the_step_whenever_the_schedule_moves() -> None:
    after = Loop(OPTIMIZERS["adam"], schedule=True)
    after.steps(3)
    assert after.link.hyper()["lr"] == pytest.approx(0.01 * 0.9**2)

    instead = Loop(OPTIMIZERS["adam"], schedule=True)
    for _ in range(3):
        instead.backward()
        instead.log.step(cursor=1, rng=True)
        assert instead.scheduler is not None
        instead.scheduler.step()
    assert instead.link.hyper() == after.link.hyper()

    for old in (after, instead):
        again = Loop(OPTIMIZERS["adam"], replay=old.link, schedule=True)
        again.log.restore()
        assert again.optimizer.param_groups[0]["lr"] == old.optimizer.param_groups[0]["lr"]


def test_rates_set_by_hand_come_back() -> None:
    loop = Loop(OPTIMIZERS["adam"])
    loop.steps(1)
    loop.optimizer.param_groups[0]["lr"] = 0.5
    loop.steps(1)
    again = Loop(OPTIMIZERS["adam"], replay=loop.link)
    assert again.log.restore() is not None
    loop.backward()
    loop.optimizer.step()
    loop.optimizer.param_groups[0]["lr"] = 0.25  # between the step and its record
    loop.log.step()
    assert loop.link.hyper()["lr"] == 0.5
    again = Loop(OPTIMIZERS["adam"], replay=loop.link)
    state = again.log.restore()
    assert state is not None and state.exactness == "warm" and "no rng" in state.reason
    assert again.optimizer.param_groups[0]["lr"] == 0.25


def test_a_skipped_step_changes_buffers_only() -> None:
    loop = Loop(OPTIMIZERS["adamw-groups"])
    loop.steps(2)
    before = {n: t.clone() for n, t in loop.live.state.tensors().items()}
    loop.backward()
    loop.log.step(skipped=True)
    assert loop.link.records[-1][1].column("skipped")[0].as_py() and loop.log.lsn == 3
    changed = {n for n, t in loop.live.state.tensors().items() if not torch.equal(t, before[n])}
    assert changed == {f"buffer/norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")} | {
        "note/cursor",
        "note/rng",
    }
    loop.steps(1)
    assert loop.link.digest() == loop.live.digest()


def test_a_loss_scaler_that_leaves_the_first_step_out() -> None:
    loop, scaler = Loop(OPTIMIZERS["adam"]), torch.amp.GradScaler("cpu")
    loop.backward()
    loop.live.params[0].grad.fill_(torch.inf)  # type: ignore[union-attr]
    scaler.scale(torch.ones(1))
    scaler.step(loop.optimizer)
    scaler.update()
    with pytest.raises(SettingsError, match=r"skipped=True"):
        loop.log.step()
    loop.log.step(skipped=True)
    loop.steps(1)
    assert loop.link.digest() == loop.live.digest() and loop.log.lsn == 2


def test_what_a_loop_does_wrong_is_said() -> None:
    loop = Loop(OPTIMIZERS["adam"])
    loop.steps(1)
    with pytest.raises(SettingsError, match="optimizer.step\\(\\) was not called"):
        loop.log.step()
    with pytest.raises(SettingsError, match="closure"):
        loop.optimizer.step(lambda: 0.0)
    with pytest.raises(SettingsError, match="JSON"):
        loop.backward()
        loop.optimizer.step()
        loop.log.step(cursor=object())
    loop.log.step(cursor=1)
    assert loop.link.digest() == loop.live.digest() and loop.log.lsn == 2
    loop = Loop(OPTIMIZERS["adam"])
    loop.backward()
    loop.optimizer.step()
    with pytest.raises(SettingsError, match="after step 1, which was not logged"):
        loop.optimizer.step()
    with pytest.raises(SettingsError, match=r"close\(\) after step 1"):
        loop.log.close()


def test_a_program_that_does_not_restore_is_stopped() -> None:
    loop = Loop(OPTIMIZERS["adam"])
    loop.steps(2)
    again = Loop(OPTIMIZERS["adam"], replay=loop.link)
    again.backward()
    with pytest.raises(SettingsError, match=r"call log\.restore\(\)"):
        again.log.step()


def test_a_change_outside_the_optimizer_is_found_by_the_next_digest() -> None:
    loop = Loop(OPTIMIZERS["adam"])
    loop.steps(2)
    with torch.no_grad():
        loop.live.params[0].clamp_(-0.01, 0.01)
    with pytest.raises(StateMismatch, match="step 4 replays to"):
        loop.steps(2)


class Sharded(nn.Linear):
    """Looks like FSDP's."""


Sharded.__name__ = "FullyShardedDataParallel"


@pytest.mark.parametrize(
    ("model", "make", "says"),
    [
        (nn.Sequential(Sharded(2, 2)), lambda m: torch.optim.SGD(m.parameters()), "FSDP/DTensor"),
        (nn.Linear(2, 2), lambda m: torch.optim.SGD([m.weight]), "missing from the optimizer: bias"),
        (nn.Linear(2, 2), lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.ones(3))]), "not the model's"),
        (nn.Embedding(2, 2, sparse=True), lambda m: torch.optim.SGD(m.parameters()), "sparse gradients"),
        (nn.Linear(2, 2), lambda m: torch.optim.LBFGS(m.parameters()), "several times a step"),
        (nn.Linear(2, 2), lambda m: type("Local", (Own,), {"__qualname__": "f.Local"})(m.parameters()), "be imported"),
        (nn.Linear(2, 2), lambda m: torch.optim.SGD([{"params": list(m.parameters()), "f": print}]), "'f' is a"),
    ],
)
def test_what_cannot_be_logged_is_refused_by_name(model: nn.Module, make: Make, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        live = LiveModel(model, make(model), shards=1, window=1)
        live.optimizer_options()
        live.description()


@pytest.mark.parametrize(
    ("dtype", "make", "says"),
    [
        (torch.float32, lambda m: torch.optim.AdamW(m.parameters(), fused=True), "fused"),
        (torch.float64, lambda m: torch.optim.AdamW(m.parameters()), "float64"),
        (torch.float32, lambda m: Own(m.parameters()), "nothing is known of how"),
        (torch.float32, lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1), foreach=False), "tensor"),
    ],
)
def test_what_replays_only_closely_is_said(dtype: torch.dtype, make: Make, says: str) -> None:
    model = nn.Linear(2, 2, dtype=dtype)
    live = LiveModel(model, make(model), shards=1, window=1)
    exactness, reason = live.replay()
    assert exactness == "close" and says in reason
    assert Described(**live.description()).replay == "close"


def test_another_model_is_refused_with_what_differs() -> None:
    def described(*sizes: int) -> dict[str, Any]:
        model = nn.Sequential(*(nn.Linear(2, size) for size in sizes))
        return LiveModel(model, torch.optim.SGD(model.parameters()), shards=1, window=1).description()

    check_same("r", described(2, 3), json.loads(json.dumps(described(2, 3))))
    with pytest.raises(SettingsError, match=r"1\.weight: float32 \(3, 2\) in group 0, now float32 \(4, 2\)"):
        check_same("r", described(2, 3), described(2, 4))
    with pytest.raises(SettingsError, match=r"1\.weight is missing now; 1\.bias is missing now"):
        check_same("r", described(2, 3), described(2))


def test_a_described_model_cannot_be_trained() -> None:
    task = Described([["w", "float32", [2], 0]], [], [{"lr": 0.1}], (), "bitwise")
    with pytest.raises(TaskError, match="loop of its own"):
        task.dataset("train")


def test_generators_come_back() -> None:
    def draw() -> tuple[float, float, float]:
        return random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))

    draw()
    state = json.loads(json.dumps(captured()))
    first = draw()
    from everstep.training.generators import put_back

    put_back(state)
    assert draw() == first


def test_attach_refuses_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"store": "memory:"}, "lives in one process"),
        ({"max_lag": 3.0}, r"checkpoint\.max_lag: unknown key"),
        ({"actors": 0}, "then there is no log"),
        ({"run": "no/name"}, r"run\.name"),
        ({"scheduler": plateau}, "ReduceLROnPlateau"),
    ]
    for changes, says in cases:
        with pytest.raises(EverstepError, match=says):
            everstep.attach(model, optimizer, **{"run": "r", **changes})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="init_process_group"):
        everstep.attach(model, optimizer, run="r")
