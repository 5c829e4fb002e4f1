"""What the command prints: the progress of a run, notable events, tables, errors. Rich where a person is looking."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from everstep.core import clock

POLL_S = 0.1
LINE_EVERY_S = 5.0
ENDED = frozenset({"done", "failed", "stopped"})
LEFT = "left"  # what `follow` returns when the user stopped following a run that goes on


class Followed(Protocol):
    """The part of a run's handle that following it takes."""

    def progress(self) -> dict[str, Any]:
        """Return the state of the run now."""

    def stop(self) -> None:
        """Ask the run to end after the step in flight."""


class Interrupts:
    """Counts Ctrl-C: the first one asks, the second one raises `KeyboardInterrupt` at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: object) -> None:
        """Take one SIGINT."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Count Ctrl-C while the context lasts, instead of being stopped by it."""
    counted = Interrupts()
    try:
        before = signal.signal(signal.SIGINT, counted)
    except ValueError:  # not the main thread: Ctrl-C does not come here
        yield counted
        return
    try:
        yield counted
    finally:
        signal.signal(signal.SIGINT, before)


class _Bar:
    """A progress bar on the terminal, with notable events as lines above it."""

    def __init__(self, run: str, steps: int) -> None:
        self._out = Console(highlight=False)
        text = "{task.description}  step {task.completed:.0f}/{task.total:.0f}  {task.fields[facts]}"
        self._progress = Progress(BarColumn(bar_width=24), TextColumn(text), console=self._out)
        self._task: TaskID = self._progress.add_task("starting", total=steps, facts="")
        self._out.print(f"run [bold]{escape(run)}[/bold]")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        """Print one line above the bar."""
        self._progress.console.print(escape(text))

    def show(self, now: Mapping[str, Any]) -> None:
        """Draw the state of the run."""
        self._progress.update(
            self._task, completed=now["lsn"], total=now["steps"], description=now["state"], facts=_facts(now)
        )


class _Lines:
    """One plain line every few seconds on stderr, for logs and pipes."""

    def __init__(self, run: str, steps: int) -> None:
        self._steps = steps
        self._next = 0.0
        self._state = ""
        note(f"run {run}")

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def line(self, text: str) -> None:
        """Print one line."""
        note(text)

    def show(self, now: Mapping[str, Any]) -> None:
        """Print the state of the run when it changed or some seconds have passed."""
        if clock.monotonic() < self._next and now["state"] == self._state:
            return
        self._next, self._state = clock.monotonic() + LINE_EVERY_S, now["state"]
        note(f"{now['state']}  step {now['lsn']}/{now['steps']}  {_facts(now)}")


def _facts(now: Mapping[str, Any]) -> str:
    loss, speed = now.get("loss"), now.get("steps_per_s")
    parts = [
        f"loss {loss:.4f}" if loss is not None else "",
        f"{speed:.1f} steps/s" if speed else "",
        f"{now['world_size']} workers" if now.get("world_size") else "",
        f"durable {max(now['lsn'] - now['durable_lsn'], 0)} behind" if now.get("durable_lsn") is not None else "",
    ]
    return "  ".join(filter(None, parts))


def follow(handle: Followed, run: str, steps: int, again: str, as_json: bool, *, leave: bool = False) -> str:
    """Show a run until it ends and return its last state.

    The first Ctrl-C asks the run to stop after its step, the second one raises; with `leave` the first one is the end
    of following, and the run goes on.

    Args:
        handle: the run.
        run: its name, to print.
        steps: its length.
        again: the command that resumes it, to print.
        as_json: leave stdout to the JSON object.
        leave: only look.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed twice.
    """
    bar = sys.stdout.isatty() and not as_json
    shown, stopping = 0, False
    with interrupts() as pressed, _Bar(run, steps) if bar else _Lines(run, steps) as view:
        while True:
            now = handle.progress()
            for text in now["events"][shown:]:
                view.line(text)
            shown = len(now["events"])
            view.show(now)
            if now["state"] in ENDED:
                return str(now["state"])
            if pressed.asked and leave:
                return LEFT
            if pressed.asked and not stopping:
                stopping = True
                view.line(f"stopping after this step ... (Ctrl-C again gives up at once; resume with: {again})")
                handle.stop()
            clock.sleep(POLL_S)


def summary(facts: Mapping[str, Any]) -> None:
    """Print what a run came to: its numbers, then its faults."""
    shown = {key: value for key, value in facts.items() if key != "faults"} | _derived(facts)
    table(shown, f"run {facts.get('run', '')}")
    faults = facts.get("faults") or []
    if not faults:
        return
    grid = Table(title="faults", title_justify="left", title_style="bold")
    columns = {
        "kind": "kind",
        "step": "step",
        "tier": "rebuilt from",
        "steps_lost": "steps lost",
        "seconds_to_group_formed": "s to group formed",
        "seconds_to_next_step": "s to next step",
        "exactness": "exactness",
    }
    for heading in columns.values():
        grid.add_column(heading)
    for fault in faults:
        grid.add_row(*(escape(_text(key, fault.get(key))) for key in columns))
    _stdout().print(grid)


def _derived(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the two ratios that people ask for: bytes against a full checkpoint, processor time against training."""
    out = {}
    logged = facts.get("bytes_logged", 0) + facts.get("bytes_compressor_state", 0)
    steps, full = facts.get("steps"), facts.get("bytes_full_checkpoint")
    if logged and steps and full:
        share = full * steps / logged
        out["log of one step"] = f"{logged / steps:,.0f} bytes, snapshots included: 1/{share:.1f} of a full checkpoint"
    log_cpu, train_cpu = facts.get("log_cpu_seconds"), facts.get("train_cpu_seconds")
    if log_cpu is not None and train_cpu:
        out["log cpu / train cpu"] = f"{log_cpu / train_cpu:.3f}"
    return out


def table(facts: Mapping[str, Any], title: str) -> None:
    """Print a mapping as two columns; a list of mappings below it as a table of its own."""
    lists = {key: value for key, value in facts.items() if _is_rows(value)}
    grid = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False)
    grid.add_column()
    grid.add_column(overflow="fold")
    for key, value in facts.items():
        if key not in lists:
            grid.add_row(escape(key), escape(_text(key, value)))
    _stdout().print(grid)
    for key, found in lists.items():
        rows(found, key)


def rows(found: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print mappings as the rows of a table; a column that is empty in all of them is left out."""
    grid = Table(title=escape(title.replace("_", " ")), title_justify="left", title_style="bold")
    names = list(dict.fromkeys(name for row in found for name in row))
    names = [name for name in names if any(row.get(name) not in (None, [], {}) for row in found)]
    for name in names:
        number = all(isinstance(row.get(name), int | float | None) for row in found)
        grid.add_column(name.replace("_", " "), overflow="fold", justify="right" if number else "left")
    for row in found:
        grid.add_row(*(escape(_text(name, row.get(name))) for name in names))
    _stdout().print(grid)


def log(facts: Mapping[str, Any]) -> None:
    """Print what a run's log holds."""
    hidden = {"rounds", "kept", "bases", "evaluations"}
    lists = {"kept": "kept steps", "rounds": "rounds"}
    table({key: value for key, value in facts.items() if key not in hidden and value not in ([], None)},
          f"log of {facts['run']}")  # fmt: skip
    for key, title in lists.items():
        if facts[key]:
            rows([{**row, "last": "the end"} if row["last"] is None else row for row in facts[key]], title)


def runs(found: Sequence[Mapping[str, Any]], url: str) -> None:
    """Print the runs of a store, and below what is wrong with some."""
    if not found:
        note(f"there are no runs in {url}")
        return
    names = {"generation": "gen", "last_restorable": "up to step"}
    shown = [{names.get(key, key): value for key, value in row.items() if key != "problem"} for row in found]
    rows([{**row, "created": (row["created"] or "")[:16].replace("T", " ")} for row in shown], f"runs in {url}")
    for row in found:
        if row["problem"]:
            note(f"{row['run']}: {row['problem']}")


def verified(found: Mapping[str, Any]) -> None:
    """Print what proving a run came to; what is wrong with it is printed as an error."""
    table({key: value for key, value in found.items() if key not in ("problems", "drill", "replayed")},
          f"verification of {found['run']}")  # fmt: skip
    if found.get("drill"):
        table(found["drill"], "drill: the newest state restored into memory")
    if not found["problems"]:
        note(f"run {found['run']} is whole: nothing wrong in {found['objects_checked']} objects")


def forked(facts: Mapping[str, Any]) -> None:
    """Print what a fork starts from, and the next command."""
    table({key: value for key, value in facts.items() if key not in ("next", "parent_snapshots")},
          f"fork {facts['run']}")  # fmt: skip
    if facts["residual"] == "zero":
        kept = ", ".join(map(str, facts["parent_snapshots"])) or "none"
        note(f"error feedback starts at zero: the parent has no snapshot of its residual at this step (it has: {kept})")
    if facts["steps"] <= facts["step"]:
        note(f"run.steps is {facts['steps']}: add --set run.steps=N to the next command to go further")
    note(f"next: {facts['next']}")


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _text(key: str, value: Any) -> str:
    """Return a value as a person reads it; the unit is in the key."""
    if value is None:
        return "-"
    if key.startswith("bytes") and isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if key.endswith("fraction") and isinstance(value, float):
        return f"{100 * value:.2f} %"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(_text("", part) for part in value) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(name, part)}" for name, part in value.items()) or "-"
    return str(value)


def _stdout() -> Console:
    """Return a console on the stdout of now; wide enough for a digest where nobody sets a width."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 100)


def note(text: str) -> None:
    """Print one plain line on stderr."""
    print(text, file=sys.stderr, flush=True)


def complain(message: str, hint: str, *, bare: bool = False) -> None:
    """Print an error on stderr and what to do next; `bare` when the message is somebody's traceback."""
    note(message if bare else f"error: {message}")
    if hint:
        note(f"next: {hint}")


def json_line(answer: Mapping[str, Any]) -> str:
    """Return one line of strict JSON; a number JSON cannot hold becomes null."""
    return json.dumps(_strict(answer), allow_nan=False, default=str)


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    return value


def first_line(thing: object) -> str:
    """Return the first line of a docstring, or nothing."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]
