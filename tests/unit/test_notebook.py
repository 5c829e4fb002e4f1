"""Notes reach the store in order, however long it is away; what no waiting mends is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstep.actors import notebook as module
from everstep.actors.notebook import Notebook
from everstep.core.errors import Fenced, StoreError
from everstep.storage.chain import Chain
from everstep.storage.memory import MemoryStore
from tests.faulty import Fault, FaultyStore


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    yield


def chain(*script: Fault) -> Chain:
    store = MemoryStore()
    Chain.create(store, "r", settings={}, shards=1, exactness="bitwise")
    return Chain.open(FaultyStore(store, list(script)), "r")


def test_notes_wait_for_the_store_and_keep_their_order() -> None:
    log = chain(Fault("put", "burst", "events/", count=5))
    notes = Notebook(lambda: log)
    for number in range(3):
        notes.event(f"note-{number}", {"number": number})
    notes.do(lambda chain: chain.update(exactness="warm"))
    assert notes.drain(10)
    assert [body["number"] for body in log.events("note-").values()] == [0, 1, 2]
    assert log.manifest.exactness == "warm"


def test_draining_says_when_the_store_stays_away() -> None:
    def refuse(_: Chain) -> None:
        raise StoreError("no answer")

    log = chain()
    notes = Notebook(lambda: log)
    notes.do(refuse)
    assert not notes.drain(0.1)


def test_what_will_not_pass_is_raised() -> None:
    log = chain()
    Chain.take_over(log.store, "r", cut="each")
    notes = Notebook(lambda: log)
    notes.do(lambda chain: chain.update(exactness="warm"))
    with pytest.raises(Fenced):
        notes.drain(10)
