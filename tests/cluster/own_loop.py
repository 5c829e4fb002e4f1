"""A loop of one's own, in this process or as a program: alone, or under torchrun."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import everstep
from everstep.tasks.seeding import seed_all

STEPS = 60


def train(
    store: str, run: str, steps: int = STEPS, *, pace_s: float = 0.0, at: Callable[[int, Any], None] | None = None
) -> dict[str, Any]:
    """Train to the end; return where it began and how far the log says it could be resumed then.

    `at` is called in the middle of each step with its number and the log.
    """
    ranks = dist.is_initialized() and dist.get_world_size() > 1
    seed_all(11 + (dist.get_rank() if ranks else 0))
    model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 1))
    if ranks:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    log = everstep.attach(
        model, optimizer, run, store, scheduler=scheduler, max_lag_s=0.5, segment_steps=8, base_interval=25,
        digest_every=10,
    )  # fmt: skip
    state = log.restore()
    first = state.cursor["next"] if state else 1
    for step in range(first, steps + 1):
        x = torch.randn(16, 8)
        loss = F.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        if at is not None:
            at(step, log)
        optimizer.step()
        scheduler.step()
        log.step(loss, cursor={"next": step + 1}, rng=True)
        time.sleep(pace_s)
    log.close()
    return {"first": first, "exactness": state.exactness if state else None}


def main() -> None:
    """STORE RUN PACE [STEP: die in the middle of it]."""
    store, run, pace, *die = sys.argv[1:]
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not alone:
        dist.init_process_group("gloo")

    def at(step: int, log: Any) -> None:
        if die and step == int(die[0]) and (alone or dist.get_rank() == 1):
            os.kill(os.getpid(), signal.SIGKILL)

    found = train(store, run, pace_s=float(pace), at=at)
    if alone or dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    if not alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
