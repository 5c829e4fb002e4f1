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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

import everstep
from everstep import console
from everstep.cli_chain import chain
from everstep.cli_cluster import follow, scale, stop, submit
from everstep.cli_runs import runs
from everstep.cli_shared import STORE_VARIABLE as STORE_VARIABLE
from everstep.cli_shared import (
    fault_option,
    json_option,
    located_step,
    open_run,
    run_argument_as,
    seen_through,
    set_option,
    settings_of,
    shown,
)
from everstep.core.errors import EverstepError, UserCodeFailed, UserError

if TYPE_CHECKING:
    from everstep.platform.settings import JobSettings

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
                code = INTERRUPTED if answer.pop("interrupted", False) else int(answer.get("exit_code", 0))
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
    facts = dict(error.facts) if isinstance(error, EverstepError) else {}
    return facts | {"error": {"class": name, "message": message, "hint": hint}, "exit_code": code}, code


@click.group(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(everstep.__version__, prog_name="everstep")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Train PyTorch models on Ray without losing a finished step.

    RUN is the name of a run in --store, or a path such as ./everstep-runs/NAME or s3://bucket/prefix/NAME.
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
@set_option
@fault_option
@json_option
def train(job: str, overrides: tuple[str, ...], faults: tuple[str, ...], as_json: bool) -> dict[str, Any]:
    """Start the run that JOB.toml describes and follow it to its end."""
    from everstep.platform.settings import load, named

    return _follow(named(load(job, overrides, faults), job), None, as_json)


@main.command()
@run_argument_as("RUN[@STEP]")
@click.option("--exact", is_flag=True, help="Go back to the last compressor snapshot and recompute: the same bits.")
@click.option("--skip-batches", type=click.IntRange(1), metavar="N", help="With @STEP: leave out the next N batches.")
@set_option
@json_option
def resume(
    run: str, store: str, exact: bool, skip_batches: int | None, overrides: tuple[str, ...], as_json: bool
) -> dict[str, Any]:
    """Go on with a run, from its end or from a step.

    With @STEP the run goes back to that step and on another way from there; what it did after it is no more part of it.
    """
    from everstep.platform.settings import changed_for_resume, gone_back
    from everstep.storage.plan import plan_restore

    url, name, step = located_step(run, store)
    log = open_run(url, name)
    if step is None and skip_batches is not None:
        raise UserError(
            f"--skip-batches {skip_batches}: after which step?",
            hint=f"name the step to go back to: everstep resume {run}@STEP --skip-batches {skip_batches}",
        )
    settings = changed_for_resume(settings_of(log, url), overrides)
    if step is not None:
        plan_restore(log.manifest, log.listing(), target=step)  # raises if it is not kept, before anything is started
        settings = gone_back(settings, step, skip_batches or 0)
    return _follow(settings, "exact" if exact else "resume", as_json, at=step)


@main.command()
@run_argument_as("RUN@STEP")
@click.argument("new", metavar="NEW")
@set_option
@json_option
def fork(run: str, new: str, store: str, overrides: tuple[str, ...], as_json: bool) -> dict[str, Any]:
    """Start a new run from a step of another.

    NEW begins with the state of RUN at STEP, in the same store; nothing is copied.
    """
    from everstep.actors.spec import recipe_of
    from everstep.platform.settings import changed_for_fork, to_dict
    from everstep.storage.store import absolute
    from everstep.training.forking import start_fork

    url, name, step = located_step(run, store)
    if step is None:
        raise UserError(f"{run}: from which step?", hint=f"as in everstep fork {run}@1200 {new}")
    parent = open_run(url, name)
    old = settings_of(parent, absolute(url))
    settings = changed_for_fork(old, new, overrides)
    facts = start_fork(parent, step, new, recipe_of(old), recipe_of(settings), to_dict(settings))
    words = ["everstep", "resume", new, "--store", url, *(["--exact"] if facts["residual"] != "none" else [])]
    facts |= {"store": url, "steps": settings.run.steps, "next": shlex.join(words)}
    if not as_json:
        console.forked(facts)
    return facts


for command in (chain, runs, submit, follow, scale, stop):
    main.add_command(command)


@main.command()
@json_option
def tasks(as_json: bool) -> dict[str, Any]:
    """List the tasks a job file can name."""
    from everstep.tasks import TASKS

    found = {name: console.first_line(TASKS.get(name)) for name in TASKS}
    return shown(found, "tasks (your own: my_pkg.mod:MyTask)", as_json, wrap="tasks")


def _follow(settings: JobSettings, how: str | None, as_json: bool, at: int | None = None) -> dict[str, Any]:
    """Launch a run, watch it until it ends, and return its summary; `interrupted` tells that Ctrl-C ended it."""
    from everstep.actors.run import launch

    return seen_through(launch(settings, resume=how, at=at), settings, as_json)
