"""The contract every built-in task keeps, and what is special to each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from everstep.core.errors import SettingsError, TaskError
from everstep.tasks import TASKS, build_dataset, build_model, build_task
from everstep.tasks.char_lm import GPT, SIZES, Windows, standard_library_text
from everstep.tasks.digits import in_validation
from everstep.tasks.seeding import seed_all

torch.set_num_threads(1)
NAMES = [*TASKS, "examples.own_task:Wine"]


def batch_of(task: Any, split: str, size: int) -> Any:
    dataset: Any = build_dataset(task, split)
    return getattr(task, "collate", default_collate)([dataset[i] for i in range(size)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_loss_is_a_mean_and_finite(name: str, split: str) -> None:
    task: Any = build_task(name, {})
    model = build_model(task, 0).eval()
    whole = task.loss(model, batch_of(task, split, 4))
    dataset: Any = build_dataset(task, split)
    seed_all(1)
    single = [task.loss(model, default_collate([dataset[i]])) for i in range(4)]
    assert whole.shape == () and torch.isfinite(whole)
    if split == "validation":  # training samples of some tasks are drawn anew each time
        torch.testing.assert_close(whole, torch.stack(single).mean())


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_gradient_and_every_parameter_has_one(name: str) -> None:
    task: Any = build_task(name, {})
    model = build_model(task, 0)
    batch = batch_of(task, "train", 8)

    def gradient(seed: int) -> list[torch.Tensor]:
        model.zero_grad()
        seed_all(seed)
        task.loss(model, batch).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    first = gradient(5)
    assert all(torch.equal(a, b) for a, b in zip(first, gradient(5), strict=True))
    assert all(grad.abs().sum() > 0 for grad in first)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_and_groups(name: str) -> None:
    task: Any = build_task(name, {})
    model = build_model(task, 0).eval()
    for value in task.metrics(model, batch_of(task, "validation", 8)).values():
        assert torch.isfinite(torch.as_tensor(value))
    if hasattr(task, "parameter_groups"):
        grouped = [parameter for group in task.parameter_groups(model) for parameter in group["params"]]
        assert {id(p) for p in grouped} == {id(p) for p in model.parameters()} and len(grouped) == len(set(grouped))


@pytest.mark.parametrize("name", ["char_lm", "digits"])
def test_unknown_split(name: str) -> None:
    with pytest.raises(TaskError, match="validation"):
        build_dataset(build_task(name, {}), "test")


@pytest.mark.parametrize("name", ["digits", "examples.own_task:Wine"])
def test_it_learns(name: str) -> None:
    task: Any = build_task(name, {})
    model = build_model(task, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset: Any = build_dataset(task, "train")
    seed_all(0)
    for _ in range(60):
        batch = default_collate([dataset[i] for i in torch.randint(len(dataset), (32,)).tolist()])
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    held_out: Any = build_dataset(task, "validation")
    score = task.metrics(model.eval(), default_collate([held_out[i] for i in range(len(held_out))]))
    assert score["accuracy"] > 0.85


# --- char_lm


@pytest.mark.parametrize(
    ("size", "millions"), [("tiny", 0.21), ("1m", 1.0), ("10m", 9.9), ("50m", 49.3), ("gpt2-small", 124.4)]
)
def test_parameter_counts(size: str, millions: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT, "_initialise", lambda *_: None)
    model = build_task("char_lm", {"size": size}).model()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.03)


def test_char_lm_is_causal() -> None:
    model = build_model(build_task("char_lm", {}), 0).eval()
    ids = torch.randint(128, (1, 64))
    changed = ids.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 128
    difference = (model(ids) - model(changed)).abs().amax(-1)[0]
    assert difference[:40].max() == 0 and difference[40:].min() > 0


def test_windows_cover_the_text_once() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    windows = Windows(text, 8)
    assert len(windows) == 12 and all(
        item.shape == (9,) and item.dtype == torch.int64 for item in map(windows.__getitem__, range(12))
    )
    assert torch.cat([windows[i][1:] for i in range(12)]).tolist() == list(range(1, 97))
    with pytest.raises(IndexError):
        windows[12]


def test_char_lm_splits_do_not_overlap_and_block_is_an_option() -> None:
    task: Any = build_task("char_lm", {"block": 16, "files": 3})
    train, validation = (build_dataset(task, split) for split in ("train", "validation"))
    text = standard_library_text(3)
    assert int(text.max()) < 128 and len(train.text) + len(validation.text) == len(text)  # type: ignore[attr-defined]
    assert train[0].shape == (17,) and task.model().position.weight.shape == (16, SIZES["tiny"].width)
    assert standard_library_text(3) is text


def test_text_shorter_than_a_block() -> None:
    with pytest.raises(TaskError, match="empty"):
        build_dataset(build_task("char_lm", {"block": 10_000_000, "files": 1}), "train")


@pytest.mark.parametrize("options", [{"size": "tiy"}, {"dropout": 1.0}, {"block": 0}, {"files": 0}])
def test_char_lm_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(options))):
        build_task("char_lm", options)


# --- digits


def test_digits_split_is_fixed() -> None:
    train, validation = (build_dataset(build_task("digits", {}), split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (1449, 348)  # type: ignore[arg-type]
    assert [i for i in range(20) if in_validation(i)] == [i for i in range(20) if in_validation(i)]
    images = torch.stack([train[i][0] for i in range(50)])
    assert images.shape == (50, 1, 8, 8) and 0 <= images.min() and images.max() == 1


@pytest.mark.parametrize("options", [{"width": 0}, {"dropout": -0.1}])
def test_digits_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(options))):
        build_task("digits", options)
