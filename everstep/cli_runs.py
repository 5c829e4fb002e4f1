"""The commands `everstep runs ...`: the runs of a store."""

from __future__ import annotations

from typing import Any

import click

from everstep import console
from everstep.cli_shared import json_option, located, run_argument, store_at, store_option, store_url
from everstep.core.errors import UserError


@click.group()
def runs() -> None:
    """List the runs of a store, or delete one."""


@runs.command()
@click.argument("where", metavar="[STORE]", required=False)
@store_option
@json_option
def ls(where: str | None, store: str, as_json: bool) -> dict[str, Any]:
    """List the runs in STORE, damaged ones too."""
    from everstep.storage.runs import list_runs

    url = store_url(where or store)
    found = list_runs(store_at(url))
    if not as_json:
        console.runs(found, url)
    return {"store": url, "runs": found}


@runs.command()
@run_argument
@click.option(
    "--force", is_flag=True, help="Delete a run that has not ended, too; whatever still writes it is stopped."
)
@json_option
def rm(run: str, store: str, force: bool, as_json: bool) -> dict[str, Any]:
    """Delete RUN, all but what forks of it use."""
    from everstep.storage.chain import Chain
    from everstep.storage.collect import delete_run
    from everstep.storage.runs import forks_of

    url, name = located(run, store)
    log = Chain.open(store_at(url), name, deleted_too=True)
    if log.manifest.state not in ("closed", "deleted") and not force:
        raise UserError(
            f"run {name} has not ended (state {log.manifest.state!r}, generation {log.manifest.generation})",
            hint=f"end it first, or: everstep runs rm {name} --store {url} --force",
        )
    done = delete_run(log)
    forks = forks_of(log)
    facts = {
        "run": name,
        "store": url,
        "deleted_objects": done.deleted,
        "bytes": done.bytes,
        "gone": not Chain.exists(log.store, name),
        "stays_for_forks": forks,
    }
    if not as_json:
        console.table(facts, f"deleted {name}")
        if forks:
            names = ", ".join(str(fork["run"]) for fork in forks)
            console.note(f"what {names} uses stays; to remove it, delete the forks, then: everstep runs rm {name}")
    return facts
