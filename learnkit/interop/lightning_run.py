# SPDX-License-Identifier: Apache-2.0
"""Hooks of Lightning's callbacks and of a LightningModule, called at the events of a Learner."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from typing_extensions import override

from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.core.autocast import uncached_autocast
from learnkit.core.batch import rebuild
from learnkit.core.contexts import replacing_yield
from learnkit.core.errors import CancelEpochException, ModelError, OptionError
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.callback import Callback
from learnkit.engine.callback_state import decode
from learnkit.engine.train_eval import keep_modes
from learnkit.interop.adapter import list_adapters
from learnkit.interop.hooks import (
    LIGHTNING_BASES,
    keep_plain,
    own_hooks,
    send_to_loggers,
    takes_several,
)
from learnkit.interop.lightning_log import EPOCH_HOOKS, STEP_HOOKS, LoggedValues, size_of
from learnkit.interop.lightning_optim import Optimization
from learnkit.interop.lightning_trainer import Trainer, list_saved, load_module_state, module_state

HOOKS = (
    *(name for name in sorted(STEP_HOOKS | EPOCH_HOOKS) if name.startswith('on_')),
    *'setup teardown on_fit_start on_fit_end on_train_end on_validation_end on_test_end'.split(),
    *'on_predict_start on_predict_epoch_start on_predict_batch_start on_predict_batch_end'.split(),
    *'on_predict_epoch_end on_predict_end on_exception on_save_checkpoint'.split(),
)
# hooks of callbacks at the events of a batch
BATCH_HOOKS = {
    'before_batch': ('on_train_batch_start', 'on_validation_batch_start', 'on_predict_batch_start'),
    'before_backward': ('on_before_zero_grad', 'on_before_backward'),
    'after_backward': ('on_after_backward',),
    'before_step': ('on_before_optimizer_step',),
    'after_batch': ('on_train_batch_end', 'on_validation_batch_end', 'on_predict_batch_end'),
}
# hooks that a data module may have instead of the module
TRANSFER_HOOKS = 'on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer'.split()
# attribute of a LightningModule that a callback of Lightning reads, by its class
NEEDED = {
    'BackboneFinetuning': 'backbone',
    'GradientAccumulationScheduler': 'automatic_optimization',
    'ModelCheckpoint': 'automatic_optimization',
    'ModelPruning': 'current_epoch',
    'ModelSummary': 'example_input_array',
    'StochasticWeightAveraging': 'device',
    'WeightAveraging': 'device',
}
# callbacks that need parts of Lightning's own Trainer, and what does the same in a Learner
REPLACED = {
    'BasePredictionWriter': '`learn.get_preds(sink=folder)`',
    'BatchSizeFinder': '`learn.find_batch_size()`',
    'LearningRateFinder': '`learn.lr_find()`',
    'ThroughputMonitor': 'the callback `SpeedMonitor`',
}
OPTIMIZATION_METHODS = ('optimizers', 'lr_schedulers', 'manual_backward', 'clip_gradients')


def find_class_names(cb: Any) -> list[str]:
    "Return the names of the classes of Lightning of which a callback is an instance."
    return [cls.__name__ for cls in type(cb).__mro__ if 'lightning' in cls.__module__]


class LightningRun(Callback):
    """Call the hooks of a Learner's Lightning callbacks, and of its LightningModule.

    Callbacks come before the module, and those that monitor a value last at the end of an epoch.
    """

    order = 60
    runs_first = ('after_epoch',)  # what is logged there belongs to the epoch's row

    def __init__(
        self,
        module: Any = None,  # LightningModule; None: the hooks are of callbacks alone
        **options: Any,  # of the trainer
    ) -> None:
        self.module = module
        self.trainer = Trainer(self, **options)
        self.logged = LoggedValues(self)
        self.optimization = Optimization(self)
        self.hook_name = ''  # hook that is running
        self.stage = ''  # 'validation' or 'test' during an evaluation
        self.is_over = False  # True from the end of the last epoch on
        self.has_evaluated = False
        self._hooks: dict[str, tuple[list[Any], list[Any], Any]] = {}
        self._parts: tuple[Any, ...] = ()  # inputs and targets of `_batch`
        self._batch: Any = None
        # what `lr_find` restores
        self._values = [self.logged.entries, self.logged.callback_metrics]

    def on_added(self) -> None:
        self.bind_events()
        self.attach()

    def attach(self) -> None:
        "Give the module its trainer, which a copy of a LightningModule loses, and the methods that need it."
        if self.module is None:
            return
        self.module.trainer = self.trainer
        for owner, names in (
            (self.logged, ('log', 'log_dict')),
            (self.trainer, ('print',)),
            (self.optimization, OPTIMIZATION_METHODS),
        ):
            for name in names:
                object.__setattr__(self.module, name, getattr(owner, name))

    def __repr__(self) -> str:
        return type(self).__name__

    def bind_events(self) -> None:
        "Handle the events of a batch for which there are hooks."
        self._hooks = {}
        for event, names in BATCH_HOOKS.items():
            is_needed = self.module is not None or any(self.find_hooks(name)[0] for name in names)
            if is_needed and event not in vars(self):
                setattr(self, event, getattr(self, f'_{event}'))

    # -- hooks -----------------------------------------------------------------------------------

    def list_callbacks(self) -> list[Any]:
        "Return Lightning's callbacks in its order: those that write checkpoints last."
        wrapped = [cb.wrapped for cb in list_adapters(self.learn, 'lightning')]
        return sorted(wrapped, key=lambda cb: self.is_kind(cb, 'Checkpoint'))

    def is_kind(self, cb: Any, *names: str) -> bool:
        "Return True if a callback has one of these classes of Lightning."
        return any(name in names for name in find_class_names(cb))

    def find_hooks(self, name: str) -> tuple[list[Any], list[Any], Any]:
        "Return the hooks of callbacks, of callbacks that monitor a value, and the module's or None."
        if name not in self._hooks:
            hooks: tuple[list[Any], list[Any]] = [], []
            for cb in self.list_callbacks():
                monitors = self.is_kind(cb, 'Checkpoint', 'EarlyStopping')
                is_last = monitors and name == 'on_train_epoch_end'
                hooks[is_last].extend(own_hooks(cb, [name], LIGHTNING_BASES).values())
            self._hooks[name] = *hooks, self.find_own(name)
        return self._hooks[name]

    def find_own(self, name: str) -> Any:
        "Return the hook that the module, or for the transfer of batches its data module, defines; or None."
        owners = [self.module]
        if name in TRANSFER_HOOKS and self.trainer.datamodule is not None:
            owners.insert(0, self.trainer.datamodule)
        found = [own_hooks(owner, [name], LIGHTNING_BASES).get(name) for owner in owners]
        return next((hook for hook in found if hook is not None), None)

    def running(self, name: str) -> Any:
        "Return a context that notes which hook runs, for `log`."
        return replacing_yield(self, 'hook_name', name)

    def fire(self, name: str, *args: Any) -> Any:
        "Call a hook of all callbacks and of the module; return the module's result."
        before, last, own = self.find_hooks(name)
        if not (before or last or own):
            return None
        with self.running(name):
            for hook in before:
                self._call_hook(hook, *args)
            result = None if own is None else own(*args)
            for hook in last:
                self._call_hook(hook, *args)
        return result

    def _call_hook(self, hook: Callable[..., Any], *args: Any) -> None:
        "Call a hook of a callback; raise `ModelError` if it reads what only a LightningModule has."
        try:
            hook(self.trainer, self.learn.model, *args)
        except AttributeError as e:
            if self.module is not None or e.obj is not self.learn.model or e.name is None:
                raise
            owner = type(getattr(hook, '__self__', hook)).__name__
            raise self._make_error(f'{owner}.{self.hook_name}', e.name) from e

    def _make_error(self, what: str, attribute: str) -> ModelError:
        "Return the error for a callback that reads an attribute that the model does not have."
        return ModelError(
            f'{what} reads `{attribute}` of a LightningModule, and the model is a {type(self.learn.model).__name__} '
            'without it: train a LightningModule by `from_lightning(module, dls, cbs=...)`, or leave the callback out.'
        )

    def check_callbacks(self) -> None:
        "Raise `ModelError` for a callback of Lightning that needs a LightningModule, if the model is another one."
        for cb in self.list_callbacks():
            for name, attribute in NEEDED.items():
                if self.is_kind(cb, name) and not hasattr(self.learn.model, attribute):
                    raise self._make_error(type(cb).__name__, attribute)

    def fire_all(self, names: str, *args: Any) -> None:
        for name in names.split():
            self.fire(name, *args)

    def fire_own(self, name: str, default: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        "Call a hook that only the module has, or the default."
        own = self.find_hooks(name)[2] or default
        with self.running(name):
            return own(*args, **kwargs)

    # -- the batch -------------------------------------------------------------------------------

    def current_batch(self) -> Any:
        "Return the batch as the loader gave it, with the inputs and targets that the Learner has now."
        learn = self.learn
        parts = (*learn.xb, *learn.yb)
        is_same = len(parts) == len(self._parts)
        if not is_same or any(a is not b for a, b in zip(parts, self._parts, strict=True)):
            is_row = isinstance(learn.batch, (tuple, list))
            self._batch = rebuild(learn.batch, list(parts)) if is_row else parts[0]
            self._parts = parts
        return self._batch

    def batch_size(self) -> int:
        "Return the weight of a value that is logged now."
        return 1 if self._batch is None else size_of(self._batch)

    @property
    def is_last_batch(self) -> bool:
        return self.learn.n_iter is not None and self.learn.iter + 1 == self.learn.n_iter

    def loader_index(self) -> int | None:
        "Return the number of the current one of several validation loaders."
        names = [name for name, _ in evaluation_loaders(self.learn.dls)]
        if not self.stage or len(names) < 2 or self.learn.dl_name not in names:
            return None
        return names.index(self.learn.dl_name)

    def loader_suffix(self) -> str:
        "Return what is added to names of values of one of several validation loaders."
        is_between = self.hook_name.endswith(('epoch_end', 'epoch_start'))
        index = None if is_between else self.loader_index()
        return '' if index is None else f'/dataloader_idx_{index}'

    def step_arguments(self) -> tuple[Any, ...]:
        index = self.loader_index()
        return (self.current_batch(), self.learn.iter, *(() if index is None else (index,)))

    def run_step(self, name: str) -> Any:
        "Call `training_step` or another step of the module as the forward pass of the batch."
        step, args = getattr(self.module, name), self.step_arguments()
        if not takes_several(step):
            args = (args[0], *args[2:])
        # Lightning uses no cache: `training_step` may take several steps, or change weights itself
        is_training = name == 'training_step'
        autocast = uncached_autocast() if is_training else nullcontext()
        with self.running(name), autocast:
            return self.learn.forward(step, *args)

    # -- events of batches, bound by `bind_events` -------------------------------------------------

    def _batch_stage(self) -> str:
        learn = self.learn
        return 'predict' if learn.phase == 'predict' else 'train' if learn.training else self.stage

    def _before_batch(self) -> None:
        self._parts = ()
        self.optimization.output = None
        self.logged.newest = {}
        result = self.fire(f'on_{self._batch_stage()}_batch_start', *self.step_arguments())
        if self.learn.training and result == -1:
            self.optimization.step_schedulers('step', False)
            self.optimization.step_schedulers('epoch', False)
            raise CancelEpochException  # without an evaluation

    def _before_backward(self) -> None:
        if self.module is None:
            self.fire('on_before_zero_grad', self.trainer.optimizers[0])
        self.fire('on_before_backward', self.learn.loss_grad)

    def _after_backward(self) -> None:
        self.fire('on_after_backward')

    def _before_step(self) -> None:
        if not self.optimization.repeats:
            self.optimization.prepare_step(self.learn.opt[self.learn.turn or 0])

    def _after_batch(self) -> None:
        optimization, learn = self.optimization, self.learn
        if self.module is None:
            optimization.output = {'loss': learn.loss.detach()} if learn.training else learn.pred
        is_step = learn.training and not optimization.accumulates()
        is_last = learn.training and self.is_last_batch
        if is_step:
            optimization.step_schedulers('step', False)
        if is_last:
            optimization.step_schedulers('epoch', False)
        name = f'on_{self._batch_stage()}_batch_end'
        self.fire(name, optimization.output, *self.step_arguments())
        if is_step and not is_last:
            optimization.step_schedulers('step', True)
        self._batch, self._parts = None, ()

    # -- events of a fit -------------------------------------------------------------------------

    def set_up(self) -> None:
        "Call the hooks that come before the optimizers of a fit are made."
        self._hooks = {}
        self.attach()
        self.fire('setup', 'fit')
        self.fire_own('configure_model', bool)

    def before_fit(self) -> None:
        learn = self.learn
        self.is_over = False
        if learn.run.depth == 1:
            self.logged.forget()
        if not learn.fitting:
            return
        trainer = self.trainer
        if trainer.accumulate_grad_batches > 1 and trainer.num_training_batches == math.inf:
            raise OptionError('accumulate_grad_batches needs a training loader with a length.')
        if self.module is not None and any(
            isinstance(cb, GradientAccumulation) for cb in learn.cbs
        ):
            raise OptionError(
                'GradientAccumulation: a LightningModule clears its gradients itself. Use '
                '`from_lightning(..., accumulate_grad_batches=n)`, or accumulate in `training_step` with manual '
                'optimization.'
            )
        if self.module is None:  # a LightningModule was set up before its optimizers
            self.check_callbacks()
            self.trainer.max_epochs = learn.n_epoch or -1
            self.set_up()
        elif getattr(self.module, 'hparams', None):
            send_to_loggers(learn, 'log_params', dict(self.module.hparams))
        # Lightning leaves the mode of each module as it is
        keep_modes(learn)
        self.fire_all('on_fit_start on_train_start')

    def before_train(self) -> None:
        if not self.learn.resumed:  # a resumed epoch began before its checkpoint
            self.fire('on_train_epoch_start')

    def after_train(self) -> None:
        if self.learn.n_iter is None:
            self.optimization.step_schedulers('epoch', False)

    def after_epoch(self) -> None:
        if not self.learn.fitting:
            return
        if self.module is None:
            self.logged.note_metrics()
        self.logged.publish(training=True)
        self.fire('on_train_epoch_end')
        if self.is_last_batch:  # those of other batches had their step
            self.optimization.step_schedulers('step', True)
        self.optimization.step_schedulers('epoch', True)
        self.logged.reset(training=True)

    def after_fit(self) -> None:
        if self.learn.fitting:
            self.is_over = True
            self.fire_all('on_train_end on_fit_end')
            self.fire('teardown', 'fit')

    # -- events of evaluations -------------------------------------------------------------------

    def before_validate(self) -> None:
        learn = self.learn
        if self.stage or learn.phase == 'predict':
            return
        is_known = any(dl is learn.dl for _, dl in evaluation_loaders(learn.dls))
        is_test = not (learn.fitting or is_known) and self.find_own('test_step') is not None
        self.stage = stage = 'test' if is_test else 'validation'
        if not learn.fitting:
            self.fire('setup', self.trainer.state.fn)
        elif self.module is not None and not self.optimization.accumulates():
            self.fire_own('on_validation_model_zero_grad', self.module.zero_grad)
        self.fire_own(f'on_{stage}_model_eval', bool)
        self.fire_all(f'on_{stage}_start on_{stage}_epoch_start')

    @torch.no_grad()
    def after_eval(self) -> None:
        stage = self.stage
        if not stage:
            return
        if self.module is None:
            self.logged.note_metrics()
        self.logged.publish(training=False)
        self.has_evaluated = True
        self.fire_all(f'on_{stage}_epoch_end on_{stage}_end')
        self.logged.reset(training=False)
        self.fire_own(f'on_{stage}_model_train', bool)
        if not self.learn.fitting:
            self.fire('teardown', self.trainer.state.fn)
        self.stage = ''

    def before_predict(self) -> None:
        self.fire('setup', 'predict')
        self.fire_all('on_predict_start on_predict_epoch_start')

    def after_predict(self) -> None:
        self.fire_all('on_predict_epoch_end on_predict_end')
        self.fire('teardown', 'predict')

    def after_error(self) -> None:
        self.fire('on_exception', self.learn.error)

    def cleanup(self) -> None:
        self.stage = ''
        self.optimization.output = self._batch = None
        self._parts = ()
        self.logged.reset(training=True)
        self.logged.reset(training=False)

    # -- checkpoints -----------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return schedules, logged values, and the state of the module that is not weights."
        configs = self.optimization.configs
        return {
            'accumulate': self.trainer.accumulate_grad_batches,
            'steps': self.optimization.n_steps,
            'has_evaluated': self.has_evaluated,
            'schedulers': [keep_plain(config.scheduler.state_dict()) for config in configs],
            'logged': self.logged.state_dict(),
            'module': None if self.module is None else module_state(self),
        }

    def saved_of_model(self) -> list[str]:
        "Return the names of the attributes of the model that the state holds."
        return [] if self.module is None else list_saved(self.module)

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the state."
        self.trainer.accumulate_grad_batches = sd['accumulate']
        self.optimization.n_steps = sd['steps']
        self.has_evaluated = sd['has_evaluated']
        for config, state in zip(self.optimization.configs, sd['schedulers'], strict=False):
            scheduler = config.scheduler
            scheduler.load_state_dict(scheduler.state_dict() | decode(state, self))
        self.logged.load_state_dict(sd['logged'], self)
        if self.module is not None:
            load_module_state(self, sd['module'])
