"""What the tests of this room share: a small awkward task, groups of threads, and workers that take steps in them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everstep.core.errors import GroupBroken
from everstep.training.blueprint import Blueprint
from everstep.training.exchange import Exchange, Tail
from everstep.training.layout import Layout
from everstep.training.recipe import Recipe
from everstep.training.record import StepResult, pack
from everstep.training.shard_state import ShardState
from everstep.training.state import combine_digests
from everstep.training.train_step import TrainStep

torch.set_num_threads(1)

WIDTH = 6
MICRO_SHARDS = 4
HERE = "tests.unit.training.worlds"


class Net(nn.Module):
    """Everything that replay could stumble over: tied, frozen, bf16 and sometimes unused parameters."""

    def __init__(self, norm: bool, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.branch = nn.Linear(WIDTH, WIDTH)  # used on some steps only
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.bfloat16))
        self.shift = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.second.weight
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = self.drop(torch.tanh(self.norm(self.first(x))))
        if branch:
            x = x + self.branch(x)
        x = self.second(x) * self.scale.float() + self.shift
        return self.head(torch.tanh(x)) * self.gain


class Toy:
    """A regression whose batches are (inputs, targets, whether the branch is used)."""

    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        self.norm, self.dropout = norm, dropout

    def model(self) -> nn.Module:
        return Net(self.norm, self.dropout)

    def dataset(self, split: str) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y, branch = batch
        return F.mse_loss(model(x, branch), y)


class Grouped(Toy):
    """Two groups, in another order than the model's own."""

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        params = dict(model.named_parameters())
        late = [p for n, p in params.items() if n.startswith(("branch", "gain"))]
        rest = [p for n, p in params.items() if p.requires_grad and not n.startswith(("branch", "gain"))]
        return [{"params": late, "lr": 0.02, "weight_decay": 0.0}, {"params": rest}]


def uses_branch(lsn: int) -> bool:
    return lsn % 3 == 0


def batch_of(lsn: int, micro_shard: int) -> Any:
    draw = torch.Generator().manual_seed(1000 * lsn + micro_shard)
    x = torch.randn(4, WIDTH, generator=draw)
    return x, torch.randn(4, WIDTH, generator=draw), uses_branch(lsn)


def toy_recipe(task: str = "Toy", **changes: Any) -> Recipe:
    options = {k: changes.pop(k) for k in ("norm", "dropout") if k in changes}
    given = {"optimizer": "adamw", "optimizer_options": {"lr": 0.01}, "micro_shards": MICRO_SHARDS, "seed": 3}
    return Recipe(**{"task": f"{HERE}:{task}", "task_options": options, **given, **changes})


class Channel:
    """Where the members of one formation meet: each brings a tensor, all leave with everybody's."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.brought: list[list[Tensor]] = [[]] * size


class Ended:
    """An operation that has ended already."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class ThreadGroup:
    """A member of a group of threads: sums in the order of world ranks, so with the same bits on each.

    `break_at` is the number (from 1) of the collective that raises instead. `sent` counts the elements that this member
    sends to others by all-to-all and all-gather.
    """

    def __init__(self, channel: Channel, world_rank: int, break_at: int | None = None) -> None:
        self.channel, self.world_rank, self.break_at = channel, world_rank, break_at
        self.world_size = channel.barrier.parties
        self.entered = self.sent = 0

    def all_reduce(self, tensor: Tensor) -> None:
        parts = self.all_gather(tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        tensor.copy_(total)

    def begin_all_reduce(self, tensor: Tensor) -> Ended:
        self.all_reduce(tensor)
        return Ended()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.sent += (self.world_size - 1) * tensor.numel()
        return [tensor for (tensor,) in self.meet([tensor])]

    def all_to_all(self, tensor: Tensor, outgoing: Sequence[int], incoming: Sequence[int]) -> Tensor:
        assert sum(outgoing) == tensor.numel()
        self.sent += tensor.numel() - outgoing[self.world_rank]
        parts = [each[self.world_rank] for each in self.meet(list(torch.split(tensor, list(outgoing))))]
        assert [part.numel() for part in parts] == list(incoming)
        return torch.cat(parts)

    def meet(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """Return copies of what every member brought, by world rank."""
        self.entered += 1
        if self.entered == self.break_at:
            self.channel.barrier.abort()
            raise GroupBroken("a peer is gone")
        try:
            self.channel.brought[self.world_rank] = [tensor.clone() for tensor in tensors]
            self.channel.barrier.wait()
            parts = [[tensor.clone() for tensor in brought] for brought in self.channel.brought]
            self.channel.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise GroupBroken("a collective failed") from error
        return parts


def solo(break_at: int | None = None) -> ThreadGroup:
    return ThreadGroup(Channel(1), 0, break_at)


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run every job in a thread of its own; return what each returned or raised."""
    out: list[Any] = [None] * len(jobs)

    def run(place: int) -> None:
        try:
            out[place] = jobs[place]()
        except BaseException as error:
            out[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def together(size: int, job: Callable[[ThreadGroup], Any], break_at: int | None = None) -> list[Any]:
    """Run `job` on every member of one new formation; raise what one of them raised."""
    channel = Channel(size)
    groups = [ThreadGroup(channel, rank, break_at) for rank in range(size)]

    def member(group: ThreadGroup) -> Any:
        try:
            return job(group)
        except BaseException:
            channel.barrier.abort()
            raise

    out = in_threads([lambda group=group: member(group) for group in groups])  # type: ignore[misc]
    errors = [item for item in out if isinstance(item, BaseException)]
    for error in sorted(errors, key=lambda item: isinstance(item, GroupBroken)):
        raise error
    return out


@dataclass
class Worker:
    """A live state and the step that changes it, as a train worker holds them."""

    blueprint: Blueprint
    window: int = 2
    at: Callable[[str, int], None] = lambda point, lsn: None
    epoch: int = 1
    batches: Callable[[int, int], Any] = batch_of
    owned: tuple[int, ...] = ()
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        recipe, layout = self.blueprint.recipe, self.blueprint.layout
        self.state = self.blueprint.live_state()
        buffers = sum(name.startswith("buffer/") for name in self.state.fixed)
        tail = Tail(len(layout.slots), buffers, len(layout.shards))
        compressor = self.blueprint.compressor()
        self.exchange = Exchange(layout, tail, compressor, recipe.residual, self.window, torch.device("cpu"))
        self.step = TrainStep(self.blueprint, self.state, self.exchange, tail, lambda point, lsn: self.at(point, lsn))

    def take(self, group: ThreadGroup) -> StepResult:
        """Take the next step with this member's share of the micro-shards."""
        count, size, place = self.blueprint.recipe.micro_shards, group.world_size, group.world_rank
        mine = range(count * place // size, count * (place + 1) // size)
        lsn = self.state.lsn + 1
        result, _ = self.step.run(
            [self.batches(lsn, m) for m in mine], mine, group, self.epoch, lags={}, stop=False, owned=self.owned
        )
        return result

    def bits(self) -> dict[str, Any]:
        """Everything that a step may change, to compare."""
        return {
            "state": {n: (t.dtype, t.clone()) for n, t in self.state.tensors().items()},
            "residual": None if self.exchange.residual is None else self.exchange.residual.clone(),
            "groups": copy.deepcopy(
                [{k: v for k, v in g.items() if k != "params"} for g in self.state.optimizer.param_groups]  # type: ignore[union-attr]
            ),
            "schedule": None if self.step.scheduler is None else self.step.scheduler.last_epoch,
            "lsn": self.state.lsn,
        }


def workers(recipe: Recipe, size: int, **more: Any) -> list[Worker]:
    return [Worker(Blueprint(recipe), **more) for _ in range(size)]


def step_all(crew: Sequence[Worker], steps: int = 1) -> list[StepResult]:
    """Let every worker take steps in one new formation; return the last results."""

    def take(group: ThreadGroup) -> StepResult:
        for _ in range(steps):
            result = crew[group.world_rank].take(group)
        return result

    return together(len(crew), take)


def same(one: Any, other: Any) -> bool:
    """Whether two nests of containers and tensors are equal, tensors by their bits."""
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def packed(result: StepResult, layout: Layout) -> dict[int, pa.Buffer]:
    return {shard: pack(result, layout, shard) for shard in layout.shards}


def whole_digest(states: Sequence[ShardState]) -> str:
    return combine_digests({n: d for state in states for n, d in state.state.tensor_digests().items()})


def whole_tensors(states: Sequence[ShardState]) -> dict[str, Tensor]:
    return dict(sorted((n, t) for state in states for n, t in state.state.tensors().items()))
