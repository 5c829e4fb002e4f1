"""A checkpoint every step without compression: what backward hides of reducing and logging the gradient.

usage: python benchmarks/dense.py [--size 1m|10m|50m] [--steps N] [--repeats N]

The same job three ways, one after the other, as often as asked: without a log; with it; with it, but reducing and
logging only after backward. Reported: median step, what a step waits for its peers and for the log, the share of the
exchange that backward hides, and whether the bits are the same; last, the digest after a worker was killed. Lines of
JSON, then a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from typing import Any

from everstep.actors import session
from everstep.actors.run import launch
from everstep.core import clock
from everstep.core.ids import new_id
from everstep.platform.settings import JobSettings, from_dict, to_dict

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "without a log": {"checkpoint": {"actors": 0}},
    "log, overlapped": {},
    "log, after backward": {"compression": {"overlap": False}},
}


def job(options: argparse.Namespace, store: str, **changes: dict[str, Any]) -> JobSettings:
    data: dict[str, dict[str, Any]] = {
        "run": {"name": f"dense-{new_id()}", "store": store, "steps": options.steps, "digest_every": 0},
        "task": {"name": "char_lm", "size": options.size, "block": 32},
        "batch": {"global_size": 4, "micro_shards": 2},
        "workers": {"spares": 0, "hang_timeout_s": 120.0},
        "checkpoint": {"shards": 8, "queue_bytes": 2 << 30},
    }
    for section, keys in changes.items():
        data[section] = data.get(section, {}) | keys
    return from_dict(data)


def one(settings: JobSettings) -> dict[str, Any]:
    handle = launch(settings, resume=None)
    try:
        while handle.progress()["state"] not in ("done", "failed", "stopped"):
            clock.sleep(0.2)
        return handle.summary()
    finally:
        handle.close()


def row(case: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [run["step_seconds_median"] for run in runs]
    found = {
        "case": case,
        "step_s": [round(step, 4) for step in steps],
        "exchange_s": [round(run["exchange_seconds_median"], 4) for run in runs],
        "stall": [round(run["stall_fraction"], 4) for run in runs],
        "wall_s": [round(run["wall_seconds"], 2) for run in runs],
        "log_mb_a_step": round(runs[-1]["bytes_logged"] / runs[-1]["steps"] / 1e6, 2),
        "digest": runs[-1]["digest"][:12],
    }
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1m")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file:{folder}"
        own = session.connect(job(options, store))
        try:
            runs: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
            for _ in range(options.repeats):
                for case, changes in CASES.items():
                    runs[case].append(one(job(options, store, **changes)))
            fault = {"kind": "kill_worker", "step": options.steps // 2, "rank": 1}
            struck = one(from_dict({**to_dict(job(options, store)), "faults": [fault]}))
        finally:
            session.disconnect(own)
    rows = [row(case, found) for case, found in runs.items()]
    after = statistics.median(rows[2]["exchange_s"])
    bare = statistics.median(rows[0]["step_s"])
    print(f"\n{'case':20} {'step s':>8} {'ratio':>6} {'exchange s':>11} {'hidden':>7} {'stall':>7}")
    for found in rows:
        step, exchange = statistics.median(found["step_s"]), statistics.median(found["exchange_s"])
        hidden = f"{1 - exchange / after:7.0%}" if found is rows[1] else f"{'':7}"
        stall = statistics.median(found["stall"])
        print(f"{found['case']:20} {step:8.4f} {step / bare:6.2f} {exchange:11.4f} {hidden} {stall:7.4f}")
    digests = {found["digest"] for found in rows} | {struck["digest"][:12]}
    print(f"digests, a killed worker included: {'the same' if len(digests) == 1 else sorted(digests)}")


if __name__ == "__main__":
    main()
