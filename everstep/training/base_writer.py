"""Rolling merge: bases written shard after shard from a replica, in the background and as a steady trickle.

Each shard has its own turn within an interval, as long as its share of the bytes, and they are spread over that time:
the store sees an even stream. A base is read back before anybody is told of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from everstep.core import clock
from everstep.core.errors import CorruptObject, StoreError
from everstep.storage.chain import Chain
from everstep.storage.keys import BaseKey
from everstep.storage.manifest import Base
from everstep.training.replica import Replica
from everstep.training.shard_state import to_batches

HEADROOM = 1.25  # the trickle runs faster than it must by this factor, so that the next turn does not find it at work
BURST_S = 0.2
WATCHED_S = 30.0  # over which the speed of training is taken
PROVED_KEPT = 64


class Pacer:
    """Spreads bytes over time: `pacer(n)` returns when `n` more bytes may go.

    Args:
        rate: bytes a second that may go now; None = as fast as they can.
    """

    def __init__(self, rate: Callable[[], float | None]) -> None:
        self.rate = rate
        self._due = 0.0
        self._hurry = threading.Event()

    def __call__(self, size: int) -> None:
        """Wait until `size` bytes may go."""
        rate = self.rate()
        if rate is None:
            return
        now = clock.monotonic()
        self._due = max(self._due, now - BURST_S)
        self._hurry.wait(timeout=max(0.0, self._due - now))
        self._due += size / rate

    def hurry(self) -> None:
        """Let everything go at once from now on."""
        self._hurry.set()


class BaseWriter:
    """Writes the bases of one checkpoint actor's shards.

    Args:
        chain: the log, in this writer's generation.
        replica: what to write.
        base_interval: steps between two bases of a shard.
        based: by shard, the lsn of its newest base.
    """

    def __init__(self, chain: Chain, replica: Replica, *, base_interval: int, based: dict[int, int]) -> None:
        self.chain, self.replica, self.base_interval = chain, replica, base_interval
        self.pacer = Pacer(self.rate)
        self.proved: deque[Base] = deque(maxlen=PROVED_KEPT)
        self._based = based
        self._starts = _starts({shard: replica.states[shard].parameter_bytes for shard in based})
        self._costs: dict[int, tuple[float, int]] = {}
        self._seen: deque[tuple[float, int]] = deque()
        self._settled = threading.Event()

    def work(self) -> bool:
        """Write the base of one shard, if one is due; return whether there was one.

        Raises:
            StoreError: the store refused; the same is due at the next call.
            Fenced: a newer generation owns the log.
            StateMismatch: merging did not lead to the logged state.
        """
        self._watch()
        if self.settled:
            return False
        durable, merged = self.replica.durable(), self.replica.merged()
        for shard, based in self._based.items():
            target = self._turn(shard, durable[shard])
            # Only where the segments have come as well: a base ahead of them would leave a hole behind a takeover.
            if based < target and merged[shard] <= durable[shard]:
                self.write(shard, target)
                return True
        return False

    def write(self, shard: int, upto: int) -> int:
        """Write a shard's state at `upto`, or wherever it has been merged to already; return the lsn."""
        with self.replica.merge_lock:
            state = self.replica.merge(shard, upto)
            merged = clock.thread_cpu()
            lsn, base = state.lsn, self.chain.prepare_base(shard, state.lsn, to_batches(state.state.tensors()))
        self.chain.put(base, pace=self.pacer)
        self.proved.append(self._prove(base.key))
        self._based[shard] = max(self._based[shard], lsn)
        self._costs[shard] = (clock.thread_cpu() - merged, base.data.size)
        return lsn

    def prove(self, key: BaseKey) -> None:
        """Take a base that was written otherwise. Raises as `write`."""
        self.proved.append(self._prove(key))

    @property
    def cpu_a_round(self) -> float:
        """Processor seconds that the last base of each shard took together."""
        return sum(cpu for cpu, _ in list(self._costs.values()))

    @property
    def round_bytes(self) -> int:
        """Bytes of the last base of each shard together."""
        return sum(size for _, size in list(self._costs.values()))

    @property
    def settled(self) -> bool:
        """Whether no more bases are begun."""
        return self._settled.is_set()

    def settle(self) -> None:
        """Begin no more bases, and let the one under way go as fast as it can: the run is about to end."""
        self._settled.set()
        self.pacer.hurry()

    def rate(self) -> float | None:
        """Return the bytes a second that spread a round over the interval; None while too little is known."""
        step_s = self.step_s()
        if step_s is None or len(self._costs) < len(self._based):
            return None
        return HEADROOM * self.round_bytes / (self.base_interval * step_s)

    def step_s(self) -> float | None:
        """Return the seconds a step takes, by what became durable of late; None while too little is known."""
        if len(self._seen) < 2:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (ended - began) / (last - first)

    def _prove(self, key: BaseKey) -> Base:
        try:
            return self.chain.proved(key)
        except CorruptObject as error:
            raise StoreError(
                f"a base was written and read back damaged: {error.message}",
                hint="it is written again under another name; if this goes on, the store loses data",
            ) from error

    def _turn(self, shard: int, durable: int) -> int:
        """Return the last lsn up to `durable` at which it was this shard's turn."""
        phase = int(self.base_interval * self._starts[shard])
        return (durable - phase) // self.base_interval * self.base_interval + phase

    def _watch(self) -> None:
        now, lowest = clock.monotonic(), min(self.replica.durable().values())
        if not self._seen or lowest > self._seen[-1][1]:
            self._seen.append((now, lowest))
        while len(self._seen) > 2 and now - self._seen[0][0] > WATCHED_S:
            self._seen.popleft()


def _starts(sizes: Mapping[int, int]) -> dict[int, float]:
    """Return, by shard, the part of an interval after which its turn begins: as long as those before it take."""
    whole, done, out = sum(sizes.values()) or 1, 0, {}
    for shard, size in sizes.items():
        out[shard] = done / whole
        done += size
    return out
