"""A run of `gpt2_shapes` in a folder, driven as a checkpoint actor drives it, with its requests counted."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from everstep.compressors import Compressor
from everstep.core import clock
from everstep.storage.chain import Chain
from everstep.storage.folder import FolderStore
from everstep.storage.keys import parse
from everstep.storage.store import Buffer, ObjectInfo, Pace, Store
from everstep.training.base_writer import BaseWriter
from everstep.training.blueprint import Blueprint
from everstep.training.delta import Delta, gradient_views, write_gradient
from everstep.training.log_writer import LogWriter
from everstep.training.optimizer import hyper_parameters
from everstep.training.recipe import Recipe
from everstep.training.record import StepResult, pack
from everstep.training.replica import Replica
from everstep.training.restore import restore
from everstep.training.shard_state import ShardState, digest_of, to_batches
from everstep.training.state import combine_digests, tensor_digest

T = TypeVar("T")
DRAWN = 2  # different gradients, used in turn
CASES: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "topk 1 %": {"compressor": "topk", "density": 0.01},
}


def timed(act: Callable[[], T]) -> tuple[float, T]:
    began = clock.monotonic()
    out = act()
    return clock.monotonic() - began, out


@dataclass(frozen=True)
class Plan:
    """What a log is made of: the task's sizes, parameter shards, and steps a segment and between bases."""

    sizes: dict[str, int]
    shards: int
    segment_steps: int
    base_interval: int


class Counting:
    """A store that counts its requests, and the bytes put, by kind of object."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.url = inner, inner.url
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        found = parse(key.partition("/")[2])
        self.requests[f"put {type(found).__name__}"] += 1
        self.bytes[type(found).__name__] += memoryview(data).nbytes
        self.inner.put(key, data, pace=pace)

    def get(self, key: str, start: int = 0, length: int | None = None) -> Any:
        self.requests["get"] += 1
        return self.inner.get(key, start, length)

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        self.requests["list"] += 1
        return self.inner.list(prefix, after)

    def tops(self) -> tuple[str, ...]:
        return self.inner.tops()

    def delete(self, key: str) -> None:
        self.requests["delete"] += 1
        self.inner.delete(key)

    def sweep(self, older_than_s: float) -> int:
        return self.inner.sweep(older_than_s)


class Log:
    """A run in a folder: a live state that takes drawn steps, and the actor's parts that log them.

    Its first base stands at step 1, because an optimizer has no state before.
    """

    def __init__(self, plan: Plan, store: Store, case: str) -> None:
        self.plan, self.case, self.store = plan, case, Counting(store)
        self.blueprint = blueprint_of(plan, case)
        self.layout, self.live = self.blueprint.layout, self.blueprint.live_state()
        self.flat = torch.empty(self.layout.size)
        self.deltas = list(self._draw())
        self.digests: dict[int, str] = {}
        shards = self.layout.shards
        self.chain = Chain.create(self.store, "bench", settings={}, shards=len(shards), exactness="bitwise")
        states = {shard: self.blueprint.shard_state(shard) for shard in shards}
        self.replica = Replica(states, 1)
        self.take_step()
        for shard in shards:
            self.replica.merge(shard)
        self.replica = Replica(states, 1)
        self.bases = BaseWriter(
            self.chain, self.replica, base_interval=plan.base_interval, based=dict.fromkeys(shards, 1)
        )
        self.bases.pacer.hurry()  # counted here, not spread over time
        self.writer = LogWriter(self.chain, self.replica, self.bases, segment_steps=plan.segment_steps, max_lag_s=1e9)

    def _draw(self) -> Iterator[Delta]:
        compressor = self.blueprint.compressor()
        assert compressor is None or isinstance(compressor, Compressor)
        for number in range(DRAWN):
            gradient = torch.randn(self.layout.size, generator=torch.Generator().manual_seed(number)).mul_(1e-2)
            if compressor is None:
                yield Delta(gradient.numpy(), None, frozenset())
            else:
                sent = compressor.compress(gradient, number)
                places = None if sent.indices is None else sent.indices.numpy()
                yield Delta(sent.values.numpy(), places, frozenset(), sent.codes)

    def take_step(self) -> float:
        """Take a step and give its records to the replica; return the seconds of making and taking the records."""
        lsn, delta = self.live.lsn + 1, self.deltas[self.live.lsn % DRAWN]
        hyper = hyper_parameters(self.live.optimizer)  # type: ignore[arg-type]
        indices = None if delta.indices is None else torch.from_numpy(delta.indices)
        write_gradient(self.flat, torch.from_numpy(delta.values), indices)
        self.live.apply(gradient_views(self.flat, self.layout.slots, delta.unused))
        self.live.lsn = lsn
        every = self.blueprint.recipe.digest_every
        digests = {shard: self._digest(state) for shard, state in self.replica.states.items() if lsn % every == 0}
        scalars = {"loss": 0.0, "grad_norm": 0.0, "clip": 1.0, "lr": hyper[0]["lr"], "samples": lsn, "data_epoch": 0}
        result = StepResult(lsn, 1, delta, scalars | {"world_size": 1, "seconds": 0.0}, hyper, {}, digests)

        def hand_over() -> None:
            records = [(shard, pack(result, self.layout, shard)) for shard in self.layout.shards]
            self.replica.put(1, lsn, records, lsn)

        return timed(hand_over)[0]

    def _digest(self, shard: ShardState) -> str:
        own = {name: tensor for name, tensor in self.live.tensors().items() if shard.state.owns(name)}
        return combine_digests({name: tensor_digest(tensor) for name, tensor in own.items()})

    def put_bases(self) -> None:
        """Write the first base of every shard, as an actor does that starts a run."""
        for shard, state in self.replica.states.items():
            self.chain.put_base(shard, state.lsn, to_batches(state.state.tensors()))

    def write_steps(self, steps: int) -> tuple[float, float]:
        """Take and log steps; return the seconds of the records, and of the bases that fell due, with merging."""
        log_s = base_s = 0.0
        for step in range(1, steps + 1):
            log_s += self.take_step()
            log_s += timed(lambda last=step == steps: self.writer.work(flush=last))[0]
            while (took := timed(self.bases.work))[1]:
                base_s += took[0]
            for shard in self.layout.shards if self.replica.held_bytes() > 1 << 30 else ():
                self.replica.merge(shard)
        return log_s, base_s

    def forget(self) -> None:
        """Give back the memory of all that is not needed to restore."""
        del self.replica, self.writer, self.bases, self.deltas, self.flat
        gc.collect()


def blueprint_of(plan: Plan, case: str) -> Blueprint:
    recipe = {"task": "gpt2_shapes:Gpt2", "task_options": plan.sizes, "optimizer": "adamw", **CASES[case]}
    return Blueprint(Recipe(**recipe, optimizer_options={"lr": 1e-4}, shards=plan.shards))


def restored(plan: Plan, root: str, case: str, after: int, wanted: str | None) -> float:
    """Restore the state `after` steps from the first base of a log; return the seconds.

    Args:
        plan: what the log is made of.
        root: its folder.
        case: which of `CASES` it is.
        after: steps to replay.
        wanted: the digest that the state must have; None: not checked, hashing takes as long as restoring.
    """
    chain, blueprint = Chain.open(FolderStore(root), "bench"), blueprint_of(plan, case)
    blueprint.live_state()  # torch imports a good part of itself for the first optimizer, whoever builds it
    later = frozenset(key for key in chain.listing().bases() if key.lsn > 1)
    seconds, (states, _, _) = timed(lambda: restore(chain, blueprint, target=1 + after, exclude=later))
    if wanted is not None:
        assert digest_of(states.values()) == wanted, f"step {1 + after} was not restored to its bits"
    return seconds
