"""`determinism = "bitwise"`: the same bits at any world size and over any resize, in real processes over gloo."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from everstep.actors.process_group import ProcessGroup
from everstep.core.errors import EpochOver, GroupBroken
from everstep.training.blueprint import Blueprint
from everstep.training.train_step import TrainStep
from tests.unit.training.bitwise_peer import serve
from tests.unit.training.worlds import (
    WIDTH,
    Toy,
    Worker,
    batch_of,
    in_threads,
    same,
    solo,
    step_all,
    together,
    toy_recipe,
    workers,
)

STEPS = 6
SHARDS = 7  # micro-shards: a tree that no world size cuts evenly
SCHEDULE = {"scheduler": "OneCycleLR", "scheduler_options": {"max_lr": 0.1, "total_steps": 30}, "clip_norm": 0.5}
JOB = {"norm": True, "dropout": 0.3, "micro_shards": SHARDS, **SCHEDULE}
COMPRESSION: dict[str, dict[str, Any]] = {
    "none": {},
    "topk": {"compressor": "topk", "density": 0.1, "residual": "replicated"},
}


class Crew:
    """Four processes, some of which take steps."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder, self.formed = folder, 0
        self.pipes, self.processes = [], []
        for _ in range(4):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=serve, args=(theirs,), daemon=True))
            self.processes[-1].start()
            self.pipes.append(ours)

    def ask(self, places: list[int], *calls: tuple[Any, ...]) -> list[Any]:
        """Send one call to each place, or the same to all; return the answers."""
        for place, call in zip(places, calls if len(calls) > 1 else calls * len(places), strict=True):
            self.pipes[place].send_bytes(pickle.dumps(call))
        answers = []
        for place in places:
            assert self.pipes[place].poll(100), f"process {place} does not answer"
            answers.append(pickle.loads(self.pipes[place].recv_bytes()))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def steps(self, places: list[int], count: int) -> list[dict[str, Any]]:
        """Take steps in a new group of these processes; return what each step left, the same on all of them."""
        self.formed += 1
        store, size = str(self.folder / f"store-{self.formed}"), len(places)
        calls = [("steps", store, rank, size, count) for rank in range(size)]
        first, *others = self.ask(places, *calls)
        assert all(other == first for other in others)
        return first  # type: ignore[no-any-return]

    def run(self, world_sizes: list[int], **changes: Any) -> list[dict[str, Any]]:
        """Take one step at each of these world sizes; newcomers get the state of a survivor, as at a border."""
        self.ask([0, 1, 2, 3], ("build", {**JOB, **changes}))
        out, before = [], world_sizes[0]
        for size, steps in itertools.groupby(world_sizes):
            if size > before:
                (given,) = self.ask([before - 1], ("give",))
                self.ask([*range(before, size)], ("take", given))
            out += self.steps([*range(size)], len([*steps]))
            before = size
        return out

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps(None))
        for process in self.processes:
            process.join(10)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        made = Crew(tmp_path_factory.mktemp("gloo"))
        yield made
        made.close()


# --- whole runs


@pytest.mark.timeout(200)  # processes start and poll, perhaps on a busy machine
@pytest.mark.parametrize("compression", list(COMPRESSION))
def test_the_same_bits_at_any_world_size_and_over_any_resize(crew: Crew, compression: str) -> None:
    options = {"determinism": "bitwise", **COMPRESSION[compression]}
    alone = crew.run([1] * STEPS, **options)
    assert [left["lsn"] for left in alone] == [*range(1, STEPS + 1)]
    assert len({left["state"] for left in alone}) == STEPS and any(left["scalars"]["clip"] < 1 for left in alone)
    assert any(left["unused"] for left in alone)
    for sizes in ([2] * STEPS, [3] * STEPS, [4] * STEPS, [1, 3, 4, 2, 1, 4], [4, 3, 2, 1, 2, 3]):
        assert crew.run(sizes, **options) == alone, sizes


@pytest.mark.timeout(200)
@pytest.mark.parametrize("compression", list(COMPRESSION))
def test_under_step_determinism_the_world_size_shows(crew: Crew, compression: str) -> None:
    alone, three = (crew.run([size] * STEPS, **COMPRESSION[compression])[-1] for size in (1, 3))
    assert alone["state"] != three["state"]
    assert alone["scalars"]["loss"] == pytest.approx(three["scalars"]["loss"], rel=1e-2)


def test_a_step_is_the_naive_sum_along_the_tree() -> None:
    recipe = toy_recipe(determinism="bitwise", **{**JOB, "scheduler": None, "scheduler_options": {}, "dropout": 0.0})
    worker, twin = Worker(Blueprint(recipe)), Blueprint(recipe)
    model = twin.model
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = torch.optim.AdamW(params.values(), lr=0.01, foreach=False)
    buffers = dict(model.named_buffers())

    def one(lsn: int, micro_shard: int, start: dict[str, Tensor]) -> list[Tensor]:
        for name, buffer in buffers.items():
            buffer.copy_(start[name])
        optimizer.zero_grad()
        (twin.task.loss(model, batch_of(lsn, micro_shard)) / SHARDS).backward()
        grads = [torch.zeros(p.shape) if p.grad is None else p.grad.float().clone() for p in params.values()]
        return grads + [buffers[name].clone() for name in ("norm.running_mean", "norm.running_var")]

    def along(low: int, high: int, parts: list[list[Tensor]]) -> list[Tensor]:
        if high - low == 1:
            return parts[low]
        middle = (low + high) // 2
        halves = along(low, middle, parts), along(middle, high, parts)
        return [left + right for left, right in zip(*halves, strict=True)]

    for lsn in (1, 2, 3):
        start = {name: buffer.clone() for name, buffer in buffers.items()}
        total = along(0, SHARDS, [one(lsn, micro_shard, start) for micro_shard in range(SHARDS)])
        norm = torch.linalg.vector_norm(torch.cat([grad.reshape(-1) for grad in total[:-2]]))
        clip = min(1.0, 0.5 / (float(norm) + 1e-6))
        for (name, param), grad in zip(params.items(), total, strict=False):
            idle = name.startswith("branch") and lsn % 3
            param.grad = None if idle else (grad * clip).to(param.dtype)
        optimizer.step()
        buffers["norm.running_mean"].copy_(total[-2] / SHARDS)
        buffers["norm.running_var"].copy_(total[-1] / SHARDS)
        buffers["norm.num_batches_tracked"].copy_(start["norm.num_batches_tracked"] + 1)
        worker.take(solo())
    assert same(worker.blueprint.model.state_dict(), model.state_dict())


# --- buffers


class Picky(nn.Module):
    """Buffers that only some micro-shards change: the batch tells which one is at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("late", torch.linspace(1, 2, 5))  # changed from micro-shard 3 on
        self.register_buffer("flag", torch.tensor([1, 2], dtype=torch.int16))  # changed by all but micro-shard 0
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rough", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("still", torch.full((2,), 0.1))

    def forward(self, x: Tensor, micro_shard: int) -> Tensor:
        self.count += 1 + micro_shard
        self.total += 1
        self.rough += 0.25
        if micro_shard:
            self.flag += micro_shard
        if micro_shard >= 3:
            self.late += torch.linspace(0, 1, 5) * micro_shard
        return self.line(x)  # type: ignore[no-any-return]


class Picking(Toy):
    def model(self) -> nn.Module:
        return Picky()


def numbered(lsn: int, micro_shard: int) -> Any:
    return *batch_of(lsn, micro_shard)[:2], micro_shard


@pytest.mark.parametrize("determinism", ["step", "bitwise"])
def test_buffers_that_some_micro_shards_change_are_the_same_at_any_world_size(determinism: str) -> None:
    recipe = toy_recipe(determinism=determinism, micro_shards=5)
    recipe = type(recipe)(**{**vars(recipe), "task": f"{__name__}:Picking"})
    crews = [workers(recipe, size, batches=numbered) for size in range(1, 6)]
    for lsn in (1, 2, 3):
        changed = [set(step_all(crew)[0].buffers) for crew in crews]
        assert all(names == {f"buffer/{n}" for n in ("late", "count", "rough", "total")} for names in changed)
        for crew in crews:
            other = crews[0][0] if determinism == "bitwise" else crew[0]
            assert all(same(worker.state.tensors(), other.state.tensors()) for worker in crew)
        for crew in crews:
            check_picky(crew[0].blueprint.model, lsn)


def check_picky(model: Any, lsn: int) -> None:
    assert model.flag.tolist() == [1, 2]  # micro-shard 0 left it alone
    assert (int(model.count), float(model.total)) == (lsn, lsn)
    wanted = torch.linspace(1, 2, 5) + lsn * torch.linspace(0, 1, 5) * (3 + 4) / 5
    torch.testing.assert_close(model.late, wanted)
    assert model.rough.tolist() == [1 + 0.25 * lsn] * 3


# --- what a step costs, and what travels with it


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_bytes_of_a_step_are_those_that_were_sent(size: int) -> None:
    crew = workers(toy_recipe(determinism="bitwise", norm=True, micro_shards=SHARDS), size)

    def job(group: Any) -> int:
        crew[group.world_rank].take(group)
        assert group.entered == 4
        return int(group.sent)

    sent = together(size, job)
    assert {worker.step.network_bytes for worker in crew} == {4 * sum(sent)}


def test_counts_by_worker_arrive_summed() -> None:
    crew = workers(toy_recipe(determinism="bitwise", micro_shards=SHARDS), 3)

    def job(group: Any) -> Tensor:
        step: TrainStep = crew[group.world_rank].step
        mine = [range(0, 2), range(2, 4), range(4, 7)][group.world_rank]
        batches = [batch_of(1, micro_shard) for micro_shard in mine]
        lags = {group.world_rank: 5 + group.world_rank}
        return step.run(batches, mine, group, 1, lags=lags, stop=group.world_rank == 1, owned=())[1]

    for tail in together(3, job):
        names = crew[0].step.tail
        assert tail[names.lag].tolist() == [5, 6, 7] and float(tail[names.stop]) == 1 and float(tail[names.broken]) == 0


def test_a_residual_of_ones_own_is_not_for_bitwise() -> None:
    worker = Worker(Blueprint(toy_recipe(determinism="bitwise", compressor="topk", density=0.1, residual="survivor")))
    with pytest.raises(AssertionError):  # the settings refuse it by name
        worker.take(solo())


# --- all-to-all as a collective: waits are polled


def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[list[ProcessGroup], list[threading.Event]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, over = dist.HashStore(), [threading.Event(), threading.Event()]
    make = [lambda r=r: ProcessGroup(store, 1, r, 2, torch.device("cpu"), over[r]) for r in range(2)]  # type: ignore[misc]
    return in_threads(make), over


def send(group: ProcessGroup, length: int = 3) -> Tensor:
    """Send `length` elements to ourselves and one more to the other."""
    outgoing = [length, length + 1] if group.world_rank == 0 else [length + 1, length]
    values = torch.arange(2 * length + 1, dtype=torch.float32) + 100 * group.world_rank
    return group.all_to_all(values, outgoing, outgoing)


def test_all_to_all_brings_everybody_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, _ = pair(monkeypatch)
    one, other = in_threads([lambda group=group: send(group) for group in groups])  # type: ignore[misc]
    assert one.tolist() == [0, 1, 2, 100, 101, 102, 103] and other.tolist() == [3, 4, 5, 6, 104, 105, 106]


def test_a_silent_peer_does_not_hold_us_once_the_epoch_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, over = pair(monkeypatch)

    def give_up() -> None:
        time.sleep(0.2)
        over[0].set()

    timer = threading.Thread(target=give_up)
    timer.start()
    with pytest.raises(EpochOver):
        send(groups[0], 100_000)
    timer.join()
    with pytest.raises(GroupBroken, match="left its group"):
        send(groups[0])
    assert send(groups[1], 100_000).numel() == 200_001  # a stopped peer that wakes may still finish it


def test_a_peer_that_leaves_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, _ = pair(monkeypatch)
    groups[1].close()
    with pytest.raises(GroupBroken):
        send(groups[0], 100_000)
