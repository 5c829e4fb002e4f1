"""One Ray for the session, reference runs made once, and the proof that no process is left behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from everstep.actors.environment import ray
from tests.cluster import helpers
from tests.seaweed import ACCESS_KEY, SECRET_KEY, Seaweed

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    mark = uuid.uuid4().hex
    os.environ[helpers.MARK] = mark
    os.environ.update(CREDENTIALS)  # before Ray starts, so that its processes have them
    yield
    ray.shutdown()
    found = helpers.left(mark, 30.0)
    for process in helpers.marked(mark):
        process.kill()
    assert not found, f"left behind: {found}"


@pytest.fixture(scope="session")
def cluster(_nothing_is_left_behind: None) -> Iterator[None]:
    """A Ray of our own that `launch` finds initialised; started once, as each start takes seconds."""
    helpers.connect()
    yield
    ray.shutdown()


@pytest.fixture
def seaweed() -> Iterator[Seaweed]:
    """A real S3 server of this test's own: it may be stopped and killed."""
    with Seaweed() as server:
        yield server


@pytest.fixture(scope="session")
def references(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> helpers.References:
    """Digests of undisturbed runs."""
    return helpers.References(tmp_path_factory.mktemp("references"))
