"""What a fault handler names: snapshots of the generation that wrote them, bases once, whatever an old status says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from everstep.actors.bookkeeping import Bookkeeper
from everstep.storage.chain import Chain
from everstep.storage.manifest import CompressorSnapshot
from everstep.storage.memory import MemoryStore


class Notes:
    """A notebook that does its jobs at once."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def do(self, job: Any) -> None:
        job(self.run.chain)


def books(*status: dict[str, Any]) -> tuple[Any, Bookkeeper]:
    chain = Chain.create(MemoryStore(), "r", settings={}, shards=1, exactness="bitwise")
    workers, checkpointers = SimpleNamespace(size=2), SimpleNamespace(status=list(status))
    run = SimpleNamespace(chain=chain, checkpointers=checkpointers, settings=SimpleNamespace(workers=workers))
    run.notebook = Notes(run)
    return run, Bookkeeper(run)


def test_a_snapshot_is_named_once_all_its_slices_are_there() -> None:
    run, keeper = books(
        {"generation": 1, "slices": {(4, 2): [0]}}, {"generation": 1, "slices": {(4, 2): [1], (8, 2): [1]}}
    )
    keeper.name_all()
    assert run.chain.manifest.compressor == (CompressorSnapshot(1, 4, 2),)
    version = run.chain.manifest.version
    keeper.name_all()
    assert run.chain.manifest.version == version


def test_an_old_status_does_not_name_a_snapshot_for_the_new_generation() -> None:
    run, keeper = books({"generation": 1, "slices": {(4, 2): [0, 1]}})
    run.chain = Chain.take_over(run.chain.store, "r", cut="each")
    keeper.name_all()
    assert run.chain.manifest.compressor == ()  # its slices lie in the folder of generation 1
    run.checkpointers.status = [{"generation": 2, "slices": {(4, 2): [0, 1]}}]
    keeper.name_all()
    assert run.chain.manifest.compressor == (CompressorSnapshot(2, 4, 2),)


def test_actors_that_could_not_open_their_log_have_nothing_to_name() -> None:
    run, keeper = books({"index": 0, "generation": 1, "fatal": None}, {})
    keeper.name_all()
    assert run.chain.manifest.version == 1
