# SPDX-License-Identifier: Apache-2.0
"""Train a LightningModule in a Learner, and run Lightning's callbacks in any Learner: `from_lightning`."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from learnkit.core.errors import CallbackError, LoaderError, ModelError, OptionError
from learnkit.core.kinds import DATA, DATA_MODULE, LIGHTNING_TRAINER, explain_kind, find_kind
from learnkit.core.time import as_time
from learnkit.data.dataloaders import DataLoaders
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import as_callback, as_list
from learnkit.engine.pause import PausedState
from learnkit.interop.common.adapter import CallbackAdapter, find_or_add
from learnkit.interop.common.hooks import LIGHTNING_BASES, own_hooks
from learnkit.interop.lightning.compile import TracedTraining
from learnkit.interop.lightning.data import LoaderSource
from learnkit.interop.lightning.flow import flow_as_lightning
from learnkit.interop.lightning.host import TRANSFER_HOOKS, find_class_names
from learnkit.interop.lightning.run import HOOKS, REPLACED, LightningRun
from learnkit.interop.lightning.trainer import Trainer, list_own_callbacks
from learnkit.learner import Learner

TRAINER_OPTIONS = (
    'accumulate_grad_batches',
    'gradient_clip_val',
    'gradient_clip_algorithm',
    'log_every_n_steps',
)


def from_lightning(
    module_or_callback: Any,  # LightningModule, or a callback of Lightning
    dls: Any = None,  # LightningDataModule, or data as for `Learner`; None: the module's own loaders
    cbs: Any = None,  # callbacks of Lightning and of learnkit
    **options: Any,  # options of Lightning's Trainer and of `Learner`, see below
) -> Any:
    """Return a Learner that trains a LightningModule as it is, or a Callback that runs a callback of Lightning.

    The module's own methods train: `training_step`, `validation_step`, `predict_step`,
    `configure_optimizers`, `optimizer_step`, `configure_gradient_clipping` and every `on_*` hook, in
    Lightning's order, with manual optimization too. Values of `self.log` are columns of the history and
    reach the loggers; `valid_loss` is what `validation_step` returns, or logs as
    `val_loss`. `self.trainer` provides what modules and callbacks read of Lightning's Trainer; anything
    else is an `AttributeError` by name. `learn.validate(dl=loader)` calls `test_step` if the module has one.

    With `trainer=Trainer(...)` of this module the Learner has all options of Lightning's Trainer, and draws random
    numbers in its order. Without, the options of the Trainer are `accumulate_grad_batches`, `gradient_clip_val`,
    `gradient_clip_algorithm` and `log_every_n_steps`; `learn.fit(3)` is `max_epochs=3`. The data module
    is set up when the Learner is made. Any `nn.Module` with `training_step` and `configure_optimizers`
    will do; Lightning need not be installed. `MixedPrecision('bf16')` as a callback
    corresponds to `precision='bf16-mixed'`; `training_step` then casts a weight at each use, as in Lightning.

    Checkpointed: schedulers, logged values, torchmetrics and plain public attributes of the module,
    what its `on_save_checkpoint` adds, and the states of callbacks.

    Raises `ModelError` for a module without these methods and, before training, for a callback that reads what only a
    LightningModule has, if the model is another one. Raises `CallbackError` for an object without hooks, for a Trainer,
    and for callbacks that need one: `BasePredictionWriter`, `BatchSizeFinder`, `LearningRateFinder`,
    `ThroughputMonitor`.

    >>> import torch
    >>> class Line(nn.Module):  # or LightningModule
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = nn.Linear(1, 1)
    ...     def training_step(self, batch, batch_idx):
    ...         x, y = batch
    ...         loss = nn.functional.mse_loss(self.net(x), y)
    ...         self.log('mse', loss, on_step=False, on_epoch=True)
    ...         return loss
    ...     def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> learn = from_lightning(Line(), DataLoaders.from_tensors((x, 2 * x), bs=16))
    >>> with learn.no_bar(): learn.fit(2)
    >>> [*learn.history[0]], learn.history[0]['mse'] > learn.history[1]['mse']
    (['fit', 'epoch', 'train_loss', 'mse', 'time'], True)
    """
    is_module = isinstance(module_or_callback, nn.Module) and not is_callback(module_or_callback)
    if is_module and hasattr(module_or_callback, 'training_step'):
        trainer = options.pop('trainer', None)
        if not isinstance(trainer, Trainer):
            check_no_trainer(trainer)
            return make_learner(module_or_callback, dls, cbs, options)
        check_module(module_or_callback, options)
        return trainer.make_learner(module_or_callback, dls, cbs, options)
    if is_module or dls is not None or cbs is not None or options:
        is_known = not (is_module or is_callback(module_or_callback))
        raise ModelError(
            (is_known and explain_kind(module_or_callback, 'a LightningModule'))
            or f'{type(module_or_callback).__name__} has no `training_step`: pass a LightningModule with its data, or '
            'a callback alone.'
        )
    return _FromLightning(module_or_callback)


def make_learner(module: nn.Module, dls: Any, cbs: Any, options: dict[str, Any]) -> Learner:
    "Return the Learner of a module that has no Trainer of its own."
    check_module(module, options)
    adapted = [as_learnkit(cb) for cb in [*as_list(cbs), *list_own_callbacks(module)]]
    check_source(dls)
    given = {name: options.pop(name) for name in TRAINER_OPTIONS if name in options}
    host = LightningRun(module, **given)
    host.attach()
    return LightningLearner(host, make_dls(host, dls), adapted, **options)


def check_source(dls: Any) -> None:
    "Raise `LoaderError` for an object that is not a source of data, such as Lightning's Trainer."
    kind = find_kind(dls)
    if kind not in (None, DATA, DATA_MODULE):
        raise LoaderError(explain_kind(dls, 'data'))


def make_dls(host: LightningRun, dls: Any) -> Any:
    "Return the loaders of a LightningDataModule or of the module; other data as they are."
    if dls is not None and not hasattr(dls, 'train_dataloader'):
        is_pair = isinstance(dls, tuple) and len(dls) == 2
        return DataLoaders(dls[0], name_loaders(dls[1])) if is_pair else dls
    source = host.trainer.source = LoaderSource(host.trainer, host.module, dls)
    if dls is not None:
        dls.trainer = host.trainer
    source.prepare('fit')
    if dls is None:
        host.set_up_module()
    return DataLoaders(source.get_train(), source.list_named('val') or None)


def name_loaders(valid: Any) -> Any:
    "Return a list of validation loaders as a dict; anything else as it is."
    is_list = isinstance(valid, (list, tuple)) and valid
    if not is_list or not all(isinstance(dl, DataLoader) for dl in valid):
        return valid
    return {f'valid_{i}': dl for i, dl in enumerate(valid)} if len(valid) > 1 else valid[0]


class _FromLightning(CallbackAdapter):
    "Hold a callback of Lightning, and its state; `LightningRun` calls its hooks."

    order = 60
    library = 'lightning'
    style = 'Lightning'

    def __init__(self, cb: Any) -> None:
        self.wrap(cb, HOOKS, own_hooks(cb, HOOKS))
        check_has_trainer(cb)

    def on_added(self) -> None:
        "Have the hooks called by the Learner's `LightningRun`, and set the callback's `log`."
        host = find_or_add(self.learn, LightningRun)
        host.bind_events()
        self.wrapped.log, self.wrapped.log_dict = host.logged.log, host.logged.log_dict


def check_has_trainer(cb: Any) -> None:
    "Raise `CallbackError` for a callback of Lightning that needs parts of its Trainer that a Learner does not have."
    for name in find_class_names(cb):
        if name in REPLACED:
            raise CallbackError(
                f"{type(cb).__name__} needs Lightning's own Trainer, which a Learner replaces: use {REPLACED[name]}."
            )


def is_callback(cb: Any) -> bool:
    "Return True for an instance or a subclass of Lightning's class of callbacks."
    kind = find_kind(cb)
    return kind is not None and kind.maker == 'from_lightning'


def as_learnkit(cb: Any) -> Callback:
    "Return an adapter of a callback with the hooks of Lightning; pass any other callback to `as_callback`."
    is_other = isinstance(cb, (Callback, type)) or hasattr(cb, 'before_fit')
    is_like = not is_other and find_kind(cb) is None and bool(own_hooks(cb, HOOKS))
    return _FromLightning(cb) if is_like or is_callback(cb) else as_callback(cb)


class LightningLearner(Learner):
    "Learner that trains a LightningModule by the module's own methods; `from_lightning` makes it."

    def __init__(self, host: LightningRun, dls: Any, cbs: list[Any], **options: Any) -> None:
        self._host = host
        if 'validation_step' not in own_hooks(host.module, ['validation_step'], LIGHTNING_BASES):
            options.setdefault('eval_every', None)
        super().__init__(
            dls,
            host.module,
            opt_func=host.optimization.make_optimizers,
            cbs=[host, *cbs],
            **options,
        )
        self.seams.traced = TracedTraining(host, LightningLearner)
        if not host.trainer.is_independent:
            flow_as_lightning(self, host)

    @override
    def fit(self, n_epoch: Any, *args: Any, **kwargs: Any) -> None:
        "Train as `Learner.fit`, with new optimizers of `configure_optimizers`."
        trainer, length = self._host.trainer, as_time(n_epoch, 'ep')
        if trainer.is_independent or length.unit == 'ep':
            trainer.max_epochs = int(length.value) if length.unit == 'ep' else -1
        if trainer.is_independent:
            trainer.max_steps = int(length.value) if length.unit in ('st', 'ba') else -1
        if len(args) < 4:  # `reset_opt` is not given by position
            is_paused = isinstance(kwargs.get('resume'), PausedState)
            kwargs.setdefault('reset_opt', not is_paused)
        super().fit(n_epoch, *args, **kwargs)

    @override
    def create_opt(self) -> None:
        self._host.set_up()
        super().create_opt()
        self.opt.seen = None  # parameters stay in the groups into which the module has put them

    @override
    def _set_device(self, b: Any) -> Any:
        host = self._host
        b = host.trainer.precision_plugin.convert_input(b)
        before, move, after = (host.find_hooks(name)[2] for name in TRANSFER_HOOKS)
        if not (before or move or after):
            return super()._set_device(b)
        index = host.loader_index() or 0
        b = b if before is None else before(b, index)
        device = host.trainer.strategy.root_device
        b = super()._set_device(b) if move is None else move(b, device, index)
        self.batch = b if after is None else after(b, index)
        return self.batch

    @override
    def _split(self, b: Any) -> None:
        super()._split(b)
        self._host.note_batch(b)

    @override
    def train_batch(self) -> None:
        self._host.optimization.train_batch()

    @override
    def evaluate_batch(self) -> None:
        host = self._host
        if self.phase == 'predict':
            name = 'predict_step' if hasattr(host.module, 'predict_step') else 'forward'
            host.optimization.output = host.run_step(name)
            return
        output = host.optimization.output = host.run_step(f'{host.stage}_step')
        loss = output.get('loss') if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            loss = host.logged.find_loss()
        if loss is not None:
            self.report_loss(loss)


def check_no_trainer(trainer: Any) -> None:
    "Raise `OptionError` for Lightning's own Trainer, whose options it has read already."
    if trainer is not None:
        raise OptionError(f'trainer={type(trainer).__name__}(...): {LIGHTNING_TRAINER.place}.')


def check_module(module: nn.Module, options: Mapping[str, Any]) -> None:
    "Raise for a module that cannot be trained, and for options of the Trainer that `fit` has."
    if not callable(getattr(module, 'configure_optimizers', None)):
        raise ModelError(f'{type(module).__name__} has no `configure_optimizers`.')
    step: Any = module.training_step
    if 'dataloader_iter' in signature(step).parameters:
        raise ModelError('training_step(dataloader_iter) is not supported: take `batch`.')
    for name, fix in (('max_epochs', 'learn.fit(3)'), ('max_steps', "learn.fit('100ba')")):
        if name in options:
            raise OptionError(f'{name}={options[name]!r} is the length of a fit: `{fix}`.')
