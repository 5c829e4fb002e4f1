"""The same under DistributedDataParallel. Kill it and start it again: all ranks go on from the last step.

torchrun --nproc-per-node 2 examples/attach_ddp.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    log = everstep.attach(model, optimizer, run="attach-ddp")
    state = log.restore()
    for step in range(state.cursor if state else 0, STEPS):
        x = torch.randn(32, 16)
        loss = F.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        log.step(loss, cursor=step + 1, rng=True)  # in the place of optimizer.step()
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)
    log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
