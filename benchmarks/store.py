"""What the store costs and gives back: saving, restoring and replaying, beside torch.save and distributed checkpoints.

usage: python benchmarks/store.py [--repeats 5] [--shards 4] [--steps 0,10,50] [--dense-steps 0,10]
           [--segment-steps 10] [--base-interval 50] [--step-seconds S] [--batch 4x128] [--folder FOLDER]
           [--live-seconds 120] [--live-step-seconds 2] [--live-base-interval 12] [--max-lag 5] [--s3 s3://bucket/prefix]
           [--layers 12] [--width 768] [--heads 12] [--vocabulary 50257] [--context 1024]

Shapes of GPT-2 small with AdamW (`gpt2_shapes.py`), one process, the chain driven as a checkpoint actor drives it.
Gradients are drawn at random. Every way to restore runs in a process of its own, as after a crash, with its files in
the page cache. Each repeat measures all of them once, one after the other, so that a drift of the machine hits all
alike; ratios are of one repeat, as median and spread. Lines of JSON, then a table.

A smaller run: python benchmarks/store.py --layers 2 --width 128 --heads 4 --vocabulary 2000 --context 128 --repeats 2
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import live_log
import torch
import torch.distributed.checkpoint as dcp
from gpt2_log import CASES, Log, Plan, restored, timed
from gpt2_shapes import Gpt2

from everstep.core.ids import new_id
from everstep.storage.folder import FolderStore
from everstep.storage.store import open_store

SIZES = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "context": 1024}


def spread(values: list[float], digits: int = 3) -> list[float]:
    """Median, lowest, highest."""
    return [round(value, digits) for value in (statistics.median(values), min(values), max(values))]


def show(section: str, case: str, **facts: Any) -> dict[str, Any]:
    row = {"section": section, "case": case, **facts}
    print(json.dumps(row), flush=True)
    return row


def needs(options: argparse.Namespace, parameters: int) -> int:
    """The bytes of disk that a run takes: bases and other checkpoints of 12 bytes a parameter, dense records of 4."""
    return int(1.1 * parameters * (12 * 7 + 4 * (max(options.dense_steps) + 1)) + (1 << 30))


def save_log(log: Log, steps: list[int], step_seconds: float) -> dict[str, Any]:
    """(a) Bytes and seconds a step; (b) requests and bytes an hour, counted over whole intervals between bases."""
    store, count = log.store, max(steps)
    base_s, _ = timed(log.put_bases)
    base_bytes = store.bytes["BaseKey"]
    store.requests.clear()
    store.bytes.clear()
    log.digests[1] = log.live.digest()
    log_s = rolled_s = 0.0
    for first, last in zip([0, *steps], steps, strict=False):
        took = log.write_steps(last - first)
        log_s, rolled_s = log_s + took[0], rolled_s + took[1]
        log.digests[1 + last] = log.live.digest()
    log.forget()
    hours = count * step_seconds / 3600
    puts = sum(n for kind, n in store.requests.items() if kind.startswith("put"))
    return show(
        "save",
        log.case,
        bytes_a_step=round(store.bytes["SegmentKey"] / count),
        seconds_a_step=round(log_s / count, 4),
        state_bytes=base_bytes,
        state_seconds=round(base_s, 3),
        rolling_bases_with_merging_seconds=round(rolled_s, 3),
        steps=count,
        segment_steps=log.plan.segment_steps,
        base_interval=log.plan.base_interval,
        step_seconds=round(step_seconds, 3),
        requests=dict(store.requests),
        puts_an_hour=round(puts / hours),
        lists_and_gets_an_hour=round((store.requests["list"] + store.requests["get"]) / hours),
        log_bytes_an_hour=round(store.bytes["SegmentKey"] / hours),
        base_bytes_an_hour=round(store.bytes["BaseKey"] / hours),
    )


def files_of(path: str) -> list[str]:
    inside = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    return inside or [path]


def warm(path: str) -> None:
    """Bring files into the page cache, where memory pressure may have driven them from."""
    room = bytearray(1 << 20)
    for name in files_of(path) if path else ():
        with open(name, "rb", buffering=0) as file:
            while file.readinto(room):
                pass


def sync(path: str) -> None:
    for name in files_of(path):
        with open(name, "rb") as file:
            os.fsync(file.fileno())


def save_others(state: Mapping[str, torch.Tensor], folder: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Write the same state with torch.save and as a distributed checkpoint; a step's checkpoint is the whole state."""
    plain, parts = os.path.join(folder, "state.pt"), os.path.join(folder, "dcp")
    acts: dict[str, tuple[str, Callable[[], Any]]] = {
        "torch.save": (plain, lambda: torch.save(dict(state), plain)),
        "dcp.save": (parts, lambda: dcp.save(dict(state), storage_writer=writer_to(parts), no_dist=True)),
    }
    for name, (path, act) in acts.items():
        pairs = [(timed(act)[0], timed(lambda path=path: sync(path))[0]) for _ in range(repeats)]  # type: ignore[misc]
        size = sum(map(os.path.getsize, files_of(path)))
        unsynced, synced = spread([pair[0] for pair in pairs]), spread([sum(pair) for pair in pairs])
        yield show("save", name, state_bytes=size, state_seconds_unsynced=unsynced, state_seconds=synced[0])


def writer_to(path: str) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(path, sync_files=False)  # synced afterwards, as a whole


def load_torch(folder: str) -> float:
    return timed(lambda: torch.load(os.path.join(folder, "state.pt"), weights_only=True))[0]


def load_dcp(folder: str, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> float:
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")

    def load() -> None:
        state = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        dcp.load(state, checkpoint_id=os.path.join(folder, "dcp"), no_dist=True)

    return timed(load)[0]


class PlainTraining:
    """The same model in plain torch: what a step costs that is recomputed instead of replayed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.samples, self.tokens = options.batch
        self.task = Gpt2(options.layers, options.width, options.heads, options.vocabulary, options.context)
        torch.manual_seed(0)
        self.model = self.task.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.task.loss(self.model, self.task.batch(self.samples, self.tokens)).backward()
        self.optimizer.step()


def measure(
    repeats: int,
    folder: str,
    logs: Mapping[str, tuple[Log, list[int]]],
    training: PlainTraining,
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> dict[str, list[float]]:
    """Time every way to get a state back, and a plain step, in turn; by name, one value a repeat."""
    acts: dict[str, tuple[str, Callable[..., float], tuple[Any, ...]]] = {
        "torch.load": (f"{folder}/state.pt", load_torch, (folder,)),
        "dcp.load": (f"{folder}/dcp", load_dcp, (folder, dict(shapes))),
    }
    for case, (log, steps) in logs.items():
        root = log.store.inner.root
        acts |= {f"{case} {after}": (root, restored, (log.plan, root, case, after)) for after in steps}
    times: dict[str, list[float]] = {name: [] for name in (*acts, "step")}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as fresh:
        for repeat in range(repeats):
            times["step"].append(timed(training.step)[0])
            for name, (path, act, given) in acts.items():
                if act is restored:
                    log = logs[given[2]][0]
                    given = (*given, None if repeat else log.digests[1 + given[3]])
                warm(path)
                times[name].append(fresh.submit(act, *given).result())
            show("repeat", str(repeat), **{name: round(values[-1], 3) for name, values in times.items()})
    return times


def restore_rows(case: str, steps: list[int], times: Mapping[str, list[float]]) -> Iterator[dict[str, Any]]:
    """(a) restore = load + r K: both terms, beside torch.load and recomputing."""
    loads = times[f"{case} 0"]
    for after in steps:
        rows = list(zip(times[f"{case} {after}"], loads, times["torch.load"], times["dcp.load"], times["step"]))  # noqa: B905
        replays = [(total - load) / after for total, load, *_ in rows] if after else []
        recomputed = [(plain + after * step) / total for total, _, plain, _, step in rows]
        yield show(
            "restore",
            case,
            steps=after,
            seconds=spread([row[0] for row in rows]),
            load_seconds=spread(loads),
            replay_seconds_a_step=spread(replays, 4) if replays else None,
            over_torch_load=spread([total / plain for total, _, plain, _, _ in rows]),
            over_dcp_load=spread([total / other for total, _, _, other, _ in rows]),
            load_and_recompute_over_restore=spread(recomputed, 2),
            step_over_replay=spread([row[4] / r for row, r in zip(rows, replays, strict=True)], 1) if replays else None,
        )


def live(options: argparse.Namespace, folder: str) -> Iterator[dict[str, Any]]:
    """A log that is written while steps come, on the folder and on S3: evenness of the base writes, durable lag."""
    sizes = {name: getattr(options, name) for name in SIZES}
    plan = Plan(sizes, options.shards, options.live_segment_steps, options.live_base_interval)
    urls = {"folder": f"file:{folder}/live"} | ({"S3": f"{options.s3}/{new_id()}"} if options.s3 else {})
    for case, url in urls.items():
        log = Log(plan, open_store(url), "topk 1 %")
        yield show(**live_log.measure(log, case, options.live_step_seconds, options.live_seconds, options.max_lag))
        log.forget()


def table(rows: list[dict[str, Any]], times: Mapping[str, list[float]]) -> None:
    heads = ("state MB", "state s", "MB/step", "ms/step", "PUT/h", "log GB/h", "bases GB/h")
    print("\n" + f"{'save':12}" + "".join(f"{head:>11}" for head in heads))
    for row in (row for row in rows if row["section"] == "save"):
        cells = [f"{row['state_bytes'] / 1e6:.1f}", f"{row['state_seconds']:.2f}"]
        if "bytes_a_step" in row:
            cells += [
                f"{row['bytes_a_step'] / 1e6:.2f}",
                f"{1e3 * row['seconds_a_step']:.1f}",
                str(row["puts_an_hour"]),
            ]
            cells += [f"{row[name] / 1e9:.1f}" for name in ("log_bytes_an_hour", "base_bytes_an_hour")]
        print(f"{row['case']:12}" + "".join(f"{cell:>11}" for cell in cells))
    heads = ("K", "s", "load s", "r ms", "/ torch.load", "/ dcp.load", "step / r")
    print("\n" + f"{'restore':12}" + "".join(f"{head:>20}" for head in heads))
    for row in (row for row in rows if row["section"] == "restore"):
        replay, gain = row["replay_seconds_a_step"], row["step_over_replay"]
        cells = [str(row["steps"]), between(row["seconds"]), between(row["load_seconds"])]
        cells += [between([1e3 * value for value in replay], 0) if replay else "-"]
        cells += [between(row["over_torch_load"]), between(row["over_dcp_load"]), between(gain, 1) if gain else "-"]
        print(f"{row['case']:12}" + "".join(f"{cell:>20}" for cell in cells))
    for name in ("torch.load", "dcp.load", "step"):
        print(f"{name:12}" + f"{between(spread(times[name])):>40} s")


def live_table(rows: list[dict[str, Any]]) -> None:
    heads = ("base MB/s", "max/mean", "lag steps", "lag s", "max_lag_s", "CPU")
    print("\n" + f"{'live':12}" + "".join(f"{head:>16}" for head in heads) + "   (lag: p50 / p99)")
    for row in rows:
        cells = [f"{row['base_rate_mean'] / 1e6:.1f}", f"{row['max_over_mean']:.2f}"]
        cells += [f"{row['lag_steps_p50']} / {row['lag_steps_p99']}", f"{row['lag_s_p50']} / {row['lag_s_p99']}"]
        cells += [f"{row['max_lag_s']:g}", f"{row['cpu_share']:.2f}"]
        print(f"{row['case']:12}" + "".join(f"{cell:>16}" for cell in cells))


def between(values: list[float], digits: int = 2) -> str:
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(*values, d=digits)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"shards": 4, "repeats": 5, "segment_steps": 10, "base_interval": 50}
    for name, value in (SIZES | numbers).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    steps = {"type": lambda text: sorted({0, *map(int, text.split(","))})}
    parser.add_argument("--steps", default=[0, 10, 50], help="of the sparse log", **steps)
    parser.add_argument("--dense-steps", default=[0, 10], help="of the dense log: 4 bytes a parameter each", **steps)
    parser.add_argument("--batch", default=(4, 128), type=lambda text: tuple(map(int, text.split("x"))))
    parser.add_argument("--step-seconds", type=float, help="for what an hour holds; default: the measured step")
    for name, value in {"live-seconds": 120.0, "live-step-seconds": 2.0, "max-lag": 5.0}.items():
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--live-base-interval", type=int, default=12)
    parser.add_argument("--live-segment-steps", type=int, default=16)
    parser.add_argument("--s3", help="s3://bucket/prefix to measure the live log on as well; see README, Stores")
    parser.add_argument("--folder", help="where to put everything; default: the system's temporary folder")
    return parser.parse_args()


def run(options: argparse.Namespace, folder: str, training: PlainTraining) -> None:
    for _ in range(3):
        training.step()
    step_seconds = options.step_seconds or statistics.median(timed(training.step)[0] for _ in range(3))
    sizes = {name: getattr(options, name) for name in SIZES}
    rows, logs, threads = [], {}, torch.get_num_threads()
    torch.set_num_threads(1)  # as in a checkpoint actor
    for case, steps in zip(CASES, (options.dense_steps, options.steps), strict=True):
        interval = min(options.base_interval, max(steps))
        plan = Plan(sizes, options.shards, min(options.segment_steps, interval), interval)
        log = Log(plan, FolderStore(os.path.join(folder, case.partition(" ")[0])), case)
        rows.append(save_log(log, steps, step_seconds))
        state = log.live.tensors()
        logs[case] = (log, steps)
        del log.live
    rows += save_others(state, folder, options.repeats)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    del state
    torch.set_num_threads(threads)
    times = measure(options.repeats, folder, logs, training, shapes)
    show("step", "plain torch", batch=options.batch, seconds=spread(times["step"]))
    for case, (_, steps) in logs.items():
        rows += restore_rows(case, steps, times)
    table(rows, times)
    del logs
    gc.collect()
    live_table(list(live(options, folder)))


def main() -> None:
    options = parsed()
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    training = PlainTraining(options)
    parameters = sum(param.numel() for param in training.model.parameters())
    show("setup", "model", parameters=parameters, batch=options.batch, torch=torch.__version__,
         cores=os.cpu_count(), threads=torch.get_num_threads(), shards=options.shards)  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        free, needed = shutil.disk_usage(folder).free, needs(options, parameters)
        if free < needed:
            raise SystemExit(
                f"{folder}: expected {needed >> 30} GiB free, got {free >> 30}; use --folder or less steps"
            )
        run(options, folder, training)


if __name__ == "__main__":
    main()
