"""A process that takes steps in gloo groups of any size, as a train worker does, with generators of its own."""

from __future__ import annotations

import hashlib
import pickle
import threading
from typing import Any

import torch
from torch import distributed as dist

from everstep.actors.process_group import ProcessGroup
from everstep.training.blueprint import Blueprint
from everstep.training.record import StepResult
from tests.unit.training.worlds import Worker, toy_recipe


class Peer:
    """Holds one worker, and does what its pipe says."""

    def __init__(self) -> None:
        self.worker: Worker

    def build(self, changes: dict[str, Any]) -> None:
        self.worker = Worker(Blueprint(toy_recipe(**changes)))

    def give(self) -> Any:
        return self.worker.state.lsn, self.worker.state.tensors(), self.worker.exchange.residual

    def take(self, given: Any) -> None:
        lsn, tensors, residual = given
        self.worker.state.load(tensors, lsn)
        self.worker.exchange.adopt(lsn, residual)
        self.worker.step.align_schedule()

    def steps(self, store: str, world_rank: int, world_size: int, count: int) -> list[dict[str, Any]]:
        """Take steps in a new group; return what each left."""
        meeting, over = dist.FileStore(store, world_size), threading.Event()
        self.worker.exchange.renew()
        group = ProcessGroup(meeting, 1, world_rank, world_size, torch.device("cpu"), over)
        out = [self.left(self.worker.take(group)) for _ in range(count)]  # type: ignore[arg-type]
        group.close()
        return out

    def left(self, result: StepResult) -> dict[str, Any]:
        residual, delta = self.worker.exchange.residual, result.delta
        assert delta is not None
        return {
            "lsn": result.lsn,
            "state": self.worker.state.digest(),
            "residual": None if residual is None else hashlib.sha256(residual.numpy().tobytes()).hexdigest(),
            "delta": hashlib.sha256(delta.values.tobytes()).hexdigest(),
            "unused": sorted(delta.unused),
            "scalars": {name: result.scalars[name] for name in ("loss", "grad_norm", "clip", "lr")},
        }


def serve(pipe: Any) -> None:
    """Answer calls until told to end."""
    torch.set_num_threads(1)
    peer = Peer()
    while call := pickle.loads(pipe.recv_bytes()):
        name, *given = call
        try:
            answer = getattr(peer, name)(*given)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send_bytes(pickle.dumps(answer))
