"""The command `everstep`: reads the command line, asks the rooms below, prints what they answer.

Every command returns one dictionary; with `--json` it is the last line on stdout, errors included. Exit codes: 0 done,
1 something broke, 2 the request must change, 130 stopped by Ctrl-C. Ray and torch are imported by the commands that
need them.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

import everstep
from everstep import console
from everstep.core.errors import EverstepError, UserCodeFailed, UserError

if TYPE_CHECKING:
    from everstep.platform.settings import JobSettings
    from everstep.storage.chain import Chain
    from everstep.training.recipe import Recipe

F = TypeVar("F", bound=Callable[..., Any])

STORE_VARIABLE = "EVERSTEP_STORE"
DEFAULT_STORE = "file:./everstep-runs"
INTERRUPTED = 130


class Command(click.Group):
    """A click group that turns every outcome into the promised output and exit code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        """Run one command line and exit."""
        words = list(sys.argv[1:] if args is None else args)
        as_json, debug = "--json" in words, "--debug" in words
        options["standalone_mode"] = False  # errors come here, not to click
        words = [word for word in words if word != "--debug"]  # it may stand anywhere
        try:
            answer, code = super().main(words, *rest, **options), 0
            if isinstance(answer, dict):
                code = INTERRUPTED if answer.pop("interrupted", False) else 0
            else:
                answer, code = None, answer if isinstance(answer, int) else 0
        except Exception as error:  # the last place that can still say something
            if debug:
                traceback.print_exc()
            answer, code = _report(error)
        if as_json and answer is not None:
            print(console.json_line(answer), flush=True)
        sys.exit(code)


def _report(error: Exception) -> tuple[dict[str, Any], int]:
    """Print an error on stderr; return what `--json` says about it, and the exit code."""
    name, message, hint, code = type(error).__name__, str(error), "", 1
    if isinstance(error, click.Abort):
        message, hint, code = "stopped by Ctrl-C", "", INTERRUPTED
    elif isinstance(error, click.ClickException):
        message, code = error.format_message(), 2
        context = getattr(error, "ctx", None)
        hint = f"see {context.command_path} --help" if context else "see everstep --help"
    elif isinstance(error, EverstepError):
        message, hint, code = error.message, error.hint, error.exit_code
    else:
        message, hint = f"{name}: {message}", "this is a defect of everstep; run it again with --debug to see where"
    console.complain(message, hint, bare=isinstance(error, UserCodeFailed))
    return {"error": {"class": name, "message": message, "hint": hint}, "exit_code": code}, code


def _json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")(command)


def _set_option(command: F) -> F:
    return click.option(
        "--set", "overrides", multiple=True, metavar="A.B=C", help="Change a key of the job file; may be given often."
    )(command)


def _run_argument(command: F) -> F:
    command = click.option(
        "--store", default=DEFAULT_STORE, envvar=STORE_VARIABLE, show_default=True, help="Where the run is kept."
    )(command)
    return click.argument("run", metavar="RUN")(command)


@click.group(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(everstep.__version__, prog_name="everstep")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Train PyTorch models on Ray without losing a finished step.

    RUN is the name of a run in --store, or a path such as ./everstep-runs/NAME.
    """
    here = os.getcwd()
    if here not in sys.path and here != os.path.dirname(everstep.__file__):
        sys.path.append(here)  # so that a job file can name a task in this folder; last, so that it hides nothing


def ask(*words: str) -> dict[str, Any]:
    """Run one command line in this process and return its answer.

    Raises:
        EverstepError: what the command would have reported.
    """
    answer: dict[str, Any] = click.Group.main(main, list(words), "everstep", standalone_mode=False)
    return answer


@main.command()
@click.argument("job", metavar="JOB.toml")
@_set_option
@click.option("--fault", "faults", multiple=True, metavar="KIND@STEP:K=V", help="Inject a fault; may be given often.")
@_json_option
def train(job: str, overrides: tuple[str, ...], faults: tuple[str, ...], as_json: bool) -> dict[str, Any]:
    """Start the run that JOB.toml describes and follow it to its end."""
    from everstep.platform.settings import load, named

    return _follow(named(load(job, overrides, faults), job), None, as_json)


@main.command()
@_run_argument
@click.option("--exact", is_flag=True, help="Go back to the last compressor snapshot and recompute: the same bits.")
@_set_option
@_json_option
def resume(run: str, store: str, exact: bool, overrides: tuple[str, ...], as_json: bool) -> dict[str, Any]:
    """Go on with a run from its log."""
    from everstep.platform.settings import changed_for_resume, from_dict

    store, run = _located(run, store)
    stored = _open_chain(store, run).manifest.settings
    here = from_dict(stored | {"run": stored["run"] | {"store": store}}, where=f"run {run}")
    return _follow(changed_for_resume(here, overrides), "exact" if exact else "resume", as_json)


@main.group()
def chain() -> None:
    """Look at the log of a run, check it, or take a state out of it."""


@chain.command()
@_run_argument
@_json_option
def ls(run: str, store: str, as_json: bool) -> dict[str, Any]:
    """Show what the log of RUN holds."""
    from everstep.training import inspect

    return _shown(inspect.describe(_open_chain(*_located(run, store))), f"log of {run}", as_json)


@chain.command()
@_run_argument
@_json_option
def verify(run: str, store: str, as_json: bool) -> dict[str, Any]:
    """Replay the log of RUN from the store and check every checksum and digest on the way."""
    from everstep.training import inspect

    log = _open_chain(*_located(run, store))
    return _shown(inspect.verify(log, _recipe(log)), f"replay of {run}", as_json)


@chain.command()
@_run_argument
@click.option("--step", default=None, metavar="N|best", help="The step to restore; without it the last durable one.")
@click.option("--out", default=".", show_default=True, type=click.Path(file_okay=False), help="Folder for the files.")
@_json_option
def export(run: str, store: str, step: str | None, out: str, as_json: bool) -> dict[str, Any]:
    """Write the state at one step as safetensors and as a torch state_dict."""
    if step not in (None, "best") and not (step.isdecimal() and int(step) > 0):
        raise UserError(f"--step: expected a number from 1 on or 'best', got {step!r}", hint="as in --step 77")
    wanted = int(step) if step and step != "best" else step
    from everstep.training import inspect

    log = _open_chain(*_located(run, store))
    return _shown(inspect.export(log, _recipe(log), wanted, out), f"export of {run}", as_json)


@main.command()
@_json_option
def tasks(as_json: bool) -> dict[str, Any]:
    """List the tasks a job file can name."""
    from everstep.tasks import TASKS

    found = {name: console.first_line(TASKS.get(name)) for name in TASKS}
    return _shown(found, "tasks (your own: my_pkg.mod:MyTask)", as_json, wrap="tasks")


def _shown(facts: dict[str, Any], title: str, as_json: bool, wrap: str | None = None) -> dict[str, Any]:
    if not as_json:
        console.table(facts, title)
    return {wrap: facts} if wrap else facts


def _follow(settings: JobSettings, how: str | None, as_json: bool) -> dict[str, Any]:
    """Launch a run, watch it until it ends, and return its summary; `interrupted` tells that Ctrl-C ended it."""
    from everstep.actors.run import launch

    again = shlex.join(["everstep", "resume", str(settings.run.name), "--store", settings.run.store])
    handle = launch(settings, resume=how)
    try:
        state = console.follow(handle, settings.run.name or "", settings.run.steps, again, as_json)
        summary: dict[str, Any] = handle.summary()
    finally:
        handle.close()
    if not as_json:
        console.summary(summary)
    if state == "stopped":
        console.note(f"stopped; go on with: {again}")
    return summary | {"interrupted": state == "stopped"}


def _located(run: str, store: str) -> tuple[str, str]:
    """Return (store, run) for what the user called RUN; a path names its own store."""
    path = run.removeprefix("file:").rstrip("/")
    if "/" not in path:
        return store, path
    folder, _, name = path.rpartition("/")
    return folder if "://" in folder else f"file:{folder or '/'}", name


def _recipe(log: Chain) -> Recipe:
    from everstep.actors.spec import recipe_of
    from everstep.platform.settings import from_dict

    return recipe_of(from_dict(log.manifest.settings, where=f"run {log.run}"))


def _open_chain(store: str, run: str) -> Chain:
    from everstep.storage.chain import Chain
    from everstep.storage.store import open_store

    return Chain.open(open_store(store), run)
