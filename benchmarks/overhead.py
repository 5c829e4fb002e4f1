"""What the log costs: the quickstart with and without it, side by side, in one session of Ray.

usage: python benchmarks/overhead.py [REPEATS] [KEY=VALUE ...]

Runs are interleaved (without, with, without, with, ...), so that a drift of the machine hits both alike. Reported: the
ratio of median step times with its spread, the stall as the train loop sees it, and processor seconds of the log over
those of training. Lines of JSON, then a table.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from typing import Any

from everstep.actors import session
from everstep.actors.run import launch
from everstep.core import clock
from everstep.core.ids import new_id
from everstep.platform.settings import load

JOB = os.path.join(os.path.dirname(__file__), "..", "runs", "quickstart.toml")
CASES = {
    "none": ["compression.method=none"],
    "topk replicated": ["compression.method=topk", "compression.residual=replicated"],
    "topk survivor": ["compression.method=topk", "compression.residual=survivor"],
    "topk+int8": ["compression.method=topk+int8"],
    "int8": ["compression.method=int8"],
}


def one(store: str, overrides: list[str]) -> dict[str, Any]:
    settings = load(JOB, [*overrides, f"run.name=bench-{new_id()}", f"run.store={store}", "workers.spares=0"])
    handle = launch(settings, resume=None)
    while handle.progress()["state"] not in ("done", "failed", "stopped"):
        clock.sleep(0.2)
    try:
        return handle.summary()
    finally:
        handle.close()


def compare(store: str, name: str, overrides: list[str], repeats: int) -> dict[str, Any]:
    pairs = [(one(store, [*overrides, "checkpoint.actors=0"]), one(store, overrides)) for _ in range(repeats)]
    ratios = [logged["step_seconds_median"] / bare["step_seconds_median"] for bare, logged in pairs]
    last = pairs[-1][1]
    per_step = (last["bytes_logged"] + last["bytes_compressor_state"]) / last["steps"]
    row = {
        "case": name,
        "step_ms_without": [round(1e3 * bare["step_seconds_median"], 1) for bare, _ in pairs],
        "step_ms_with": [round(1e3 * logged["step_seconds_median"], 1) for _, logged in pairs],
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "stall": [round(logged["stall_fraction"], 4) for _, logged in pairs],
        "log_cpu_share": [round(run["log_cpu_seconds"] / run["train_cpu_seconds"], 3) for _, run in pairs],
        "log_bytes_a_step": round(last["bytes_logged"] / last["steps"]),
        "snapshot_bytes_a_step": round(last["bytes_compressor_state"] / last["steps"]),
        "full_checkpoint_over_step": round(last["bytes_full_checkpoint"] / per_step, 1),
        "same_digest": len({run["digest"] for pair in pairs for run in pair}) == 1,
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    own = session.connect(load(JOB))
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = [compare(f"file:{folder}", name, [*o, *sys.argv[2:]], repeats) for name, o in CASES.items()]
    finally:
        session.disconnect(own)
    print(f"\n{'case':16} {'ratio':>7} {'spread':>15} {'stall':>8} {'log cpu':>8} {'full / step':>12}")
    for row in rows:
        spread = "-".join(f"{value:.3f}" for value in row["ratio_spread"])
        stall, share = statistics.median(row["stall"]), statistics.median(row["log_cpu_share"])
        print(f"{row['case']:16} {row['ratio']:7.3f} {spread:>15} {stall:8.4f} {share:8.3f}", end="")
        print(f" {row['full_checkpoint_over_step']:12.1f}")


if __name__ == "__main__":
    main()
