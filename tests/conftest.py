"""What every test shares: tests that start Ray are marked by their folder, and get more time."""

from __future__ import annotations

from pathlib import Path

import pytest

CLUSTER = Path(__file__).parent / "cluster"
CLUSTER_TIMEOUT_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if CLUSTER in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(CLUSTER_TIMEOUT_S))
