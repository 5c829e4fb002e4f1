"""What one process does with a run: each operation takes two small numbers and, perhaps, a point to stop at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from everstep.core.errors import ChainError, Fenced, ObjectMissing, StepNotKept, UnknownName
from everstep.storage.chain import Chain
from everstep.storage.collect import collect, delete_run, held, unpin
from everstep.storage.fork import fork
from everstep.storage.keys import SegmentKey
from everstep.storage.manifest import CompressorSnapshot
from everstep.storage.pins import RESTORE_S, Pin, confirm, pin
from everstep.storage.plan import RestorePlan, plan_restore
from everstep.storage.retention import Retention
from tests.unit.storage.chain_model import SHARDS, Observed, RunModel, Zombie, keys_of, restored, rows
from tests.unit.storage.crash_points import Died, Process

Arm: TypeAlias = Callable[[Process], None] | None

MOVES = (70.0, 4000.0, 1.0, 100_000.0)  # seconds; a fork may take 60, a restore a day
MOST_STEPS = 60
RUNS = 3  # alive at a time


class Operations:
    """The operations by name, on `models`, the runs that there are.

    Attributes:
        store: what all processes share.
        keep: what every collection keeps.
        moved: seconds that the clock was moved by.
        depth: how many operations are stopped just now.
        takers: takeovers under way, the innermost last: whether the cut is "common", and `at`.
        hits: how often each point was hit.
    """

    hits: Counter[str]
    keep: Retention

    def __init__(self, store: Observed) -> None:
        self.store = store
        self.models: dict[str, RunModel] = {}
        self.takers: list[tuple[bool, int | None]] = []
        self.touched: set[str] = set()
        self.restores: list[tuple[Chain, RestorePlan, list[Pin], list[list[int]], float]] = []  # under way
        self.next_token, self.depth, self.moved = 0, 0, 0.0

    def _process(self, arm: Arm = None) -> Process:
        process = Process(self.store, self.hits)
        if arm:
            arm(process)
        return process

    def _writing(self, model: RunModel, arm: Arm, act: Callable[[Chain], None]) -> bool:
        """Let the writer act; False if it did not end well. A dead one is started again in its generation."""
        chain = model.writer
        if chain is None:
            return False
        process: Any = chain.store
        if arm:
            arm(process)
        try:
            act(chain)
            process.disarm()
            return True
        except (Fenced, ChainError, ObjectMissing) as error:
            assert isinstance(error, Fenced) or model.deleted or model.writer is not chain
            process.disarm()
            if model.writer is chain:
                model.dismiss()
        except Died:
            try:
                model.writer = Chain.attach(self._process(), model.name, chain.manifest.generation)
            except (Fenced, UnknownName):
                model.dismiss()
        return False

    def commit(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        shard, steps, chain = a % SHARDS, 1 + b % 3, model.writer
        tokens = model.tokens[shard]
        first, fresh = len(tokens) + 1, self._tokens(steps)
        if first > MOST_STEPS or chain is None:
            return
        tokens += fresh

        def put(chain: Chain) -> None:
            key = chain.put_segment(shard, first, first + steps - 1, rows(fresh))
            assert key.first == first
            chain.check_tenure()

        done = self._writing(model, arm, put)
        if model.writer is None or (chain is not model.writer and done):
            return  # fenced: what was put may lie before the cut or behind it
        generation = model.writer.manifest.generation
        if model.tokens[shard][first - 1 : first] != fresh[:1]:
            return  # cut off meanwhile
        if done or self._stored(model, SegmentKey(generation, shard, first, first + steps - 1)):
            model.acked[shard] = first + steps - 1
        elif chain.manifest.generation == generation:
            del tokens[first - 1 :]

    def _stored(self, model: RunModel, key: SegmentKey) -> bool:
        name = f"{model.name}/{key.path}"
        return any(info.key == name for info in self.store.list(name))

    def merge(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        """Some steps in one shard, and then a base of it, read back and named."""
        self.commit(model, a, b, None)
        if model.writer is not None:
            self._writing(model, arm, lambda chain: self._base(model, chain, a % SHARDS, b // 4 % 3, name=b % 4 > 0))

    def round(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        """Some steps in every shard, and then a base of each."""
        for shard in range(SHARDS):
            self.commit(model, shard, a, None)

        def bases(chain: Chain) -> None:
            for shard in range(SHARDS):
                self._base(model, chain, shard, b % 2)

        self._writing(model, arm, bases)

    def _base(self, model: RunModel, chain: Chain, shard: int, back: int, name: bool = True) -> None:
        generation = chain.manifest.generation
        spans = [span for span in chain.manifest.lineage if (span.shard, span.generation) == (shard, generation)]
        lsn = max(model.acked[shard] - back, next(span.first for span in spans if not span.run) - 1)
        if name:  # a writer's bases come in order
            lsn = max([lsn, *(base.lsn for base in chain.manifest.bases if base.shard == shard)])
        key = chain.put_base(shard, lsn, rows(model.tokens[shard][:lsn]))
        if name:
            chain.name_bases([chain.proved(key)])

    def snapshot(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        lsn = model.end()

        def write(chain: Chain) -> None:
            new = CompressorSnapshot(chain.manifest.generation, lsn, 2)
            for number in range(new.slices):
                chain.put_compressor(lsn, number, rows([lsn]), {})
            chain.update(lambda now: {"compressor": (*now.compressor, new)})

        if not any(snapshot.lsn >= lsn for snapshot in self.store.manifests[model.name].compressor):
            self._writing(model, arm, write)

    def gap(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        """The store was away for a while: the log goes on from bases of the workers, all at one step."""
        longest = max(len(tokens) for tokens in model.tokens)
        lsn = longest + 1 + a % 2
        if lsn > MOST_STEPS or any(len(model.tokens[s]) != model.acked[s] for s in range(SHARDS)):
            return
        model.dead |= set(range(model.end() + 1, lsn))
        for shard, tokens in enumerate(model.tokens):
            model.holes[shard] |= set(range(len(tokens) + 1, lsn + 1))
            tokens += self._tokens(lsn - len(tokens))

        def restart(chain: Chain) -> None:
            keys = [chain.put_base(shard, lsn, rows(tokens)) for shard, tokens in enumerate(model.tokens)]
            chain.check_tenure()
            model.acked = [lsn] * SHARDS
            if b % 2:
                chain.name_bases([chain.proved(key) for key in keys])

        self._writing(model, None, restart)

    def takeover(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        cut = "each" if a % 3 == 0 else "common"
        at = model.end() - b if a % 6 == 1 else None
        process = self._process(arm)
        may_fail = at is not None and (at < 0 or at in model.dead)
        generation = self.store.manifests[model.name].generation
        self.takers.append((cut == "common", at))
        try:
            chain = Chain.take_over(process, model.name, cut=cut, at=at)  # type: ignore[arg-type]
            self._train(model, chain)
            process.disarm()
        except Died:
            now = self.store.manifests[model.name]
            if now.generation > generation and now.state == "open":
                self._train(model, Chain.attach(self._process(), model.name, now.generation))
            elif b % 2:
                self.takeover(model, 0, 0, None)
        except (Fenced, UnknownName):
            assert process.stopped, "nobody else took it over or deleted it"
        except ChainError:
            assert may_fail or model.deleted or (at is not None and (at in model.dead or at > model.end()))
        finally:
            self.takers.pop()

    def _train(self, model: RunModel, chain: Chain) -> None:
        if self.store.manifests[model.name].generation == chain.manifest.generation:
            model.writer = chain
        else:
            model.zombies.append(Zombie(chain, [list(tokens) for tokens in model.tokens]))

    def zombie(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        """A writer wakes that was fenced long ago: whatever it tries changes nothing."""
        if not model.zombies or model.haunted or model.name not in self._present():
            return
        zombie = model.zombies[a % len(model.zombies)]
        chain: Any = zombie.chain
        if chain.store.dead or chain.store.paused:
            return
        highest = self.store.manifests[model.name]
        with pytest.raises((Fenced, ChainError, UnknownName)):
            self._zombie_acts(zombie, a % SHARDS, b)
            chain.check_tenure()
        assert self.store.manifests[model.name] is highest

    def _zombie_acts(self, zombie: Zombie, shard: int, b: int) -> None:
        tokens, chain = zombie.tokens[shard], zombie.chain
        what = b % 6
        if what == 0:
            fresh = self._tokens(1 + b // 6)
            tokens += fresh
            chain.put_segment(shard, len(tokens) - len(fresh) + 1, len(tokens), rows(fresh))
        elif what == 1:
            chain.put_base(shard, len(tokens), rows(tokens))
        elif what == 2:
            chain.name_bases([chain.proved(chain.put_base(shard, len(tokens), rows(tokens)))])
        elif what == 3:
            chain.update(exactness="warm")
        elif what == 4:
            collect(chain, Retention(1, 0, 0.0, 0.0))
        else:
            Chain.attach(self._process(), chain.run, chain.manifest.generation)

    def gc(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        if arm and model.writer is not None and not model.busy:
            self.round(model, a, b, None)
        if arm and b % 4 == 3:  # a restore that died long ago
            reader = Chain.open(self.store, model.name)
            pin(reader, keys_of(plan_restore(reader.manifest, reader.listing())))
            self.moved += RESTORE_S
        process = self._process(arm)
        try:
            chain = Chain.open(process, model.name)
            collect(chain, self.keep, at=process.at)
        except Died:
            if b % 2:
                self.gc(model, 0, 0, None)
        except (Fenced, UnknownName, ChainError):
            assert process.stopped
            assert model.deleted or process.stopped
        process.disarm()

    def fork(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        if sum(not other.deleted for other in self.models.values()) >= RUNS or self.depth > 1:
            return
        name = f"f{len(self.models)}_{self.store.manifests[model.name].version}_{self.moved:g}_{self.depth}"
        step, tokens, dead = self._step(model, a, b), [list(tokens) for tokens in model.tokens], set(model.dead)
        if name in self._present() or name in self.models:
            return
        claimed = self.store.manifests[model.name].state == "claim"
        process = self._process(arm)
        seen = RunModel(model.name, None, tokens, list(model.acked), [set(h) for h in model.holes], dead)
        try:
            parent = Chain.open(process, model.name)
            child = fork(parent, step, name, settings={}, exactness="bitwise")
        except Died:
            if name in self._present():
                child = Chain.attach(self._process(), name, 1)
                self.models[name] = seen.forked(name, step, child)
        except (StepNotKept, UnknownName):
            assert step in model.dead or process.stopped, f"step {step} of {model.name} cannot be forked"
        except ChainError:
            assert claimed
        else:
            process.disarm()
            self.models[name] = seen.forked(name, step, child)
        self.touched.add(name)

    def hold(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        """A restore that holds what it reads: it succeeds whatever others do meanwhile."""
        step, tokens = self._step(model, a, b), [list(tokens) for tokens in model.tokens]
        process, began = self._process(arm), self.moved
        try:
            reader = Chain.open(process, model.name)
            plan = plan_restore(reader.manifest, reader.listing(), target=step)
        except (StepNotKept, UnknownName):
            assert step in model.dead
            return
        reading = False
        try:
            with held(reader, keys_of(plan)):
                reading = True
                assert restored(reader, plan) == [found[:step] for found in tokens]
            process.disarm()
        except Died:
            pass
        except StepNotKept:
            assert process.stopped and not reading
        except ObjectMissing:
            assert self.moved - began >= RESTORE_S

    def begin(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        """A restore that takes longer than some other operations."""
        step = self._step(model, a, b)
        reader = Chain.open(self._process(), model.name)
        try:
            plan = plan_restore(reader.manifest, reader.listing(), target=step)
        except StepNotKept:
            assert step in model.dead
            return
        pins = pin(reader, keys_of(plan))
        confirm(reader, pins)
        self.restores.append((reader, plan, pins, [tokens[:step] for tokens in model.tokens], self.moved))

    def finish(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        if self.restores:
            reader, plan, pins, tokens, began = self.restores.pop(a % len(self.restores))
            if self.moved - began < RESTORE_S:
                assert restored(reader, plan) == tokens
            unpin(self.store, pins)

    def read(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        """A restore that holds nothing: it may find that an object is gone, but nothing wrong."""
        step, tokens = self._step(model, a, b), [list(tokens) for tokens in model.tokens]
        process = self._process(arm)
        try:
            reader = Chain.open(process, model.name)
            plan = plan_restore(reader.manifest, reader.listing(), target=step)
            assert restored(reader, plan) == [found[:step] for found in tokens]
        except Died:
            pass
        except StepNotKept:
            assert step in model.dead
        except ObjectMissing:
            assert process.stopped

    def restore(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        model.check_step(self.store, max(model.end() + 1 - a - b, 0))

    def delete(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        alive = [other for other in self.models.values() if not other.deleted]
        if (len(alive) < 2 and not model.deleted) or model.name not in self._present() or model.haunted:
            return
        process = self._process(arm)
        try:
            delete_run(Chain.open(process, model.name, deleted_too=True))
            process.disarm()
        except Died:
            pass
        except (UnknownName, ChainError):
            assert process.stopped

    def clock(self, model: RunModel, a: int, b: int, arm: Arm) -> None:
        self.moved += MOVES[a % len(MOVES)]

    def _step(self, model: RunModel, a: int, b: int) -> int:
        """A step of the run, the last ones more often than others."""
        return max(model.end() - a * (b % 4), 0)

    def _tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def _present(self) -> list[str]:
        return Chain.runs(self.store)
