"""What the commands share: options, where a run is, opening it, printing what was found."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from everstep import console
from everstep.core.errors import UserError

if TYPE_CHECKING:
    from everstep.actors.run import Handle
    from everstep.platform.settings import JobSettings
    from everstep.storage.chain import Chain
    from everstep.storage.store import Store
    from everstep.training.recipe import Recipe

F = TypeVar("F", bound=Callable[..., Any])

STORE_VARIABLE = "EVERSTEP_STORE"
DEFAULT_STORE = "file:./everstep-runs"


def json_option(command: F) -> F:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")(command)


def set_option(command: F) -> F:
    """Add `--set`."""
    return click.option(
        "--set", "overrides", multiple=True, metavar="A.B=C", help="Change a key of the job file; may be given often."
    )(command)


def fault_option(command: F) -> F:
    """Add `--fault`."""
    return click.option(
        "--fault", "faults", multiple=True, metavar="KIND@STEP:K=V", help="Inject a fault; may be given often."
    )(command)


def store_option(command: F) -> F:
    """Add `--store`."""
    return click.option(
        "--store", default=DEFAULT_STORE, envvar=STORE_VARIABLE, show_default=True,
        help="Where runs are kept: a folder, file:FOLDER or s3://BUCKET/PREFIX.",
    )(command)  # fmt: skip


def run_argument(command: F) -> F:
    """Add the argument RUN and `--store`."""
    return run_argument_as("RUN")(command)


def run_argument_as(metavar: str) -> Callable[[F], F]:
    """Return what adds the argument `run`, shown as `metavar`, and `--store`."""

    def add(command: F) -> F:
        return click.argument("run", metavar=metavar)(store_option(command))

    return add


def shown(facts: dict[str, Any], title: str, as_json: bool, wrap: str | None = None) -> dict[str, Any]:
    """Print facts for a person unless JSON is wanted, and return them."""
    if not as_json:
        console.table(facts, title)
    return {wrap: facts} if wrap else facts


def store_url(text: str) -> str:
    """Return the URL of what the user called a store: a URL, or a folder."""
    scheme, colon, _ = text.partition(":")
    return text if not text or (colon and scheme.isalnum()) else f"file:{text}"


def located(run: str, store: str) -> tuple[str, str]:
    """Return (store, run) for what the user called RUN; a path names its own store."""
    path = run.rstrip("/")
    if "/" not in path.removeprefix("file:"):
        return store_url(store), path.removeprefix("file:")
    folder, _, name = path.rpartition("/")
    return store_url(folder if folder not in ("", "file:") else "file:/"), name


def located_step(run: str, store: str) -> tuple[str, str, int | None]:
    """Return (store, run, step) for what the user called RUN@STEP; None where no step is given."""
    store, name = located(run, store)
    name, at, step = name.partition("@")
    if at and not (step.isdecimal() and name):
        raise UserError(f"{run}: expected RUN@STEP, got the step {step!r}", hint="as in mine@1200")
    return store, name, int(step) if at else None


def seen_through(handle: Handle, settings: JobSettings, as_json: bool, *, leave: bool = False) -> dict[str, Any]:
    """Watch a run until it ends and return its summary; `interrupted` tells that Ctrl-C was the end.

    Args:
        handle: the run.
        settings: of it.
        as_json: leave stdout to the JSON object.
        leave: Ctrl-C ends the watching, not the run.
    """
    name = settings.run.name or ""
    again = resume_command(settings)
    try:
        state = console.follow(handle, name, settings.run.steps, again, as_json, leave=leave)
        if state == console.LEFT:
            console.note(f"no longer following; run {name} goes on")
            return {"run": name, "interrupted": True}
        summary: dict[str, Any] = handle.summary()
    finally:
        handle.close()
    if not as_json:
        console.summary(summary)
    if state == "stopped":
        console.note(f"stopped; go on with: {again}")
    return summary | {"interrupted": state == "stopped"}


def resume_command(settings: JobSettings) -> str:
    """Return the command that goes on with a run."""
    return shlex.join(["everstep", "resume", str(settings.run.name), "--store", settings.run.store])


def open_run(store: str, run: str) -> Chain:
    """Open a run to read it."""
    from everstep.storage.chain import Chain

    return Chain.open(store_at(store), run)


def store_at(url: str) -> Store:
    """Open a store."""
    from everstep.storage.store import open_store

    return open_store(url)


def settings_of(log: Chain, store: str) -> JobSettings:
    """Return the settings that a run was last started with, at the place where it lies now."""
    from everstep.platform.settings import from_dict

    stored = log.manifest.settings
    return from_dict(stored | {"run": stored["run"] | {"store": store}}, where=f"run {log.run}")


def recipe_of(log: Chain) -> Recipe:
    """Return the recipe of a run."""
    return recipe_from(log.manifest.settings)


def recipe_from(settings: Any) -> Recipe:
    """Return the recipe in stored settings."""
    from everstep.actors.spec import recipe_of
    from everstep.platform.settings import from_dict

    return recipe_of(from_dict(settings, where=f"run {settings.get('run', {}).get('name')}"))
