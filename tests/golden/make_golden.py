"""Write the golden run of the format that this version writes.

    .venv/bin/python -m tests.golden.make_golden tests/golden/v2

A folder that exists is refused: an old golden run is never written again, because it shows what an older everstep
wrote. When a format changes, add a folder (`v3`) and leave the others as they are. Ids, times and salts are counted
instead of drawn, so two calls write the same bytes on the same kind of processor and versions of torch and pyarrow.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from everstep.storage import encrypted
from everstep.storage.folder import TEMPORARY, FolderStore
from tests.faults.history import History, recipe

PLAIN, SEALED = "golden", "golden-sealed"
SECRET = bytes(range(32))  # of the encrypted twin; a key in a repository protects nothing
CUT = 6  # the last step of the first generation
STEPS = 12


@contextlib.contextmanager
def key_loaded() -> Iterator[str]:
    """Have the twin's key in the environment; yields its id."""
    with mock.patch.dict(os.environ, {encrypted.VARIABLE: base64.b64encode(SECRET).decode()}):
        yield encrypted.Key(SECRET).id


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Ids, times and salts that count."""
    ids, walls, clocks, salts = (itertools.count(1) for _ in range(4))
    new_id = mock.Mock(side_effect=lambda: f"{next(ids):012x}")
    with contextlib.ExitStack() as stack:
        for module in ("chain", "folder", "events", "pins"):
            stack.enter_context(mock.patch(f"everstep.storage.{module}.new_id", new_id))
        stack.enter_context(mock.patch("everstep.core.clock.wall", lambda: 1.7e9 + next(walls)))
        stack.enter_context(mock.patch("everstep.core.clock.monotonic", lambda: next(clocks) / 1024))
        stack.enter_context(mock.patch("secrets.token_bytes", lambda size: next(salts).to_bytes(size, "big")))
        yield


def write(store: FolderStore, run: str, key_id: str) -> History:
    """One run of twelve steps: two generations, a zombie's segment behind the cut, two rounds, a snapshot, the end."""
    made = History(store, run, recipe(), key_id=key_id)
    made.round()
    made.advance(4, 2)
    made.snapshot()
    made.evaluate()
    made.advance(CUT - 4, 2)
    zombie = made.take_over()
    made.train(2)
    zombie.put_segment(1, CUT + 1, CUT + 2, [made.records[lsn][1] for lsn in (CUT + 1, CUT + 2)])
    made.log()
    made.round()
    made.advance(STEPS - CUT - 2, 3)
    made.evaluate()
    made.close()
    return made


def machine() -> dict[str, str]:
    """What the bits of a replay may depend on."""
    return {
        "architecture": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True)  # refuses one that is there
    store = FolderStore(str(folder / "store"))
    with counted(), key_loaded() as key_id:
        made = write(store, PLAIN, "")
        twin = write(store, SEALED, key_id)
    assert made.digests == twin.digests
    shutil.rmtree(folder / "store" / TEMPORARY)
    expected = {
        "machine": machine(),
        "steps": STEPS,
        "cut": CUT,
        "digests": {str(lsn): digest for lsn, digest in made.digests.items()},
        "losses": {str(lsn): loss for lsn, loss in made.losses.items()},
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
