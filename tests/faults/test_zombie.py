"""A writer that was stopped anywhere and wakes after a takeover: what it acknowledged stays, nothing else counts."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.core.errors import Fenced, StoreError
from everstep.storage.chain import Chain
from everstep.storage.folder import STEPS, FolderStore
from everstep.storage.keys import BaseKey, DataKey, SegmentKey
from everstep.storage.objects import StoredObject
from everstep.storage.plan import ShardPlan, plan_restore
from everstep.storage.store import Store, open_store
from everstep.storage.takeover import Cut
from tests.faults.writer import LAST, SHARDS, STOP_AT, append, value, write_round
from tests.seaweed import Seaweed

RUN = "r"
END = STOP_AT + 4  # the last step of the new generation
CHECKS = [(point, "", 0) for point in ("before_check", "after_check", "after_ack", "after_naming")]
IN_FOLDER = [(step, *kind) for kind in (("segment", 1), ("base", 1), ("manifest", 0)) for step in STEPS]
IN_FOLDER += [("synced", "segment", 0), ("linked", "segment", 0), ("synced", "base", 0), ("linked", "base", 0), *CHECKS]
BY_EACH = [("synced", "segment", 0), ("linked", "segment", 0), ("linked", "segment", 1), ("after_check", "", 0)]
ON_S3 = [
    (point, *kind) for kind in (("segment", 1), ("base", 0), ("manifest", 0)) for point in ("before_put", "after_put")
]
ON_S3 += CHECKS[:2]


def _id(point: tuple[str, str, int]) -> str:
    what, kind, shard = point
    return f"{what}-{kind}-{shard}" if kind else what


class Zombie:
    """The writer process; `wake` ends it."""

    def __init__(self, url: str, folder: Path, point: tuple[str, str, int]) -> None:
        self.out = folder / "said"
        command = [sys.executable, "-m", "tests.faults.writer", url, RUN, *(str(part) for part in point)]
        with open(self.out, "wb") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)

    def wait_until_stopped(self) -> None:
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"the writer ended without stopping: {self.out.read_text()}"

    def wake(self) -> int:
        os.kill(self.process.pid, signal.SIGCONT)
        return self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def said(self) -> list[str]:
        return self.out.read_text().splitlines()

    def acknowledged(self) -> dict[int, list[str]]:
        """The checksums of the segments, by acknowledged lsn."""
        lines = [line.split() for line in self.said() if line.startswith("ack ")]
        return {int(lsn): crcs for _, lsn, *crcs in lines}


def begun(store: Store) -> None:
    chain = Chain.create(store, RUN, settings={}, shards=len(SHARDS), exactness="bitwise")
    write_round(chain, 0, dict.fromkeys(SHARDS, 0))


def model(clip: dict[int, int], shard: int, lsn: int) -> int:
    return sum(value(at, shard, 1 if at <= clip[shard] else 2) for at in range(1, lsn + 1))


def go_on(chain: Chain, clip: dict[int, int], last: int) -> None:
    """Let the new generation write up to `last`, with a round on the way."""
    ends = {shard: max([clip[shard], *(key.last for key in chain.listing().segments(shard) if key.generation == 2)])
            for shard in SHARDS}  # fmt: skip
    for shard in SHARDS:
        for lsn in range(ends[shard] + 1, last + 1):
            append(chain, shard, lsn)
    chain.check_tenure()
    write_round(chain, last, {shard: model(clip, shard, last) for shard in SHARDS})


def restored(plan: ShardPlan, read: Callable[[DataKey], StoredObject]) -> int:
    state = int(read(plan.base).batches[0]["state"][0].as_py())
    for use in plan.segments:
        for batch in read(use.key).batches:
            if use.first <= batch["lsn"][0].as_py() <= use.last:
                state += batch["value"][0].as_py()
    return state


def check_history(chain: Chain, clip: dict[int, int], last: int) -> int:
    """Every step is the model's; return how many objects of generation 1 beyond the cut any plan uses."""
    listing, beyond, read = chain.listing(), set(), functools.cache(chain.read)
    later = [frozenset(b for b in listing.bases() if b.lsn > floor) for floor in (0, STOP_AT, last)]
    for target in range(last + 1):
        for exclude in later:
            for part in plan_restore(chain.manifest, listing, target=target, exclude=exclude).shards:
                assert restored(part, read) == model(clip, part.shard, target), (part, target)
                ends: dict[SegmentKey | BaseKey, int] = {use.key: use.last for use in part.segments}
                ends[part.base] = part.base.lsn
                beyond |= {key for key, end in ends.items() if key.generation == 1 and end > clip[part.shard]}
    assert plan_restore(chain.manifest, listing).target == last
    return len(beyond)


def haunt(url: str, folder: Path, point: tuple[str, str, int], cut: Cut) -> None:
    """One writer stopped at `point`, one takeover, one awakening."""
    store = open_store(url)
    begun(store)
    zombie = Zombie(url, folder, point)
    try:
        zombie.wait_until_stopped()
        before = zombie.acknowledged()
        chain = Chain.take_over(store, RUN, cut=cut)
        clip = {span.shard: span.first - 1 for span in chain.manifest.lineage if span.last is None}
        go_on(chain, clip, END - 2)
        code = zombie.wake()
    finally:
        zombie.end()
    after = {lsn: crcs for lsn, crcs in zombie.acknowledged().items() if lsn not in before}
    go_on(chain, clip, END)
    chain = Chain.open(store, RUN)
    beyond = check_history(chain, clip, END)
    name = _id(point)
    litter = sum(key.last > clip[key.shard] for key in chain.listing().segments() if key.generation == 1)
    where = f"{store.url.partition(':')[0]:4} | {cut:6} | {name:24} | cut {list(clip.values())}"
    acknowledged = f"acknowledged before {len(before)} | after {len(after)}"
    print(f"{where} | {acknowledged} | written beyond the cut {litter} | reachable of it {beyond}")
    assert (code, zombie.said()[-1]) == (3, "fenced"), zombie.said()
    assert beyond == 0
    assert len(before) + len(after) in (STOP_AT - 1, STOP_AT) and max(before) >= STOP_AT - 1
    for lsn, crcs in (before | after).items():
        assert lsn <= min(clip.values()), f"step {lsn} was acknowledged, but the history was cut at {clip}"
        for shard, crc in enumerate(crcs):
            stored = chain.read(SegmentKey(1, shard, lsn, lsn))
            assert stored.crc == crc and stored.batches[0]["value"][0].as_py() == value(lsn, shard, 1)


@pytest.mark.parametrize("point", IN_FOLDER, ids=_id)
def test_in_a_folder_cut_at_the_common_step(tmp_path: Path, point: tuple[str, str, int]) -> None:
    haunt(f"file:{tmp_path}/store", tmp_path, point, "common")


@pytest.mark.parametrize("point", BY_EACH, ids=_id)
def test_in_a_folder_cut_shard_by_shard(tmp_path: Path, point: tuple[str, str, int]) -> None:
    haunt(f"file:{tmp_path}/store", tmp_path, point, "each")


@pytest.fixture(scope="module")
def seaweed() -> Iterator[Seaweed]:
    with Seaweed() as server:
        yield server


@pytest.mark.parametrize("point", ON_S3, ids=_id)
def test_on_s3(tmp_path: Path, point: tuple[str, str, int], seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, setting in seaweed.environment.items():
        monkeypatch.setenv(name, setting)
    haunt(f"{seaweed.url}/{_id(point)}", tmp_path, point, "common")


def test_a_writer_that_nobody_fenced_ends_as_it_should(tmp_path: Path) -> None:
    """The twin without a takeover: the points are passed, and every step is acknowledged."""
    url = f"file:{tmp_path}/store"
    begun(open_store(url))
    zombie = Zombie(url, tmp_path, ("linked", "segment", 0))
    try:
        zombie.wait_until_stopped()
        assert zombie.wake() == 0
    finally:
        zombie.end()
    assert set(zombie.acknowledged()) == set(range(1, LAST + 1))


@pytest.mark.parametrize("kind", ["segment", "manifest"])
def test_a_put_that_fails_after_its_name_appeared_takes_nothing_back(tmp_path: Path, kind: str) -> None:
    """The fsync of the folder fails, and between the link and that a takeover has listed the run."""
    slow, taken = FolderStore(str(tmp_path)), []
    begun(slow)
    writer = Chain.open(slow, RUN)

    def trace(step: str, name: str) -> None:
        if step == "unlinked" and not taken:
            taken.append(Chain.take_over(FolderStore(str(tmp_path)), RUN, cut="each"))
            raise OSError(errno.EIO, "Input/output error")

    for shard in SHARDS:
        append(writer, shard, 1)
    slow.trace = trace
    with pytest.raises((StoreError, Fenced)):
        append(writer, 0, 2) if kind == "segment" else writer.update(exactness="close")
    chain = Chain.open(FolderStore(str(tmp_path)), RUN)
    clip = {span.shard: span.first - 1 for span in chain.manifest.lineage if span.last is None}
    assert chain.manifest.version == taken[0].manifest.version
    assert plan_restore(chain.manifest, chain.listing(), target=min(clip.values())).reached == clip
