"""Compressor snapshots: each worker hands its slice of the residual over, all at the same step."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from everstep.actors.sender import Sender
from everstep.actors.spec import Formation
from everstep.core import clock
from everstep.training.exchange import Exchange
from everstep.training.state import tensor_bytes


class Snapshots:
    """Takes one worker's slices.

    Args:
        sender: what hands them over.
        exchange: holds the residual.
        replicated: whether every worker has the same residual, so that each hands over a part of it.
        every: steps between two snapshots; 0 for none. May change: a snapshot that not all take is never named.
    """

    def __init__(self, sender: Sender, exchange: Exchange, *, replicated: bool, every: int) -> None:
        self.sender, self.exchange, self.replicated, self.every = sender, exchange, replicated, every
        self.seconds = 0.0  # that the last one held training up

    def take(self, lsn: int, formation: Formation | None, checkpointers: list[Any]) -> None:
        """Hand this worker's slice to a checkpoint actor, on the steps that keep one."""
        residual = self.exchange.residual
        if residual is None or not self.every or lsn % self.every or not checkpointers or formation is None:
            return
        started = clock.monotonic()
        place, size = formation.world_rank, formation.world_size
        part = residual
        if self.replicated:
            part = residual[residual.numel() * place // size : residual.numel() * (place + 1) // size]
        self.sender.offer_residual(lsn, place, size, pa.py_buffer(bytes(tensor_bytes(part))))
        self.seconds = clock.monotonic() - started
        self.sender.stalled += self.seconds
