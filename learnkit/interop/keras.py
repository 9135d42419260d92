# SPDX-License-Identifier: Apache-2.0
"""Adapter that runs callbacks of Keras in a Learner: `from_keras(cb)`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fastcore.basics import camel2snake
from typing_extensions import override

from learnkit.callbacks.recorder import epoch_row, recorder_of
from learnkit.core.model import bare_model
from learnkit.data.dataloaders import n_batches
from learnkit.engine.callback import Callback
from learnkit.engine.callback_state import note_attributes
from learnkit.interop.hooks import check_style, is_of, load_state, own_hooks, state_of

HOOKS = tuple(
    f'on_{level}_{side}'
    for level in 'train epoch train_batch batch test test_batch predict predict_batch'.split()
    for side in ('begin', 'end')
)
# methods of the base class that call those of older names
_OLDER = {'on_train_batch_begin': 'on_batch_begin', 'on_train_batch_end': 'on_batch_end'}


def from_keras(
    cb: Any,  # `keras.callbacks.Callback`, or an object with its methods
) -> Callback:
    """Return a callback that runs a callback of Keras.

    Its methods run in the order of `model.fit`, with `logs` of numbers: the running mean `loss` in a batch, and at the
    end of an epoch also `val_loss` and the metrics. The names are the Learner's, without `train_`, and with `val_` for
    `valid_`. `self.params` has `epochs`, `steps` and `verbose`.

    `self.model` is a view of the Learner: `get_weights`, `set_weights`, `save_weights` and `load_weights`,
    `stop_training`, `layers`, and `optimizer.learning_rate`, which can be read and set. Everything else is read from
    the PyTorch model. Keras need not be installed.

    Checkpointed: the callback's attributes with plain data, and weights that it keeps.

    Raises `CallbackError` for an object without hooks.

    >>> from learnkit.testing import synth_learner
    >>> class Shout:
    ...     def on_epoch_end(self, epoch, logs=None): print(epoch, sorted(logs))
    >>> learn = synth_learner(n_train=3, cbs=from_keras(Shout()))
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(2)
    0 ['loss', 'val_loss']
    1 ['loss', 'val_loss']
    """
    return _FromKeras(cb)


class _FromKeras(Callback):
    "Run a callback of Keras."

    order = 95  # after the Recorder, from which the logs come
    remove_on_find = True

    def __init__(self, cb: Any) -> None:
        self._hooks = own_hooks(cb, HOOKS, 'keras.src.callbacks.callback')
        if not is_of(cb, 'keras'):  # of Keras, a callback may have no hooks
            check_style(cb, HOOKS, self._hooks, 'Keras', 'from_keras')
        note_attributes(cb)
        self.wrapped = cb
        self.view: ModelView | None = None
        self._total: Any = 0.0  # sum of the losses of the epoch
        self._n = 0

    @property
    @override
    def name(self) -> str:
        return f'keras_{camel2snake(type(self.wrapped).__name__)}'

    def __repr__(self) -> str:
        return f'from_keras({type(self.wrapped).__name__})'

    def _call(self, hook: str, *place: Any, logs: Any = None) -> None:
        "Call a method of the callback, if it has the method, or the method of the older name."
        for name in (hook, _OLDER.get(hook, '')):
            if name in self._hooks:
                self._hooks[name](*place, logs=dict(logs or {}))
                return

    def _obey(self) -> None:
        if self.view is not None and self.view.stop_training:
            self.learn.stop()

    def _set_model(self) -> None:
        learn = self.learn
        if self.view is None:
            self.view = ModelView(learn)
        self.view.stop_training = False
        params = {'epochs': learn.n_epoch, 'steps': n_batches(learn.dls.train), 'verbose': 0}
        if hasattr(self.wrapped, 'set_params'):
            self.wrapped.set_params(params)
        else:
            self.wrapped.params = params
        if hasattr(self.wrapped, 'set_model'):
            self.wrapped.set_model(self.view)
        else:
            self.wrapped.model = self.view

    # -- events ------------------------------------------------------------------------------------

    def before_fit(self) -> None:
        self._set_model()
        self._call('on_train_begin')

    def before_epoch(self) -> None:
        self._total, self._n = 0.0, 0
        self._call('on_epoch_begin', self.epoch)

    def before_batch(self) -> None:
        kind = self._kind()
        self._call(f'on_{kind}_batch_begin', self.iter)

    def _kind(self) -> str:
        if self.training:
            return 'train'
        return 'predict' if self.learn.phase == 'predict' else 'test'

    def after_batch(self) -> None:
        kind = self._kind()
        hook = f'on_{kind}_batch_end'
        if kind == 'train':
            self._total = self._total + self.learn.loss.detach()
            self._n += 1
            if hook in self._hooks or _OLDER[hook] in self._hooks:
                self._call(hook, self.iter, logs={'loss': float(self._total) / self._n})
            self._obey()
        else:
            self._call(hook, self.iter)

    def before_validate(self) -> None:
        self._call('on_test_begin')

    def after_validate(self) -> None:
        recorder = recorder_of(self.learn)
        measured = {} if recorder is None else recorder.measured
        self._call('on_test_end', logs={k.removeprefix('valid_'): v for k, v in measured.items()})

    def before_predict(self) -> None:
        self._set_model()
        self._call('on_predict_begin')

    def after_predict(self) -> None:
        self._call('on_predict_end')

    def after_epoch(self) -> None:
        self._call('on_epoch_end', self.epoch, logs=self._collect_logs())
        self._obey()

    def _collect_logs(self) -> dict[str, float]:
        "Return the values of the epoch under Keras's names."
        recorder = recorder_of(self.learn)
        row = None if recorder is None else epoch_row(self)
        values = {k: v for k, v in (row or {}).items() if isinstance(v, float) and k != 'time'}
        logs = {}
        for name, value in values.items():
            if name.startswith('train_'):
                logs[name.removeprefix('train_')] = value
            elif name.startswith('valid_'):
                logs[f'val_{name.removeprefix("valid_")}'] = value
            else:
                logs[f'val_{name}'] = value
        return logs

    def after_fit(self) -> None:
        self._call('on_train_end', logs=self._collect_logs())

    # -- checkpoints -------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the callback's attributes, and the sum of losses of the epoch."
        return {'own': state_of(self.wrapped), 'total': float(self._total), 'n': self._n}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the callback's attributes, and the sum of losses of the epoch."
        load_state(self.wrapped, sd['own'])
        self._total, self._n = torch.tensor(sd['total']), sd['n']


class ModelView:
    "What callbacks of Keras read and set of their model, for a Learner."

    def __init__(self, learn: Any) -> None:
        self.learn = learn
        self.optimizer = OptimizerView(learn)
        self.stop_training = False

    @property
    def layers(self) -> list[torch.nn.Module]:
        "The direct parts of the PyTorch model."
        return list(bare_model(self.learn.model).children())

    def get_weights(self) -> list[np.ndarray]:
        "Return copies of all parameters and buffers, in the order of the state dict."
        state = bare_model(self.learn.model).state_dict()
        return [t.detach().cpu().numpy().copy() for t in state.values()]

    def set_weights(
        self,
        weights: list[Any],  # arrays, as from `get_weights`
    ) -> None:
        "Copy arrays into all parameters and buffers."
        model = bare_model(self.learn.model)
        names = list(model.state_dict())
        tensors = [torch.as_tensor(np.asarray(w)) for w in weights]
        model.load_state_dict(dict(zip(names, tensors, strict=True)))

    def save_weights(
        self,
        filepath: Any,  # the file
        overwrite: bool = True,  # replace a file that is there
    ) -> None:
        "Write the weights as a file of PyTorch, `torch.load` reads it."
        torch.save(bare_model(self.learn.model).state_dict(), filepath)

    def load_weights(
        self,
        filepath: Any,  # a file that `save_weights` has written
    ) -> None:
        "Read weights that `save_weights` has written."
        bare_model(self.learn.model).load_state_dict(torch.load(filepath, weights_only=True))

    def __getattr__(self, name: str) -> Any:
        model = bare_model(self.__dict__['learn'].model)
        try:
            return getattr(model, name)
        except AttributeError:
            raise AttributeError(
                f'`self.model.{name}`: the model is a {type(model).__name__} of PyTorch, and from_keras gives it '
                'only weights, `stop_training`, `layers` and `optimizer.learning_rate` of Keras.'
            ) from None


class OptimizerView:
    "The rate of a Learner's optimizer; groups with other rates keep their ratio."

    def __init__(self, learn: Any) -> None:
        self.__dict__['learn'] = learn

    @property
    def learning_rate(self) -> float:
        "The rate of the last parameter group."
        return float(self.learn.opt.param_groups[-1]['lr'])

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ('learning_rate', 'lr'):
            raise AttributeError(
                f'from_keras: `optimizer.{name}` cannot be set, only `learning_rate`.'
            )
        ratio = float(value) / self.learning_rate
        for group in self.learn.opt.param_groups:
            group['lr'] *= ratio

    def __getattr__(self, name: str) -> Any:
        if name == 'lr':
            return self.learning_rate
        raise AttributeError(
            f'`self.model.optimizer.{name}`: from_keras gives callbacks only `learning_rate` of the optimizer.'
        )
