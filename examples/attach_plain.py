"""A training loop of one's own with everstep's log under it. Kill it and start it again: it goes on where it was.

python examples/attach_plain.py            # 300 steps; any step of them can be restored afterwards
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import everstep

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    with everstep.attach(model, optimizer, run="attach-plain", scheduler=scheduler) as log:
        state = log.restore()
        for step in range(state.cursor if state else 0, STEPS):
            x = torch.randn(32, 16)
            loss = F.mse_loss(model(x), x.sin().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            log.step(loss, cursor=step + 1, rng=True)
            if (step + 1) % 50 == 0:
                print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
