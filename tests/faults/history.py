"""A run at the level of training, without Ray: steps, segments, named rounds, snapshots, takeovers, the end."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from everstep.storage.chain import Chain
from everstep.storage.manifest import CompressorSnapshot
from everstep.storage.store import Store
from everstep.training.blueprint import Blueprint
from everstep.training.recipe import Recipe
from everstep.training.record import joined, unpack
from everstep.training.shard_state import to_batches
from tests.unit.training.worlds import Worker, packed, solo, toy_recipe

SLICES = 2


def recipe(**changes: Any) -> Recipe:
    """AdamW, batch norm, two parameter shards, top-k, a digest in every record."""
    given = {"norm": True, "shards": 2, "compressor": "topk", "density": 0.1, "digest_every": 1}
    return toy_recipe(**{**given, **changes})


class History:
    """What a run's processes do, one after the other, in this process.

    Attributes:
        chain: the writer of the newest generation.
        digests: the live state's digest after each step, step 0 included.
        losses: the loss of each step.
    """

    def __init__(self, store: Store, run: str, made: Recipe, *, key_id: str = "") -> None:
        self.store, self.run, self.recipe = store, run, made
        self.worker = Worker(Blueprint(made))
        self.layout = self.worker.blueprint.layout
        self.shards = tuple(self.layout.shards)
        self.worker.owned = self.shards
        self.replicas = {shard: self.worker.blueprint.shard_state(shard) for shard in self.shards}
        self.chain = Chain.create(
            store, run, settings={"seed": made.seed}, shards=len(self.shards), exactness="bitwise", key_id=key_id
        )
        self.digests = {0: self.worker.state.digest()}
        self.losses: dict[int, float] = {}
        self.records: dict[int, dict[int, pa.RecordBatch]] = {}
        self.logged = dict.fromkeys(self.shards, 0)

    @property
    def lsn(self) -> int:
        return self.worker.state.lsn

    def train(self, steps: int) -> None:
        """Take steps; nothing is written."""
        for _ in range(steps):
            result = self.worker.take(solo())
            batches = {shard: unpack(shard, data) for shard, data in packed(result, self.layout).items()}
            for shard, batch in batches.items():
                self.replicas[shard].merge(batch)
            self.records[result.lsn] = batches
            self.digests[result.lsn] = self.worker.state.digest()
            self.losses[result.lsn] = float(result.scalars["loss"])

    def log(self, *shards: int) -> None:
        """Write everything that is not written yet as one segment a shard (none named: every shard)."""
        for shard in shards or self.shards:
            first = self.logged[shard] + 1
            batches = [self.records[lsn][shard] for lsn in range(first, self.lsn + 1)]
            self.chain.put_segment(shard, first, self.lsn, joined(batches))
            self.logged[shard] = self.lsn
        self.chain.check_tenure()

    def advance(self, steps: int, a_segment: int) -> None:
        """Train and log, `a_segment` steps at a time."""
        end = self.lsn + steps
        while self.lsn < end:
            self.train(min(a_segment, end - self.lsn))
            self.log()

    def round(self) -> None:
        """Write a base of every shard and name them."""
        keys = [self.chain.put_base(s, r.lsn, to_batches(r.state.tensors())) for s, r in self.replicas.items()]
        self.chain.name_bases([self.chain.proved(key) for key in keys])

    def snapshot(self) -> None:
        """Write the residual in slices and name them."""
        residual = self.worker.exchange.residual
        assert residual is not None
        for number in range(SLICES):
            part = residual[residual.numel() * number // SLICES : residual.numel() * (number + 1) // SLICES]
            self.chain.put_compressor(self.lsn, number, to_batches({"residual": part.clone()}), {})
        made = CompressorSnapshot(self.chain.manifest.generation, self.lsn, SLICES)
        self.chain.update(lambda manifest: {"compressor": (*manifest.compressor, made)})

    def evaluate(self) -> None:
        """Note an evaluation, as the fault handler does."""
        generation = self.chain.manifest.generation
        body = {"lsn": self.lsn, "generation": generation, "loss": self.losses[self.lsn]}
        self.chain.add_event(f"eval-{self.lsn:012d}-g{generation:06d}", body)

    def take_over(self) -> Chain:
        """Continue as a new generation from where the workers are; return the fenced writer."""
        old, self.chain = self.chain, Chain.take_over(self.store, self.run, cut="each")
        assert set(self.logged.values()) == {self.lsn}
        return old

    def close(self) -> None:
        """Write the closing manifest."""
        tails = {str(shard): crc if lsn == self.lsn else "" for shard, (lsn, crc) in self.chain.tails().items()}
        closing = {"last_lsn": self.lsn, "digest": self.digests[self.lsn], "tails": tails}
        self.chain.update(state="closed", closing=closing)
