"""Which models cannot be trained here, said by name before the first step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from everstep.core.errors import TaskError

# By class name: importing torch's FSDP and DTensor costs a second that a plain model should not pay.
_SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DTensor"}
_WRAPPERS = {"DistributedDataParallel", "DataParallel"}


def check_model(model: object, task: str) -> None:
    """Refuse what everstep cannot train.

    Args:
        model: what the task's `model()` returned.
        task: the task's name, for the messages.

    Raises:
        TaskError: names the module or parameter and why it is refused.
    """
    if not isinstance(model, nn.Module):
        raise TaskError(f"task {task}: model() returned {type(model).__name__}", hint="return a torch.nn.Module")
    for name, module in model.named_modules():
        _check_module(name or "(the model itself)", module)
    for name, parameter in model.named_parameters():
        _check_tensor(name, parameter)
    for name, buffer in model.named_buffers():
        _refuse_sharded(name, buffer)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError(f"task {task}: the model has no trainable parameters", hint="set requires_grad on some")


def _refuse_sharded(name: str, thing: object) -> None:
    if _SHARDED & {kind.__name__ for kind in type(thing).__mro__}:
        raise TaskError(
            f"FSDP/DTensor modules are not supported: {name}; "
            "everstep is data-parallel, every worker holds the whole model",
            hint="return the plain module from model(), without fully_shard or distribute_tensor",
        )


def _check_module(name: str, module: nn.Module) -> None:
    _refuse_sharded(name, module)
    if type(module).__name__ in _WRAPPERS:
        raise TaskError(
            f"{type(module).__name__} is not supported: {name}",
            hint="return the module inside; everstep exchanges the gradients itself",
        )
    if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise TaskError(f"sparse gradients are not supported: {name}", hint="make the embedding with sparse=False")


def _check_tensor(name: str, parameter: Tensor) -> None:
    _refuse_sharded(name, parameter)
    refusals = [
        (is_lazy(parameter), "lazy", "run one batch through the lazy module inside model()"),
        (parameter.layout is not torch.strided, "sparse", "use a dense parameter"),
        (parameter.is_complex(), "complex", "keep the real and the imaginary part as two parameters"),
        (parameter.is_meta, "meta", "build the model on the CPU: on the meta device it has no values"),
    ]
    for found, kind, hint in refusals:
        if found:
            raise TaskError(f"{kind} parameters are not supported: {name}", hint=hint)
