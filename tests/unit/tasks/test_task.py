from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from everstep.core.errors import SettingsError, TaskError, UnknownName
from everstep.tasks import TASKS, build_dataset, build_model, build_task, digits


class Plain:
    """A task around whatever model and data a test hands over."""

    def __init__(self, make: Any = None, data: Any = None) -> None:
        self.make, self.data = make or (lambda: nn.Linear(3, 2)), data

    def model(self) -> Any:
        return self.make()

    def dataset(self, split: str) -> Any:
        return self.data() if callable(self.data) else self.data

    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch[0]).mean()


class Picky:
    def __init__(self, path: str, *, scale: float = 1.0, many: int = 3) -> None:
        self.path, self.scale, self.many = path, scale, many

    model = dataset = loss = lambda self, *_: None


class Half:
    def model(self) -> Any:
        return nn.Linear(1, 1)


@pytest.fixture(autouse=True)
def registered() -> Any:
    added = {"picky": Picky, "half": Half, "number": 3}
    TASKS._entries.update(added)
    yield
    for name in added:
        del TASKS._entries[name]


def bits(model: nn.Module) -> list[bytes]:
    return [value.numpy().tobytes() for value in model.state_dict().values()]


# --- build_task


def test_options_reach_the_constructor() -> None:
    task: Any = build_task("picky", {"path": "here", "scale": 2})
    assert (task.path, task.scale, task.many) == ("here", 2, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "a", "scael": 1.0}, ["scael", "did you mean 'scale'", "path, scale, many"]),
        ({"scale": 1.0}, ["'path'", "path, scale, many"]),
        ({"path": 3}, ["'path'", "expected str", "3 (int)"]),
        ({"path": "a", "many": 1.5}, ["'many'", "expected int"]),
        ({"path": "a", "many": True}, ["'many'", "expected int", "bool"]),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        build_task("picky", options)
    assert all(part in str(caught.value) for part in said), caught.value


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="char_lm"):
        build_task("char_ml", {})


def test_missing_methods_are_named() -> None:
    with pytest.raises(TaskError) as caught:
        build_task("half", {})
    assert "'dataset'" in str(caught.value) and "'loss'" in str(caught.value) and "'model'" not in str(caught.value)
    assert "loss(self, model, batch)" in str(caught.value)


def test_not_a_class() -> None:
    with pytest.raises(TaskError, match="int"):
        build_task("number", {})


# --- build_model


@pytest.mark.parametrize("name", ["char_lm", "digits"])
def test_same_seed_same_weights(name: str) -> None:
    task = build_task(name, {})
    first = bits(build_model(task, 7))
    torch.rand(3)
    assert bits(build_model(task, 7)) == first
    assert bits(build_model(task, 8)) != first


def test_every_generator_is_seeded_for_the_model() -> None:
    def drawn() -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("draws", torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))]))
        return model

    assert bits(build_model(Plain(drawn), 3)) == bits(build_model(Plain(drawn), 3))


def sparse_parameter() -> nn.Module:
    model = nn.Linear(3, 2)
    model.extra = nn.Parameter(torch.eye(3).to_sparse())
    return model


def complex_parameter() -> nn.Module:
    model = nn.Linear(3, 2)
    model.extra = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return model


def nested(inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), inner)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (sparse_parameter, "sparse parameters are not supported: extra"),
        (complex_parameter, "complex parameters are not supported: extra"),
        (lambda: nested(nn.Embedding(4, 3, sparse=True)), "sparse gradients are not supported: 1"),
        (lambda: nested(nn.LazyLinear(3)), "lazy parameters are not supported: 1.weight"),
        (lambda: nested(nn.Linear(3, 3, device="meta")), "meta parameters are not supported: 1.weight"),
        (lambda: nested(nn.DataParallel(nn.Linear(3, 3))), "DataParallel is not supported: 1"),
        (nn.ReLU, "no trainable parameters"),
        (lambda: nn.Linear(3, 3).requires_grad_(False), "no trainable parameters"),
        (lambda: [1], "returned list"),
    ],
)
# a lazy module warns of itself; torch builds of some versions warn that sparse tensors are in beta
@pytest.mark.filterwarnings("ignore")
def test_refused_models(make: Any, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        build_model(Plain(make), 0)
    assert said in str(caught.value)


@pytest.fixture
def one_process_group() -> Any:
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_sharded_models_are_refused_by_name(one_process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    def sharded() -> nn.Module:
        model = nested(nn.Linear(3, 3))
        fully_shard(model[1], mesh=mesh)
        return model

    def dtensor() -> nn.Module:
        model = nested(nn.Linear(3, 3))
        model[1].weight = nn.Parameter(distribute_tensor(torch.eye(3), mesh))
        return model

    for make, name in ((sharded, "1"), (dtensor, "1.weight")):
        with pytest.raises(TaskError) as caught:
            build_model(Plain(make), 0)
        assert f"FSDP/DTensor modules are not supported: {name}; everstep is data-parallel" in str(caught.value)


# --- init_from


@pytest.mark.parametrize("form", ["safetensors", "torch", "torch-nested"])
def test_init_from(form: str, tmp_path: Any) -> None:
    task = Plain()
    wanted = build_model(task, 1).state_dict()
    path = str(tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt"))
    if form == "safetensors":
        save_file(wanted, path)
    else:
        torch.save({"model": wanted, "lsn": 3} if form == "torch-nested" else wanted, path)
    assert bits(build_model(task, 2, path)) == [value.numpy().tobytes() for value in wanted.values()]


def test_init_from_names_what_does_not_fit(tmp_path: Any) -> None:
    path = str(tmp_path / "w.safetensors")
    save_file({"weight": torch.zeros(4, 3), "gain": torch.zeros(1)}, path)
    with pytest.raises(TaskError) as caught:
        build_model(Plain(), 0, path)
    for part in ("1 missing: bias", "1 unexpected: gain", "weight (expected [2, 3], got [4, 3])"):
        assert part in str(caught.value)


def test_init_from_lists_the_first_few(tmp_path: Any) -> None:
    path = str(tmp_path / "w.safetensors")
    save_file({f"k{i}": torch.zeros(1) for i in range(9)}, path)
    with pytest.raises(TaskError, match="9 unexpected: k0, k1, k2, k3, k4, and 4 more"):
        build_model(Plain(), 0, path)


def test_init_from_takes_a_tied_weight_under_one_name(tmp_path: Any) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        return model

    path = str(tmp_path / "w.safetensors")
    save_file({"0.weight": torch.eye(3)}, path)
    model: Any = build_model(Plain(tied), 0, path)
    assert torch.equal(model[1].weight, torch.eye(3)) and model[1].weight is model[0].weight


class Unwanted:
    pass


@pytest.mark.parametrize("content", [Unwanted(), [1, 2], {3: torch.zeros(1)}])
def test_init_from_refuses_other_files(content: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "w.pt")
    torch.save(content, path)
    with pytest.raises(TaskError, match="state_dict"):
        build_model(Plain(), 0, path)


def test_init_from_file_missing_or_cut(tmp_path: Any) -> None:
    with pytest.raises(TaskError, match="no file"):
        build_model(Plain(), 0, str(tmp_path / "none.pt"))
    for name in ("cut.pt", "cut.safetensors"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 nothing")
        with pytest.raises(TaskError, match="cannot read"):
            build_model(Plain(), 0, str(tmp_path / name))


# --- build_dataset


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([1])


class Unsized(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Stream(), "iterable data sets are not supported (Stream"),
        (Unsized(), "Unsized has no length"),
        (TensorDataset(torch.zeros(0, 1)), "empty"),
        (None, "NoneType"),
    ],
)
def test_refused_datasets(data: Any, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        build_dataset(Plain(data=data), "train")
    assert said in str(caught.value) and "Plain" in str(caught.value) and "'train'" in str(caught.value)


def test_random_splits_agree() -> None:
    task = Plain(data=lambda: TensorDataset(torch.randperm(20)))
    first: Any = build_dataset(task, "train")
    torch.rand(5)
    second: Any = build_dataset(task, "validation")
    assert torch.equal(first.tensors[0], second.tensors[0])


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(digits.importlib, "import_module", absent)
    with pytest.raises(TaskError, match="pip install scikit-learn"):
        build_dataset(build_task("digits", {}), "train")
