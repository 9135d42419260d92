# SPDX-License-Identifier: Apache-2.0
"""What the stand-ins for Lightning's objects read of the callback that owns them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from learnkit.learner import Learner


class LightningHost(Protocol):
    """`LightningRun`, for the modules of its parts, which it imports.

    The parts are the trainer, the logged values and the optimization of a Learner.
    """

    learn: Learner
    module: Any  # LightningModule; None: the hooks are of callbacks alone
    trainer: Any  # `Trainer`
    logged: Any  # `LoggedValues`
    optimization: Any  # `Optimization`
    hook_name: str  # hook that is running
    stage: str  # 'validation' or 'test' during an evaluation
    is_over: bool  # True from the end of the last epoch on
    has_evaluated: bool

    @property
    def is_last_batch(self) -> bool: ...

    def list_callbacks(self) -> list[Any]: ...

    def is_kind(self, cb: Any, *names: str) -> bool: ...

    def find_own(self, name: str) -> Any: ...

    def running(self, name: str) -> AbstractContextManager[None]: ...

    def fire(self, name: str, *args: Any) -> Any: ...

    def fire_own(
        self, name: str, default: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any: ...

    def batch_size(self) -> int: ...

    def loader_suffix(self) -> str: ...

    def run_step(self, name: str) -> Any: ...
