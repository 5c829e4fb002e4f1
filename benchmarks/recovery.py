"""From the SIGKILL of a worker to the next step: everstep beside Ray Train V2, on the same model, data and batch.

usage: python benchmarks/recovery.py [--repeats 10] [--parameters 1m|10m|tiny] [--checkpoint-every 50] [--nodes [3]]
           [--folder FOLDER]

Two workers train char_lm; one of them is killed by its process id, from outside, in a run of its own:
  ours, the survivor goes on   workers.min = 1, no spare: it trains alone until a new worker has been made and joins.
  ours, a warm spare joins     workers.min = 2, one spare: the next step is one of two workers.
  Ray Train V2                 TorchTrainer, DistributedDataParallel on gloo, FailureConfig(max_failures=-1), a
                               checkpoint every so many steps, else as it comes; killed at another place between two
                               checkpoints each time, as how far it goes back depends on that.
A repeat runs all three, one after the other in one session of Ray, so that a drift of the machine hits all alike;
ratios are of one repeat, as median and spread. Ours are read from the run's log, Ray Train's from what its workers
write down.

With --nodes: a whole node is lost, raylet and all, in a cluster of three raylets on this machine; ours only.

Lines of JSON, then tables. No process of it is left, also after Ctrl-C. `recovery_*.py` are its parts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import recovery_nodes
import recovery_ours
import recovery_train
import torch
from recovery_ours import SPARE, SURVIVOR, Case

from everstep.actors import session
from everstep.core.ids import new_id
from everstep.tasks.char_lm import SIZES, CharLM

Row = dict[str, Any]
CASES = (SURVIVOR.name, SPARE.name, recovery_train.NAME)
FAREWELL_S = 10.0  # for processes that end by themselves when their Ray does


def show(section: str, repeat: int, row: Row) -> Row:
    print(json.dumps({"section": section, "repeat": repeat, **row}), flush=True)
    return {"repeat": repeat, **row}


def workers(options: argparse.Namespace, folder: str) -> Iterator[Row]:
    """Lose one worker of two, in each case once a repeat."""
    store, size = f"file:{folder}/runs", options.parameters

    def ours(case: Case) -> Callable[[int], Row]:
        return lambda repeat: recovery_ours.measure(case, store, size, repeat)

    def theirs(repeat: int) -> Row:
        return recovery_train.measure(folder, size, options.checkpoint_every, repeat, options.repeats)

    own = session.connect(SPARE.settings(store, size))
    try:
        for repeat in range(options.repeats):
            for measure in (ours(SURVIVOR), ours(SPARE), theirs):
                yield show("worker", repeat, measure(repeat))
    finally:
        session.disconnect(own)


def of(rows: list[Row], case: str, key: str) -> list[Any]:
    """Return one value a repeat."""
    return [row[key] for row in rows if row["case"] == case]


def between(values: list[Any], digits: int = 2) -> str:
    """Median and spread."""
    if not values:
        return "-"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def worker_table(rows: list[Row]) -> None:
    heads = ("next step s", "new ground s", "two workers s", "steps again", "step ms", "next: RT/ours", "new: RT/ours")
    print("\n" + f"{'one of two workers is killed':30}" + "".join(f"{head:>21}" for head in heads))
    for case in CASES:
        cells = [between(of(rows, case, key)) for key in ("next_step_s", "new_step_s", "two_again_s")]
        cells += [between(of(rows, case, "steps_again"), 0), between(of(rows, case, "step_ms"), 0)]
        for key in ("next_step_s", "new_step_s"):
            ratios = [theirs / ours for theirs, ours in zip(of(rows, CASES[2], key), of(rows, case, key), strict=True)]
            cells.append(between(ratios, 1))
        print(f"{case:30}" + "".join(f"{cell:>21}" for cell in cells))
    print(
        "next step: from SIGKILL; new ground: the first step that had not been finished before; steps again: finished"
    )
    print("ones, without the one in flight; RT: Ray Train V2")


def node_table(rows: list[Row]) -> None:
    heads = ("noticed s", "group stands s", "next step s", "GCS: dead s", "steps again", "runs")
    print("\n" + f"{'lost':44}" + "".join(f"{head:>21}" for head in heads))
    for case in sorted({row["case"] for row in rows}):
        cells = [between(of(rows, case, key)) for key in ("noticed_s", "group_s", "next_step_s", "gcs_dead_s")]
        cells += [between(of(rows, case, "steps_again"), 0), str(len(of(rows, case, "steps_again")))]
        print(f"{case:44}" + "".join(f"{cell:>21}" for cell in cells))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="of losing a worker; 0 leaves that part out")
    parser.add_argument("--parameters", choices=list(SIZES), default="1m", help="the size of char_lm")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps between checkpoints of Ray Train")
    parser.add_argument("--nodes", type=int, nargs="?", const=3, default=0, help="how often to lose a node; 3 if bare")
    parser.add_argument("--folder", help="where to put everything; default: the system's temporary folder")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    mark = os.environ[recovery_nodes.MARK] = new_id()
    signal.signal(signal.SIGTERM, lambda *_: exit(143))  # so that it, too, ends everything
    count = sum(parameter.numel() for parameter in CharLM(size=options.parameters).model().parameters())
    setup = {"parameters": count, "batch": recovery_ours.BATCH, "checkpoint_every": options.checkpoint_every,
             "cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}  # fmt: skip
    show("setup", 0, setup)
    try:
        with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as folder:
            lost = list(workers(options, folder)) if options.repeats else []
            gone = (
                recovery_nodes.measure(f"file:{folder}/runs", options.parameters, options.nodes, show)
                if options.nodes
                else []
            )
    finally:
        recovery_nodes.end_all(mark, FAREWELL_S)
    if lost:
        worker_table(lost)
    if gone:
        node_table(gone)


if __name__ == "__main__":
    main()
