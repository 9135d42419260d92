# SPDX-License-Identifier: Apache-2.0
"""`Trainer`: Lightning's Trainer that trains with a Learner."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import nn

from learnkit.callbacks.checkpoint import Checkpoint
from learnkit.callbacks.mixed_precision import MixedPrecision
from learnkit.core.errors import FitError, OptionError
from learnkit.core.files import as_local_path
from learnkit.core.hints import check_keywords
from learnkit.core.random import preserved_rng
from learnkit.core.time import Time
from learnkit.data.dataloaders import DataLoaders
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import as_list
from learnkit.interop.common.hooks import LIGHTNING_BASES, own_hooks
from learnkit.interop.lightning.attributes import TrainerAttributes
from learnkit.interop.lightning.data import KINDS, LoaderSource
from learnkit.interop.lightning.files import (
    dump_checkpoint,
    find_first_epoch,
    load_weights,
    read_checkpoint,
)
from learnkit.interop.lightning.host import LightningHost, find_class_names
from learnkit.interop.lightning.loggers import open_loggers
from learnkit.interop.lightning.options import (
    PROFILERS,
    check_alone,
    check_refused,
    check_strategy,
    make_default,
    read_device,
    read_epochs,
    read_limit,
    read_precision,
    read_seconds,
    set_determinism,
)
from learnkit.interop.lightning.views import (
    DataConnector,
    FitLoop,
    LoggerView,
    PrecisionView,
    Strategy,
)

# options that are attributes as they are given
AS_GIVEN = (
    *('accumulate_grad_batches', 'gradient_clip_val', 'gradient_clip_algorithm', 'max_steps'),
    *('min_steps', 'check_val_every_n_epoch', 'reload_dataloaders_every_n_epochs'),
    *('inference_mode', 'detect_anomaly', 'enable_autolog_hparams', 'resume'),
)
LIMITS = (
    *('limit_train_batches', 'limit_val_batches', 'limit_test_batches', 'limit_predict_batches'),
    'overfit_batches',
)


class Trainer(TrainerAttributes):
    """Train a LightningModule as `lightning.Trainer` does, with the options and methods of that class.

    A script changes one import. Random numbers are drawn in Lightning's order, so weights are equal bit for bit.
    `trainer.learn` is the Learner that trains: exact resume, `rewind`, `pause` and `first_difference` come with it.
    Options without an effect here raise an error: `plugins`, `num_nodes`, `sync_batchnorm`, `model_registry`,
    `barebones`, and several devices. In several processes, `from_lightning(module, data)` and `learn.distributed()`
    train the module.

    With `resume=True`, the fit writes a checkpoint after every epoch, and the same script continues a killed run at the
    exact batch. A callback `Checkpoint(every='500ba')` sets another interval. Lightning's own loggers, progress bars,
    profilers and `ModelCheckpoint` are the defaults if the program has imported Lightning.

    Raises `OptionError` for values that are not supported, before anything has changed.

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> class Line(nn.Module):  # or LightningModule
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = nn.Linear(1, 1)
    ...     def training_step(self, batch, batch_idx):
    ...         x, y = batch
    ...         return nn.functional.mse_loss(self.net(x), y)
    ...     def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> trainer = Trainer(max_epochs=2, enable_progress_bar=False, logger=False, enable_checkpointing=False)
    >>> trainer.fit(Line(), DataLoader(TensorDataset(x, 2 * x), 16, shuffle=True))
    >>> trainer.global_step, trainer.current_epoch, len(trainer.learn.history)
    (8, 2, 2)
    """

    barebones = received_sigterm = False
    num_nodes, node_rank = 1, 0

    @check_keywords
    def __init__(
        self,
        *,
        accelerator: Any = 'auto',
        strategy: Any = 'auto',
        devices: Any = 'auto',
        num_nodes: int = 1,
        precision: Any = None,
        logger: Any = None,
        callbacks: Any = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: Any = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: Any = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: Any = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        resume: Any = False,  # checkpoint of learnkit to resume, as for `Learner.fit`
    ) -> None:
        options = dict(locals())
        check_refused(options)
        check_strategy(strategy)
        self.precision_option = read_precision(precision)
        self.device = read_device(accelerator, devices)
        self._init_state()
        for name in AS_GIVEN:
            setattr(self, name, options[name])
        for name in LIMITS:
            setattr(self, name, read_limit(name, options[name]))
        self._init_evaluations(val_check_interval, num_sanity_val_steps)
        self.min_epochs = min_epochs or int(min_steps is not None)
        self.fast_dev_run = fast_dev_run == 1 or fast_dev_run
        self.log_every_n_steps = 50 if log_every_n_steps is None else log_every_n_steps
        self.enable_progress_bar = enable_progress_bar is not False
        self.root_dir = None if default_root_dir is None else as_local_path(default_root_dir)
        self._callbacks: list[Any] | None = [*as_list(callbacks)]
        self._add_callbacks(enable_checkpointing, enable_model_summary, max_time)
        self.max_epochs = read_epochs(max_epochs, max_steps, bool(self.list_kind('Timer')))
        self.profiler = make_profiler(profiler)
        self.loggers = self._make_loggers(logger)
        self._shorten()
        set_determinism(deterministic, benchmark)

    def _init_state(self) -> None:
        "Set the state of a Trainer that has run nothing, and its parts by Lightning's names."
        self.trainer = self
        self.host: Any = None  # `LightningRun` of the module
        self.source: LoaderSource | None = None
        self.fn: str | None = None  # 'fit', 'validate', 'test' or 'predict'
        self.sanity_checking = False
        self.ckpt_path: Any = None
        self.first_epoch = 0  # of the fit; others were trained before
        self._validation_epoch = 0  # epoch at which the validation loaders were asked for
        self._checkpoint: Mapping[str, Any] | None = None  # of Lightning, which the fit continues
        self._should_stop = False
        self.strategy = Strategy(self)
        self.precision_plugin = PrecisionView(self)
        self._data_connector = DataConnector(self)
        self.fit_loop = self._logger_connector = FitLoop(self)

    def _init_evaluations(self, val_check_interval: Any, n_sanity: int | None) -> None:
        "Read when to evaluate: a time, a share of an epoch or a number of batches."
        self.val_check_seconds = read_seconds(val_check_interval)
        every = None if self.val_check_seconds is not None else val_check_interval
        self.val_check_interval = read_limit('val_check_interval', every)
        n_sanity = 2 if n_sanity is None else n_sanity
        self.num_sanity_val_steps: float = math.inf if n_sanity == -1 else n_sanity

    @classmethod
    def of_learner(cls, host: LightningHost, **options: Any) -> Trainer:
        "Return the Trainer of a Learner that was made without one."
        trainer = cls(
            logger=False, enable_checkpointing=False, enable_model_summary=False, **options
        )
        trainer.host = host
        trainer.loggers = [LoggerView(trainer)]
        trainer._callbacks = None
        trainer.max_epochs = -1
        return trainer

    # -- options -----------------------------------------------------------------------------------

    def _add_callbacks(
        self, checkpointing: bool | None, summary: bool | None, max_time: Any
    ) -> None:
        "Add the callbacks of Lightning that its Trainer adds."
        has_checkpoint = bool(self.checkpoint_callbacks)
        if has_checkpoint and checkpointing is False:
            raise OptionError(
                'Trainer(enable_checkpointing=False) with a ModelCheckpoint: leave one out.'
            )
        if self.progress_bar_callback is not None and not self.enable_progress_bar:
            raise OptionError(
                'Trainer(enable_progress_bar=False) with a progress bar: leave one out.'
            )
        added = []
        if not has_checkpoint and checkpointing is not False:
            added.append(make_default('callbacks.ModelCheckpoint'))
        if max_time is not None and not self.list_kind('Timer'):
            timer = make_default('callbacks.Timer', duration=max_time, interval='step')
            if timer is None:
                raise OptionError('Trainer(max_time=...) needs Lightning: use `learn.fit("2h")`.')
            added.append(timer)
        if summary is not False and not self.list_kind('ModelSummary'):
            added.append(make_default('callbacks.ModelSummary'))
        assert self._callbacks is not None
        self._callbacks = sort_callbacks([*self._callbacks, *filter(None, added)])

    def _make_loggers(self, logger: Any) -> list[Any]:
        "Return the loggers of the option `logger`; True is TensorBoard, or a CSV file without that package."
        if logger is None or logger is True:
            folder = self.default_root_dir
            try:
                made = make_default('loggers.TensorBoardLogger', folder)
            except ModuleNotFoundError:
                made = make_default('loggers.CSVLogger', folder)
            return [LoggerView(self) if made is None else made]
        return list(logger) if isinstance(logger, (list, tuple)) else as_list(logger or None)

    def _shorten(self) -> None:
        "Set the options that `fast_dev_run` and `overfit_batches` set."
        n = int(self.fast_dev_run)
        if n:
            self.limit_train_batches = self.limit_val_batches = n
            self.limit_test_batches = self.limit_predict_batches = n
            self.max_steps, self.max_epochs, self.num_sanity_val_steps = n, 1, 0
            self.val_check_interval, self.val_check_seconds = 1.0, None
            self.check_val_every_n_epoch = 1
            dummy = make_default('loggers.logger.DummyLogger') if self.loggers else None
            self.loggers = [] if dummy is None else [dummy]
        if self.overfit_batches > 0:
            self.limit_train_batches = self.limit_val_batches = self.overfit_batches

    # -- runs --------------------------------------------------------------------------------------

    def fit(
        self,
        model: nn.Module,  # LightningModule
        train_dataloaders: Any = None,  # loader, or a data module
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,  # checkpoint of Lightning or learnkit, 'best', 'last'
        weights_only: bool | None = None,  # files are always read as plain data
    ) -> None:
        "Train a module, as `lightning.Trainer.fit`."
        source = self._connect(
            'fit', model, datamodule, train=train_dataloaders, val=val_dataloaders
        )
        path = self._find_checkpoint(ckpt_path)
        resume = self.resume
        if path is not None and not is_lightning_file(path):
            resume = path
        elif path is not None:
            self._checkpoint = read_checkpoint(path)
            self.first_epoch = find_first_epoch(path, self._checkpoint)
            load_weights(self, self._checkpoint)
        learn = self._make_learner(self._list_fit_loaders(source))
        # a fit without a number of epochs ends at a limit of its own, see `is_over`
        length = self.max_epochs if self.max_epochs >= 0 else Time(2**40, 'ba')
        with self._settings():
            learn.fit(length, resume=resume)

    def validate(
        self,
        model: Any = None,  # None: the module of the last run
        dataloaders: Any = None,  # loaders, or a data module
        ckpt_path: Any = None,
        verbose: bool = True,  # print the results
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # of each loader
        "Evaluate validation loaders, as `lightning.Trainer.validate`."
        named = self._begin('validate', model, dataloaders, datamodule, ckpt_path)
        return self._evaluate(named, verbose)

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        "Evaluate test loaders with `test_step`, as `lightning.Trainer.test`."
        named = self._begin('test', model, dataloaders, datamodule, ckpt_path)
        return self._evaluate(named, verbose)

    def _evaluate(self, named: dict[str, Any], verbose: bool) -> list[dict[str, float]]:
        "Evaluate loaders, and return the logged values of each."
        with self._settings():
            self.host.evaluate(named)
        results: list[dict[str, float]] = self.host.logged.list_results(len(named))
        if verbose and self.is_global_zero:
            for values in results:
                print('\n'.join(f'{name:>25}  {value}' for name, value in values.items()))
        self._end()
        return results

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> Any:  # results of `predict_step` by batch; of several loaders, a list of these
        "Predict with `predict_step`, as `lightning.Trainer.predict`."
        named = self._begin('predict', model, dataloaders, datamodule, ckpt_path)
        with self._settings():
            predicted = self.host.predict(named, return_predictions is not False)
        self._end()
        if return_predictions is False:
            return None
        return predicted[0] if len(predicted) == 1 else predicted

    def _begin(
        self, fn: str, model: Any, loaders: Any, datamodule: Any, path: Any
    ) -> dict[str, Any]:
        "Begin an evaluation or a prediction, and return its loaders by name."
        if model is None and self.host is None:
            raise FitError(f'Trainer.{fn}() without a module: pass one, or fit one first.')
        if model is None and path is None and self.checkpoint_callback is not None:
            path = 'best'
        module = self.host.module if model is None else model
        source = self._connect(fn, module, datamodule, **{KINDS[fn]: loaders})
        file = self._find_checkpoint(path)
        if file is not None:
            load_weights(self, read_checkpoint(file))
        named = source.list_named(KINDS[fn])
        if self.learn is None:
            self._make_learner(DataLoaders(next(iter(named.values())), named))
        return named

    def _connect(self, fn: str, module: nn.Module, datamodule: Any, **given: Any) -> LoaderSource:
        "Connect a module and its data: call the hooks before the loaders are asked for."
        check_alone(os.environ.get('WORLD_SIZE', '1'))
        module = getattr(module, '_orig_mod', module)  # of torch.compile
        for kind, loader in given.items():
            if hasattr(loader, f'{kind}_dataloader'):
                datamodule, given[kind] = loader, None
        self.fn = fn
        is_new = self.host is None or self.host.module is not module
        if fn == 'fit' or is_new:
            before = None if is_new else self.host
            # these modules import this one
            run = import_module('learnkit.interop.lightning.run')
            self.host = run.LightningRun(module, trainer=self)
            self.first_epoch = 0 if before is None else count_epochs(before)
            self._validation_epoch = self.first_epoch
            if before is not None:
                self.host.continue_counts(before)
        self._should_stop = False
        self._checkpoint = None
        self.source = LoaderSource(self, module, datamodule, self.datamodule, **given)
        if datamodule is not None:
            datamodule.trainer = self
        self.host.attach()
        self._merge_callbacks(module)
        self.source.prepare(fn)
        self.host.begin(fn)
        return self.source

    def _merge_callbacks(self, module: nn.Module) -> None:
        "Add the callbacks of the module, which replace those of their class."
        own = list_own_callbacks(module)
        assert self._callbacks is not None
        replaced = tuple(
            type(cb) for cb in self._callbacks if any(isinstance(o, type(cb)) for o in own)
        )
        kept = [cb for cb in self._callbacks if type(cb) not in replaced]
        self._callbacks = sort_callbacks([*kept, *own])

    def _list_fit_loaders(self, source: LoaderSource) -> DataLoaders:
        """Return the loaders of a fit.

        The validation loaders are asked for first if some batches are evaluated before the fit, as in Lightning."""
        has_valid = self.has_validation and source.has('val')
        valid: dict[str, Any] = {}
        if has_valid and self.num_sanity_val_steps:
            with preserved_rng():
                valid = source.list_named('val')
        train = source.get_train()
        if has_valid and not valid:
            valid = source.list_named('val')
        return DataLoaders(train, valid or None)

    def make_learner(
        self, module: nn.Module, dls: Any, cbs: Any, options: Mapping[str, Any]
    ) -> Any:
        "Return a Learner that trains a module with this Trainer's options, for `from_lightning`."
        is_pair = isinstance(dls, tuple) and len(dls) == 2
        train, valid = dls if is_pair else (dls, None)
        if isinstance(dls, DataLoaders):
            train, valid = dls.train, dict(dls.evaluation) or None
        source = self._connect('fit', module, None, train=train, val=valid)
        return self._make_learner(self._list_fit_loaders(source), as_list(cbs), **options)

    def _make_learner(self, dls: DataLoaders, cbs: Sequence[Any] = (), **options: Any) -> Any:
        lightning = import_module('learnkit.interop.lightning.adapter')
        dls.device = self.device
        assert self._callbacks is not None
        self._callbacks = sort_callbacks([*self._callbacks, *cbs])
        adapted = [lightning.as_learnkit(cb) for cb in self._callbacks]
        own_loggers = [cb for cb in self.loggers if isinstance(cb, Callback)]
        more: list[Callback] = []
        if self.precision_option.autocast:
            more.append(MixedPrecision(self.precision_option.autocast))
        if self.resume and not any(isinstance(cb, Checkpoint) for cb in adapted):
            more.append(Checkpoint(folder=Path(self.default_root_dir, 'resume')))
        options.setdefault('path', self.default_root_dir)
        return lightning.LightningLearner(
            self.host, dls, [*adapted, *own_loggers, *more], **options
        )

    def _find_checkpoint(self, ckpt_path: Any) -> Path | None:
        "Return the file of a checkpoint: a path, or the best or last one of `ModelCheckpoint`."
        if ckpt_path is None or ckpt_path not in ('best', 'last'):
            return None if ckpt_path is None else Path(ckpt_path)
        keeper = self.checkpoint_callback
        path = getattr(keeper, f'{ckpt_path}_model_path', '')
        if not path:
            raise OptionError(
                f'ckpt_path={ckpt_path!r}: no ModelCheckpoint has written such a file.'
            )
        return Path(path)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        "Run within the contexts of the options, without a bar of the Learner if it is not to be shown."
        is_fit = self.fn == 'fit'
        has_bar = is_fit and self.enable_progress_bar and self.progress_bar_callback is None
        grad = torch.inference_mode() if self.inference_mode else torch.no_grad()
        with (
            torch.autograd.set_detect_anomaly(self.detect_anomaly) if is_fit else grad,
            nullcontext() if has_bar else self.learn.no_bar(),
        ):
            yield

    def _end(self) -> None:
        "End an evaluation or a prediction."
        self.host.end(self.fn)
        self.fn = None

    def tear_down(self, fn: str) -> None:
        "Tear the data module down."
        if self.source is not None:
            self.source.tear_down(fn)

    def close(self, status: str) -> None:
        "Close loggers and profiler."
        for logger in self.own_loggers:
            logger.finalize(status)
        if self.active_profiler is not None:
            self.active_profiler.describe()

    def reload_loaders(self) -> None:
        "Ask for the training loader again, if its epochs have passed."
        learn, every = self.learn, self.reload_dataloaders_every_n_epochs
        n = learn.epoch - self.first_epoch
        if self.is_independent or not every or n == 0 or n % every or self.source is None:
            return
        self.source.ask_again('train')
        learn.dls.train = self.source.get_train()
        iter(learn.dls.train)  # as Lightning, which begins the pass twice

    def reload_validation(self) -> None:
        "Ask for the validation loaders again, if their epochs have passed."
        learn, every = self.learn, self.reload_dataloaders_every_n_epochs
        if every and learn.epoch - self._validation_epoch >= every and self.source is not None:
            self._validation_epoch = learn.epoch
            self.source.ask_again('val')
            learn.dls.evaluation = list(self.source.list_named('val').items())

    def open_loggers(self) -> None:
        open_loggers(self.own_loggers)

    def take_checkpoint(self) -> Mapping[str, Any] | None:
        "Return the checkpoint of Lightning that the fit continues, once."
        checkpoint, self._checkpoint = self._checkpoint, None
        return checkpoint

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool = False, **unused: Any
    ) -> None:
        "Write a file that `load_from_checkpoint` reads. To resume, `Checkpoint` writes files of its own."
        if self.is_global_zero:
            Path(filepath).parent.mkdir(parents=True, exist_ok=True)
            torch.save(dump_checkpoint(self, bool(weights_only)), filepath)
        self.strategy.barrier()


def list_own_callbacks(module: nn.Module) -> list[Any]:
    "Return the callbacks that a module brings."
    hooks = own_hooks(module, ['configure_callbacks'], LIGHTNING_BASES)
    return as_list(hooks.get('configure_callbacks', list)())


def count_epochs(host: LightningHost) -> int:
    "Return the number of epochs that an earlier fit of the module has trained."
    return 0 if host.learn is None else int(host.learn.epoch + host.is_over)


def sort_callbacks(callbacks: list[Any]) -> list[Any]:
    "Return callbacks in Lightning's order: those that write checkpoints last."
    return sorted(callbacks, key=lambda cb: 'Checkpoint' in find_class_names(cb))


def make_profiler(profiler: Any) -> Any:
    "Return a profiler of Lightning, given by name, as an instance or as None; None without Lightning."
    if isinstance(profiler, str):
        if profiler.lower() not in PROFILERS:
            known = ', '.join(PROFILERS)
            raise OptionError(f'Trainer(profiler={profiler!r}) is not supported: one of {known}.')
        return make_default(f'profilers.{PROFILERS[profiler.lower()]}')
    return make_default('profilers.PassThroughProfiler') if profiler is None else profiler


def is_lightning_file(path: Path) -> bool:
    "Return True for a checkpoint that `torch.save` has written, in contrast to learnkit's own."
    return path.is_file() and is_zipfile(path)
