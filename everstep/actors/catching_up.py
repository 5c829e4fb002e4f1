"""How a newcomer comes to the group's state while the others train: the replica first, then the records after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import pyarrow as pa
import torch

from everstep.actors.environment import ray
from everstep.actors.moving import from_arrays
from everstep.actors.spec import spread
from everstep.core.errors import ChainGap
from everstep.training.blueprint import Blueprint
from everstep.training.record import lsn_of, unpack
from everstep.training.state import combine_digests, tensor_bytes

ANSWER_S = 120.0  # a state may have to be merged first
ROUNDS = 50  # of records; whoever is not level then is too slow for this run and gets the state at the border
NEAR = 2  # steps behind that the border will cover


class Shadow:
    """A newcomer's copy of every shard, merged as the replica is.

    Args:
        blueprint: the built recipe.
        checkpointers: the checkpoint actors.
    """

    def __init__(self, blueprint: Blueprint, checkpointers: Sequence[Any]) -> None:
        self.checkpointers = checkpointers
        self.shards = {shard: blueprint.shard_state(shard, blank=True) for shard in blueprint.layout.shards}
        owned = spread(len(self.shards) - 1, len(checkpointers))
        for numbers, (lsn, arrays) in zip(owned, self._ask("state", None), strict=True):
            given = from_arrays(arrays)
            for state in (self.shards[number].state for number in numbers):
                state.load({name: tensor for name, tensor in given.items() if state.owns(name)}, lsn, adopt=True)

    @property
    def lsn(self) -> int:
        """The lowest step that a shard stands at."""
        return min(shard.lsn for shard in self.shards.values())

    def approach(self) -> None:
        """Merge records until the group is no more than a few steps ahead, or it stays out of reach."""
        for _ in range(ROUNDS):
            if self.advance() - self.lsn <= NEAR:
                return

    def advance(self) -> int:
        """Merge what the checkpoint actors have above our own; return the complete lsn that they know of.

        Raises:
            ChainGap: they have merged those records and hold them no more.
        """
        have = {number: shard.lsn for number, shard in self.shards.items()}
        complete: list[int] = []
        for known, records in self._ask("records", have):
            complete.append(known)
            for number, payloads in records.items():
                for payload in payloads:
                    batch = unpack(number, payload)
                    if lsn_of(batch) > self.shards[number].lsn:
                        self.shards[number].merge(batch)
        return max(complete)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the whole state by canonical name; all shards have to stand at one step."""
        return {n: t for shard in self.shards.values() for n, t in shard.state.tensors().items()}

    def level(self) -> bool:
        """Whether all shards stand at one step."""
        return len({shard.lsn for shard in self.shards.values()}) == 1

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        answers = ray.get([getattr(a, method).remote(*arguments) for a in self.checkpointers], timeout=ANSWER_S)
        if any(answer is None for answer in answers):
            raise ChainGap("the records after this state are held no more", hint="the state comes at the border")
        return list(answers)


def quick_digest(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return 60 bits over all tensors: CRC32C of each, as many gigabytes a second as the memory gives."""
    views = {name: pa.py_buffer(tensor_bytes(tensor)).slice(0) for name, tensor in tensors.items()}
    found = {name: f"{google_crc32c.value(view):08x}" for name, view in views.items()}
    return int(combine_digests(found)[:15], 16)
