"""One real server for all tests of this folder; each test has a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstep.core.ids import new_id
from everstep.storage.s3 import S3Store
from tests.seaweed import Seaweed


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Seaweed]:
    with Seaweed() as server:
        yield server


@pytest.fixture
def s3_url(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of this test alone; the environment holds what its clients need."""
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    return f"{seaweed.url}/{new_id()}"


@pytest.fixture
def store(s3_url: str) -> Iterator[S3Store]:
    opened = S3Store(s3_url)
    yield opened
    opened.close()
