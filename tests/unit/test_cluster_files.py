"""The cluster files that come with everstep are what Ray and KubeRay take, checked without a cloud."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parents[2]
FILES = ("cluster.yaml", "cluster.local.yaml")


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return found


def check(config: dict[str, Any]) -> dict[str, Any]:
    """Ray's own schema, its filling in of defaults, and its checks."""
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    full: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(full)
    return full


@pytest.mark.parametrize("name", FILES)
def test_ray_takes_it(name: str) -> None:
    full = check(read(name))
    types = full["available_node_types"]
    assert full["head_node_type"] == "head" and set(types) == {"head", "trainer"}
    assert "GPU" not in types["head"]["resources"]
    assert 0 == types["trainer"]["min_workers"] < types["trainer"]["max_workers"] <= full["max_workers"]
    assert full["idle_timeout_minutes"] <= 10


@pytest.mark.parametrize("name", FILES)
def test_the_check_sees_what_is_wrong(name: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(read(name) | {"max_wrokers": 3})
    with pytest.raises((ValueError, KeyError)):
        check(read(name) | {"head_node_type": "haed"})


@pytest.mark.parametrize("name", FILES)
def test_a_dead_node_is_noticed_quickly_and_every_process_wants_the_token(name: str) -> None:
    config = read(name)
    head, workers = (" ".join(config[f"{role}_start_ray_commands"]) for role in ("head", "worker"))
    for setting in ("initial_delay_ms=1000", "period_ms=1000", "failure_threshold=3"):
        assert f"RAY_health_check_{setting}" in head
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    everywhere = config["provider"].get("env", {}).get("RAY_AUTH_MODE") == "token"
    assert everywhere or all("RAY_AUTH_MODE=token" in commands for commands in (head, workers))
    assert any(target.endswith(".ray/auth_token") for target in config["file_mounts"])


def test_on_aws_workers_are_spot_the_head_is_not_and_nobody_holds_a_secret() -> None:
    config = read("cluster.yaml")
    types = config["available_node_types"]
    assert types["trainer"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in types["head"]["node_config"]
    assert all("IamInstanceProfile" in kind["node_config"] for kind in types.values())
    assert "AWS_SECRET" not in (ROOT / "cluster.yaml").read_text()
    assert any("everstep" in command for command in config["setup_commands"])


def test_the_ray_job_has_what_kuberay_requires() -> None:
    job = read("examples/kuberay/rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob") and job["metadata"]["name"]
    spec = job["spec"]
    assert spec["entrypoint"].startswith("python -m everstep train") and "run.name=" in spec["entrypoint"]
    assert spec["backoffLimit"] > 0 and spec["shutdownAfterJobFinishes"] is True
    cluster = spec["rayClusterSpec"]
    assert cluster["enableInTreeAutoscaling"] is True
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["groupName"] and 0 <= workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (cluster["headGroupSpec"], workers):
        assert isinstance(group["rayStartParams"], dict)
        pod = group["template"]["spec"]
        assert pod["serviceAccountName"]
        (container,) = pod["containers"]
        assert container["image"] and container["resources"]["limits"]
        assert {"RAY_health_check_period_ms", "AWS_REGION"} <= {entry["name"] for entry in container["env"]}
