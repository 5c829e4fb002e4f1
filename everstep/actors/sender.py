"""Hands finished steps to the checkpoint actors from a thread of its own, so that training does not wait for them.

Every record of an owned shard is kept, packed, until it is durable. Steps are kept whole, all shards of them, for the
shards of a worker that dies: the last window + 1, and older ones, if sparse, until they are durable or there is no
room. Dense values may be handed over as soon as they are reduced, while the step is still being taken; its record
makes them count. Queues are bounded in bytes and steps, waits in time. A checkpoint actor that is away only makes the
queue longer, until another takes its place.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import torch

from everstep.actors.environment import ray
from everstep.actors.spec import Ack
from everstep.core import clock
from everstep.core.errors import Failure
from everstep.training.layout import Layout
from everstep.training.record import StepResult, pack

PATIENCE_S = 600.0  # the longest a step waits for room: then something is broken that nobody reports
CALL_S = 30.0


@dataclass(frozen=True)
class _Packed:
    """A packed record; `values` are on their own where they were handed over before it."""

    record: pa.Buffer
    values: pa.Buffer | None = None

    @property
    def size(self) -> int:
        return int(self.record.size + (0 if self.values is None else self.values.size))


@dataclass
class _Kept:
    """Packed records of owned shards that are not durable yet, by (shard, lsn)."""

    payloads: dict[tuple[int, int], _Packed] = field(default_factory=dict)
    bytes: int = 0

    def add(self, shard: int, lsn: int, payload: _Packed) -> None:
        old = self.payloads.pop((shard, lsn), None)
        self.bytes += payload.size - (old.size if old is not None else 0)
        self.payloads[shard, lsn] = payload

    def drop(self, released: Mapping[int, int]) -> None:
        for key in [k for k in self.payloads if k[1] <= released.get(k[0], -1)]:
            self.bytes -= self.payloads.pop(key).size


class Sender:
    """The log's end in a worker.

    Args:
        layout: shards and their places.
        shards: shard numbers by checkpoint actor.
        window: finished steps that may wait to be packed.
        queue_bytes: packed bytes that may wait to become durable.
        at: fault point, called with ("after_send", lsn) once a step is handed over.
    """

    def __init__(
        self, layout: Layout, shards: Sequence[Sequence[int]], window: int, queue_bytes: int,
        at: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self.layout, self.window, self.queue_bytes, self._at = layout, window, queue_bytes, at
        self.actor_of = {shard: index for index, owned in enumerate(shards) for shard in owned}
        self.recent: deque[StepResult] = deque()
        self.received = dict.fromkeys(self.actor_of, 0)
        self.stalled = 0.0
        self.cpu = 0.0
        self._kept = _Kept()
        self._recent_bytes = 0
        self._released: dict[int, int] = {}
        self._owned: tuple[int, ...] = ()
        self._early: dict[int, tuple[int, pa.Buffer]] = {}  # by shard: values handed over, and their step
        self._epoch = 0
        self._actors: list[Any] = []
        self._down: set[int] = set()
        self._waiting = 0  # finished steps not yet packed
        self._unacked = 0
        self._failure: BaseException | None = None
        self._room = threading.Condition()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        if self.actor_of:
            threading.Thread(target=self._run, name="sender", daemon=True).start()

    def begin_epoch(self, group_epoch: int, owned: Sequence[int], actors: Sequence[Any]) -> None:
        """Send these shards to these actors from now on, stamped `group_epoch`; first send each actor what it lacks."""
        if self.actor_of:
            self._do(lambda: self._begin(group_epoch, tuple(owned), list(actors)))

    def offer_early(self, lsn: int, first: int, stop: int, wire: torch.Tensor) -> None:
        """Take the owned shards that begin in the elements `first` to `stop` of a step that is still being taken.

        Never waits. From `first` to the end of the gradient, `wire` (fp32) is reduced and does not change any more.
        """
        for span in self.layout.ranges:
            if first <= span.start < stop:
                self._inbox.put(partial(self._hold, lsn, span.shard, wire[span.start : span.stop]))

    def offer(self, result: StepResult, complete: int) -> None:
        """Take a finished step; returns at once unless the queue is full. Waiting is added to `stalled`."""
        if not self.actor_of:
            return
        started = clock.monotonic()
        with self._room:
            self._remember(result)
            self._waiting += 1
            room = self._room.wait_for(
                lambda: self._waiting <= self.window and self._kept.bytes <= self.queue_bytes, PATIENCE_S
            )
        self._inbox.put(lambda: self._hand_over(result, complete))
        self.stalled += clock.monotonic() - started
        if not room:
            raise Failure(
                f"step {result.lsn}: {self._kept.bytes} bytes of records are not durable after {PATIENCE_S:.0f} s "
                f"(checkpoint.queue_bytes = {self.queue_bytes})",
                hint="see what the checkpoint actor and the store are waiting for",
            )
        if self._failure is not None:  # of an earlier step; this one is finished and goes into the log all the same
            failure, self._failure = self._failure, None
            raise failure

    def _remember(self, result: StepResult) -> None:
        """Keep a step whole; forget those that are durable or too much, but for the last window + 1.

        A dense delta lies in a buffer that the exchange uses again after that; without a residual, what is lost with
        its holders is bridged by a base, and no bit changes.
        """
        self.recent.append(result)
        self._recent_bytes += _size(result)
        durable = min(self._released.values(), default=-1)
        while len(self.recent) > self.window + 1 and (
            _dense(self.recent[0]) or self.recent[0].lsn <= durable or self._recent_bytes > self.queue_bytes
        ):
            self._recent_bytes -= _size(self.recent.popleft())

    def offer_residual(self, lsn: int, number: int, of: int, data: pa.Buffer) -> None:
        """Take this worker's slice of a compressor snapshot, one `of` so many; `data` must not change any more."""
        self._inbox.put(lambda: self._hand_over_residual(lsn, number, of, data))

    @property
    def held_bytes(self) -> int:
        """Bytes of packed records that are not durable yet."""
        return self._kept.bytes

    def lags(self, owned: Sequence[int], finished: int) -> dict[int, int]:
        """Return, for each owned shard, how many finished steps its checkpoint actor has not acknowledged."""
        return {shard: max(finished - self.received[shard], 0) for shard in owned if shard in self.received}

    def resend(self, group_epoch: int, have: Mapping[int, int], upto: int) -> dict[int, int]:
        """Send every record above `have` that this worker holds, of any shard; return what the actors have then.

        Waits for the acknowledgements: only then may anybody read a replica. Idempotent.
        """
        return self._do(lambda: self._resend(group_epoch, have, upto))  # type: ignore[no-any-return]

    def drain(self) -> dict[int, int]:
        """Wait until everything handed over is acknowledged; return what the actors have."""
        deadline = clock.monotonic() + PATIENCE_S
        while clock.monotonic() < deadline:
            if self._do(lambda: self._waiting == 0 and self._unacked == 0):
                break
            clock.sleep(0.002)
        return dict(self.received)

    def _do(self, job: Callable[[], Any]) -> Any:
        """Run `job` on the sender's thread and return what it returns."""
        done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((True, job()))
            except BaseException as error:  # given to the caller, whole
                done.put((False, error))

        self._inbox.put(run)
        good, value = done.get()
        if not good:
            raise value
        return value

    def _run(self) -> None:
        while True:
            job = self._inbox.get()
            try:
                job()
            except BaseException as error:  # shown to the training loop at its next step
                self._failure = error
            self.cpu = clock.thread_cpu()

    # everything below runs on the sender's thread

    def _hand_over(self, result: StepResult, complete: int) -> None:
        parts: dict[int, list[tuple[int, _Packed]]] = {}
        for shard in self._owned:
            lsn, values = self._early.pop(shard, (0, None))
            early = values if lsn == result.lsn and result.delta is not None else None
            payload = _Packed(pack(result, self.layout, shard, apart=early is not None), early)
            self._kept.add(shard, result.lsn, payload)
            parts.setdefault(self.actor_of[shard], []).append((shard, payload))
        with self._room:
            self._waiting -= 1
            self._room.notify_all()
        for actor, records in parts.items():
            self._send(actor, result.lsn, records, complete, held=True)
            self._at("after_send", result.lsn)

    def _hand_over_residual(self, lsn: int, number: int, of: int, data: pa.Buffer) -> None:
        actor = number % len(self._actors)
        if actor not in self._down:  # else this snapshot stays incomplete and is never named
            self._actors[actor].put_residual.remote(self._epoch, lsn, number, of, data)

    def _hold(self, lsn: int, shard: int, values: torch.Tensor) -> None:
        actor = self.actor_of[shard]
        if shard in self._owned and actor not in self._down:
            self._early[shard] = (lsn, pa.py_buffer(values.cpu().numpy().tobytes()))
            self._actors[actor].hold.remote(self._epoch, lsn, shard, self._early[shard][1])

    def _send(
        self, actor: int, lsn: int, records: list[tuple[int, _Packed]], complete: int, *, held: bool = False
    ) -> None:
        if actor in self._down:
            return  # kept; sent when the next actor takes its place
        reply = self._put(self._actors[actor], self._epoch, lsn, records, complete, held=held)
        self._unacked += 1
        reply.future().add_done_callback(lambda future: self._inbox.put(lambda: self._answered(actor, future)))

    @staticmethod
    def _put(
        actor: Any, group_epoch: int, lsn: int, records: list[tuple[int, _Packed]], complete: int, *, held: bool = False
    ) -> Any:
        """Send an actor records of a step, values first unless it has them (`held`); its calls keep their order."""
        for shard, packed in records:
            if packed.values is not None and not held:
                actor.hold.remote(group_epoch, lsn, shard, packed.values)
        return actor.put.remote(group_epoch, lsn, [(shard, packed.record) for shard, packed in records], complete)

    def _answered(self, actor: int, future: Any) -> None:
        self._unacked -= 1
        error = future.exception()
        if error is not None:
            self._down.add(actor)  # the fault handler sees it too, and connects us to another
            return
        self._acknowledge(future.result())

    def _acknowledge(self, ack: Ack) -> None:
        self.received.update(ack.received)
        self._released.update(ack.released)
        with self._room:
            self._kept.drop(ack.released)
            self._room.notify_all()

    def _begin(self, group_epoch: int, owned: tuple[int, ...], actors: list[Any]) -> None:
        self._epoch, self._owned, self._actors, self._down = group_epoch, owned, actors, set()
        self._early.clear()
        for index, actor in enumerate(actors):
            try:
                ack = ray.get(actor.begin_epoch.remote(group_epoch), timeout=CALL_S)
            except ray.exceptions.RayError:
                self._down.add(index)
                continue
            self._acknowledge(ack)
            missing = sorted(
                (lsn, shard) for shard, lsn in self._kept.payloads
                if self.actor_of[shard] == index and shard in owned and lsn > ack.received[shard]
            )  # fmt: skip
            for lsn, shard in missing:
                self._send(index, lsn, [(shard, self._kept.payloads[shard, lsn])], 0)

    def _resend(self, group_epoch: int, have: Mapping[int, int], upto: int) -> dict[int, int]:
        answers = []
        steps = {result.lsn: result for result in self.recent}
        for shard, last in sorted(have.items()):
            for lsn in range(last + 1, upto + 1):
                payload = self._kept.payloads.get((shard, lsn))
                if payload is None and lsn in steps:
                    payload = _Packed(pack(steps[lsn], self.layout, shard))
                if payload is None:
                    break  # somebody else may have it
                actor = self._actors[self.actor_of[shard]]
                answers.append(self._put(actor, group_epoch, lsn, [(shard, payload)], 0))
        latest = dict(have)
        for ack in ray.get(answers, timeout=CALL_S):
            self._acknowledge(ack)
            latest.update(ack.received)
        return latest


def _dense(result: StepResult) -> bool:
    return result.delta is not None and result.delta.indices is None


def _size(result: StepResult) -> int:
    delta = result.delta
    return 0 if delta is None else delta.values.nbytes + (0 if delta.indices is None else delta.indices.nbytes)
