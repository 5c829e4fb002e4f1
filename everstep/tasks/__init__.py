"""What is trained: model, data and loss of the built-in jobs. A user's own is `my_pkg.mod:MyTask`."""

from __future__ import annotations

from everstep.tasks.task import TASKS, Task, build_dataset, build_model, build_task

from everstep.tasks import char_lm, digits  # isort: skip  # members register themselves, so they come last

__all__ = ["TASKS", "Task", "build_dataset", "build_model", "build_task", "char_lm", "digits"]
