# SPDX-License-Identifier: Apache-2.0
"""Attributes of `Trainer` that modules and callbacks read: progress, loaders, callbacks and loggers."""

from __future__ import annotations

import math
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from learnkit.data.dataloaders import evaluation_loaders, n_batches
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import as_list
from learnkit.engine.lengths import find_length
from learnkit.interop.common.hooks import LIGHTNING_BASES, own_hooks
from learnkit.interop.lightning.data import LoaderSource, flatten_loaders
from learnkit.interop.lightning.host import find_class_names
from learnkit.interop.lightning.options import Precision, limit_batches
from learnkit.interop.lightning.views import LoggerView, Strategy, View


class TrainerAttributes(View):
    "What modules and callbacks read from `trainer`, by Lightning's names. The options and the runs set its fields."

    host: Any  # `LightningRun` of the module; None before the first run
    source: LoaderSource | None  # where the loaders of the run come from
    fn: str | None  # 'fit', 'validate', 'test' or 'predict'; None outside of a run
    strategy: Strategy
    precision_option: Precision
    loggers: list[Any]
    profiler: Any
    root_dir: Path | None
    sanity_checking: bool
    first_epoch: int  # of the fit; others were trained before
    max_epochs: int  # -1: no limit
    min_epochs: int | None
    max_steps: int  # -1: no limit
    min_steps: int | None
    num_sanity_val_steps: float
    val_check_interval: int | float
    accumulate_grad_batches: int
    limit_train_batches: int | float
    limit_val_batches: int | float
    limit_test_batches: int | float
    limit_predict_batches: int | float
    _callbacks: list[Any] | None  # None for a Learner without a Trainer
    _should_stop: bool

    @property
    def learn(self) -> Any:
        "The Learner that trains; None until its loaders are made."
        return None if self.host is None else self.host.learn

    callback_metrics = property(attrgetter('host.logged.callback_metrics'))
    logged_metrics = property(attrgetter('host.logged.logged_metrics'))
    progress_bar_metrics = property(attrgetter('host.logged.progress_bar_metrics'))
    lr_scheduler_configs = property(attrgetter('host.optimization.configs'))
    is_last_batch = property(attrgetter('host.is_last_batch'))
    world_size = num_devices = property(attrgetter('world.size'))
    global_rank = local_rank = property(attrgetter('world.rank'))
    is_global_zero = property(attrgetter('world.is_first'))

    @property
    def model(self) -> Any:
        own = None if self.host is None else self.host.module
        return self.learn.model if own is None else own

    lightning_module = model

    @property
    def datamodule(self) -> Any:
        return None if self.source is None else self.source.datamodule

    @property
    def precision(self) -> str:
        return self.precision_option.name

    @property
    def accelerator(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.strategy.root_device.type)

    @property
    def device_ids(self) -> list[int]:
        return [self.strategy.root_device.index or 0]

    @property
    def is_independent(self) -> bool:
        "True if the Learner was made without a Trainer: evaluations leave no trace in its training."
        return self._callbacks is None

    # -- progress ----------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        host = self.host
        if host is None or host.learn is None:
            return 0 if host is None else self.first_epoch
        return int(host.learn.epoch + host.is_over)

    @property
    def n_epochs_done(self) -> int:
        "Number of epochs whose training has ended."
        host = self.host
        if host is None or host.learn is None:
            return 0
        return int(host.learn.epoch + (host.is_over or not host.is_in_epoch))

    @property
    def global_step(self) -> int:
        host = self.host
        if host is None:
            return 0
        is_own = host.module is not None
        return int(host.optimization.n_steps if is_own else host.learn.finished('st'))

    @property
    def should_stop(self) -> bool:
        is_stopping = self.learn is not None and self.learn.run.stopping
        return self._should_stop or (self.is_independent and is_stopping)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._should_stop = value
        if value:
            self.stop_if_due()

    @property
    def is_trained(self) -> bool:
        "True if earlier fits have trained all epochs."
        return self.first_epoch > 0 and 0 <= self.max_epochs <= self.first_epoch

    @property
    def is_stop_due(self) -> bool:
        "True if a callback has asked for the end, and the least numbers of epochs and steps are trained."
        has_epochs = self.n_epochs_done >= (self.min_epochs or 0)
        return self._should_stop and has_epochs and self.global_step >= (self.min_steps or 0)

    @property
    def is_over(self) -> bool:
        "True if a limit of steps or a callback ends the fit after the current batch."
        return self.is_stop_due or self.global_step >= self.max_steps != -1

    def stop_if_due(self) -> None:
        "End the fit after the current batch or epoch, if it is to end."
        learn = self.learn
        if learn is not None and learn.fitting and self.is_over:
            learn.stop()

    @property
    def state(self) -> SimpleNamespace:
        "Function and stage: 'fit', 'validate', 'test', 'predict', and 'train' as a stage; None outside of a run."
        learn, fn = self.learn, self.fn
        stage = {'validation': 'validate', 'test': 'test'}.get(
            '' if learn is None else self.host.stage
        )
        if self.sanity_checking:
            stage = 'sanity_check'
        if learn is not None and learn.phase == 'predict':
            fn = stage = 'predict'
        elif learn is not None and learn.fitting:
            fn, stage = 'fit', stage or 'train'
        elif self.is_independent:
            fn = stage
        status = 'finished' if fn is None else 'running'
        return SimpleNamespace(fn=fn, stage=stage or fn, status=status, finished=fn is None)

    training = property(lambda self: self.state.stage in ('train', 'fit'))
    validating = property(lambda self: self.state.stage == 'validate')
    testing = property(lambda self: self.state.stage == 'test')
    predicting = property(lambda self: self.state.stage == 'predict')
    evaluating = property(lambda self: self.validating or self.testing)

    # -- loaders -----------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        if self.learn is not None:
            return self.learn.dls.train
        return None if self.source is None else self.source.get('train')

    @property
    def val_dataloaders(self) -> Any:
        if self.learn is None:
            return None if self.source is None else self.source.get('val')
        loaders = [dl for _, dl in evaluation_loaders(self.learn.dls)]
        return loaders[0] if len(loaders) == 1 else loaders

    test_dataloaders = property(lambda self: self._find_loaders('test'))
    predict_dataloaders = property(lambda self: self._find_loaders('predict'))

    def _find_loaders(self, kind: str) -> Any:
        return None if self.source is None else self.source.get(kind)

    @property
    def num_training_batches(self) -> float:
        learn = self.learn
        if learn is not None:
            return self._length(learn.dls.train)
        return self._count('train', self.limit_train_batches)[0]

    @property
    def num_val_batches(self) -> list[float]:
        if self.learn is not None and self.fn in (None, 'fit'):
            return [self._length(dl) for _, dl in evaluation_loaders(self.learn.dls)]
        return self._count('val', self.limit_val_batches)

    @property
    def num_test_batches(self) -> list[float]:
        return self._count('test', self.limit_test_batches)

    @property
    def num_sanity_val_batches(self) -> list[float]:
        return [min(n, self.num_sanity_val_steps) for n in self.num_val_batches]

    @property
    def num_predict_batches(self) -> list[float]:
        learn = self.learn
        if self.source is not None and self.source.has('predict'):
            return self._count('predict', self.limit_predict_batches)
        return [math.inf if learn is None or learn.n_iter is None else learn.n_iter]

    def _count(self, kind: str, limit: int | float) -> list[float]:
        "Return the numbers of batches of loaders that no Learner has."
        found = [] if self.source is None else flatten_loaders(self.source.get(kind))
        lengths = [n_batches(dl) for dl in found]
        return [
            limit_batches(f'limit_{kind}_batches', math.inf if n is None else n, limit)
            for n in lengths
        ]

    def _length(self, dl: Any) -> float:
        n = find_length(self.learn, dl)
        return math.inf if n is None else n

    @property
    def val_check_batch(self) -> float:
        "Number of batches between two evaluations; infinite for the end of a loader without a length."
        every = self.val_check_interval
        if isinstance(every, int):
            return every
        n = self.num_training_batches
        return n if n == math.inf else max(1, int(n * every))

    @property
    def estimated_stepping_batches(self) -> float:
        "Number of optimizer steps of the fit."
        self.host.has_estimated = True
        limit = math.inf if self.max_steps == -1 else self.max_steps
        if self.max_epochs == -1 or self.num_training_batches == math.inf:
            return limit
        n_steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches)
        return min(limit, n_steps * self.max_epochs)

    @property
    def has_validation(self) -> bool:
        return self.limit_val_batches != 0 and callable(
            own_hooks(self.host.module, ['validation_step'], LIGHTNING_BASES).get('validation_step')
        )

    @property
    def enable_validation(self) -> bool:
        if self.learn is None:
            return self.source is not None and self.has_validation and self.source.has('val')
        return bool(evaluation_loaders(self.learn.dls))

    # -- parts -------------------------------------------------------------------------------------

    @property
    def default_root_dir(self) -> str:
        if self.is_independent:
            return str(self.learn.path)
        return str(Path.cwd() if self.root_dir is None else self.root_dir)

    @property
    def logger(self) -> Any:
        return next(iter(self.loggers), None)

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = as_list(logger)

    @property
    def own_loggers(self) -> list[Any]:
        "The loggers that are not views of the Learner's."
        return [logger for logger in self.loggers if not isinstance(logger, (LoggerView, Callback))]

    @property
    def active_profiler(self) -> Any:
        "The profiler, unless it measures nothing."
        is_passing = self.profiler is None or type(self.profiler).__name__ == 'PassThroughProfiler'
        return None if is_passing else self.profiler

    @property
    def log_dir(self) -> str | None:
        logger = self.logger
        if logger is None:
            return self.default_root_dir
        is_folder = isinstance(logger, LoggerView) or hasattr(logger, 'log_dir')
        found: str | None = logger.log_dir if is_folder else logger.save_dir
        return found

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        opt = None if self.learn is None else self.learn.opt
        return [] if opt is None else list(opt.optimizers.values())

    @optimizers.setter
    def optimizers(self, optimizers: Any) -> None:
        self.host.optimization.replace(as_list(optimizers))

    @property
    def callbacks(self) -> list[Any]:
        return self.host.list_callbacks() if self._callbacks is None else self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Any]) -> None:
        self._callbacks = callbacks

    def list_kind(self, name: str) -> list[Any]:
        "Return the callbacks with a class of Lightning of this name."
        return [cb for cb in self.callbacks if name in find_class_names(cb)]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        return self.list_kind('Checkpoint')

    @property
    def checkpoint_callback(self) -> Any:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        return self.list_kind('EarlyStopping')

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        return next(iter(self.list_kind('ProgressBar')), None)

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_global_zero:
            print(*args, **kwargs)
