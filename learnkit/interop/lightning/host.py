# SPDX-License-Identifier: Apache-2.0
"""Hooks of Lightning's callbacks and of a LightningModule: find them, and call them with the current batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from learnkit.core.autocast import uncached_autocast
from learnkit.core.batch import rebuild, tensors_in
from learnkit.core.contexts import replacing_yield
from learnkit.core.errors import ModelError
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.callback import Callback
from learnkit.interop.common.adapter import list_adapters
from learnkit.interop.common.hooks import LIGHTNING_BASES, own_hooks, takes_several

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


def find_class_names(cb: Any) -> list[str]:
    "Return the names of the classes of Lightning of which a callback is an instance."
    return [cls.__name__ for cls in type(cb).__mro__ if 'lightning' in cls.__module__]


class LightningHost(Callback):
    """Base of `LightningRun`: call the hooks of a Learner's Lightning callbacks, and of its LightningModule.

    Callbacks come before the module, and those that monitor a value last at the end of an epoch. The trainer, the
    logged values and the optimization are made with the host, and read it.
    """

    trainer: Any  # `Trainer`
    logged: Any  # `LoggedValues`
    optimization: Any  # `Optimization`
    positions: Any = None  # `LightningPositions` of a Learner with a Trainer

    def __init__(
        self,
        module: Any = None,  # LightningModule; None: the hooks are of callbacks alone
    ) -> None:
        self.module = module
        self.hook_name = ''  # hook that is running
        self.stage = ''  # 'validation' or 'test' during an evaluation
        self.is_over = False  # True from the end of the last epoch on
        self.is_in_epoch = False  # True from the start of an epoch's training to its end
        self.has_evaluated = False
        self.has_estimated = False  # True if the number of steps was read
        self.loaders: list[tuple[str, Any]] | None = None  # of an evaluation by the Trainer
        self.n_begun = 0  # batches of training that have begun
        self._n_stepped = 0  # batches that ended with a step, before the current one
        self._has_stepped = False  # whether the current batch has ended with a step
        self._hooks: dict[str, tuple[list[Any], list[Any], Any]] = {}
        self._parts: tuple[Any, ...] = ()  # inputs and targets of `_batch`
        self._batch: Any = None

    def __repr__(self) -> str:
        return type(self).__name__

    # -- hooks -----------------------------------------------------------------------------------

    def forget_hooks(self) -> None:
        "Have the hooks collected again: there are new callbacks."
        self._hooks = {}

    def list_callbacks(self) -> list[Any]:
        "Return Lightning's callbacks in its order: those that write checkpoints last."
        if not self.trainer.is_independent:
            return [cb for cb in self.trainer.callbacks if not isinstance(cb, Callback)]
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

    def name_hooks(self, name: str) -> list[str]:
        "Return the names of the hooks of callbacks and of the module, each with its class."
        before, last, own = self.find_hooks(name)
        hooks = [*before, *last, *([] if own is None else [own])]
        owners = [getattr(hook, '__self__', self.module) for hook in hooks]
        return [f'{type(owner).__name__}.{name}' for owner in owners]

    def find_own(self, name: str) -> Any:
        "Return the hook that the module, or for the transfer of batches its data module, defines; or None."
        return own_hooks(self.find_owner(name), [name], LIGHTNING_BASES).get(name)

    def find_owner(self, name: str) -> Any:
        "Return the data module if it defines this hook of the transfer of batches; otherwise the module."
        data = self.trainer.datamodule if name in TRANSFER_HOOKS else None
        return data if own_hooks(data, [name], LIGHTNING_BASES) else self.module

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
            result = None
            if own is not None:
                with self.profiled(name):
                    result = own(*args)
            for hook in last:
                self._call_hook(hook, *args)
        return result

    def fire_callbacks(self, name: str, *args: Any) -> None:
        "Call a hook of all callbacks, and not of the module."
        before, last, _ = self.find_hooks(name)
        with self.running(name):
            for hook in (*before, *last):
                self._call_hook(hook, *args)

    def profiled(self, name: str) -> AbstractContextManager[None]:
        "Return a context in which the Trainer's profiler measures an action of the module."
        profiler = self.trainer.active_profiler
        if profiler is None:
            return nullcontext()
        owner = type(self.module).__name__
        context: AbstractContextManager[None] = profiler.profile(f'[LightningModule]{owner}.{name}')
        return context

    def _call_hook(self, hook: Callable[..., Any], *args: Any) -> None:
        "Call a hook of a callback; raise `ModelError` if it reads what only a LightningModule has."
        try:
            hook(self.trainer, self.trainer.model, *args)
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
        own = self.find_own(name) if self.learn is None else self.find_hooks(name)[2]
        own = own or default
        with self.running(name), self.profiled(name):
            return own(*args, **kwargs)

    # -- the batch -------------------------------------------------------------------------------

    def current_batch(self) -> Any:
        "Return the batch as the loader returned it, with the inputs and targets that the Learner has now."
        learn = self.learn
        parts = (*learn.xb, *learn.yb)
        is_same = len(parts) == len(self._parts)
        if not is_same or any(a is not b for a, b in zip(parts, self._parts, strict=True)):
            is_row = isinstance(learn.batch, (tuple, list))
            self._batch = rebuild(learn.batch, list(parts)) if is_row else parts[0]
            self._parts = parts
        return self._batch

    def note_batch(self, batch: Any) -> None:
        "Note the batch on the device, in the form in which the loader returned it."
        self._batch = batch
        self._parts = (*self.learn.xb, *self.learn.yb)

    def forget_batch(self) -> None:
        "Release the batch: there is none, or another one."
        self._batch = None
        self._parts = ()

    def batch_size(self) -> int:
        "Return the weight of a value that is logged now."
        return 1 if self._batch is None else size_of(self._batch)

    @property
    def is_last_batch(self) -> bool:
        "True for the last batch of a pass; without a length only a Trainer knows it."
        learn = self.learn
        if learn.n_iter is not None:
            return learn.iter + 1 == learn.n_iter
        return learn.training and self.positions is not None and self.positions.is_last

    @property
    def n_stepped(self) -> int:
        "Number of batches that ended with a step; without a module, the number of steps."
        return int(self.trainer.global_step) if self.module is None else self._n_stepped

    def count_stepped(self) -> None:
        "Count the last batch if it has stepped: its evaluation has the number before."
        self._n_stepped += self._has_stepped
        self._has_stepped = False

    def continue_counts(self, before: LightningHost) -> None:
        "Continue the counts of an earlier fit of the module."
        before.count_stepped()
        self.n_begun, self._n_stepped = before.n_begun, before._n_stepped
        self.optimization.n_steps = before.optimization.n_steps

    @property
    def is_log_due(self) -> bool:
        "True if the values of the current batch are logged."
        trainer = self.trainer
        every = trainer.log_every_n_steps
        is_forced = trainer.should_stop or trainer.fast_dev_run
        return bool(every and ((self.n_stepped + 1) % every == 0 or is_forced))

    def find_limit(self, dl: Any) -> tuple[str, int | float]:
        "Return the name and the value of the Trainer's limit on the batches of a loader."
        trainer, learn = self.trainer, self.learn
        is_train = dl is learn.dls.train and not self.stage and trainer.fn == 'fit'
        kinds = {'fit': 'train' if is_train else 'val', 'test': 'test', 'predict': 'predict'}
        name = f'limit_{kinds.get(trainer.fn, "val")}_batches'
        return name, getattr(trainer, name)

    def loader_index(self) -> int | None:
        "Return the number of the current one of several validation loaders."
        learn = self.learn
        named = evaluation_loaders(learn.dls) if self.loaders is None else self.loaders
        names = [name for name, _ in named]
        is_evaluating = self.stage or (self.loaders is not None and learn.phase == 'predict')
        if not is_evaluating or len(names) < 2 or self.learn.dl_name not in names:
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
        default_type = self.trainer.precision_plugin.default_type()
        with self.running(name), self.profiled(name), autocast, default_type:
            return self.learn.forward(step, *args)


def size_of(batch: Any) -> int:
    "Return the number of samples of a batch as Lightning counts them: rows of the first tensor."
    tensors = tensors_in(batch)
    return tensors[0].shape[0] if tensors and tensors[0].ndim else 1
