# SPDX-License-Identifier: Apache-2.0
"""Adapter that runs callbacks of Keras in a Learner: `from_keras(cb)`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from learnkit.callbacks.recorder import epoch_row, recorder_of
from learnkit.core.errors import CallbackError
from learnkit.core.model import bare_model, model_device, preserved_modes
from learnkit.engine.callback import Callback
from learnkit.engine.counters import sample_count
from learnkit.engine.lengths import find_length
from learnkit.interop.common.adapter import CallbackAdapter, list_adapters
from learnkit.interop.common.hooks import collect_measured, own_hooks

if TYPE_CHECKING:
    from learnkit.learner import Learner

HOOKS = tuple(
    f'on_{level}_{side}'
    for level in 'train epoch train_batch batch test test_batch predict predict_batch'.split()
    for side in ('begin', 'end')
)
# comparisons that callbacks of Keras choose once; they change the sign of `min_delta` at the same time
_MONITOR_OPS = {'less': operator.lt, 'greater': operator.gt}
# hooks of the base class that call hooks of an older name
_OLDER = {'on_train_batch_begin': 'on_batch_begin', 'on_train_batch_end': 'on_batch_end'}


def from_keras(
    cb: Any,  # `keras.callbacks.Callback`, or an object with its methods
) -> Callback:
    """Return a callback that runs a callback of Keras.

    Its methods run in the order of `model.fit`, `evaluate` and `predict`, with `logs` of numbers:
    after a batch the running mean `loss` and the metrics of the pass so far, after an epoch those of
    its training batches, and `val_loss` and the metrics of its evaluation. The names are the
    Learner's, without `train_`, and with `val_` for values of an evaluation. All callbacks of Keras
    in a Learner get one dict an event: what one of them writes, the following ones read.
    `self.params` has `epochs`, `steps` and `verbose`.

    The metrics are computed on each training batch; a callback with `on_train_batch_end` reads their
    values from the device after each.

    `self.model` is a view of the Learner: `stop_training`, `optimizer.learning_rate` and
    `optimizer.iterations`, `get_weights`, `set_weights`, `save_weights`, `load_weights`, `predict`
    and `metrics_names`. Any other attribute is the PyTorch model's. A file of weights is a file of
    PyTorch. Keras need not be installed.

    Checkpointed: the callback's attributes with plain data, and weights that it keeps.

    Raises `CallbackError` for an object without these methods that is not a callback of Keras, such as a model.

    >>> from learnkit.testing import synth_learner
    >>> class Shout:
    ...     def on_epoch_end(self, epoch, logs=None): print(epoch, sorted(logs))
    >>> learn = synth_learner(n_train=3, cbs=from_keras(Shout()))
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(2)
    0 ['loss', 'val_loss']
    1 ['loss', 'val_loss']
    """
    return _FromKeras(cb)


class _FromKeras(CallbackAdapter):
    "Run a callback of Keras."

    order = 95  # after the Recorder, from which the logs come
    library = 'keras'
    style = 'Keras'
    saved_as = 'own'
    reads_train_metrics = True

    def __init__(self, cb: Any) -> None:
        self._hooks = own_hooks(cb, HOOKS, 'keras.src.callbacks.callback')
        self.wrap(cb, HOOKS, self._hooks)
        # sum of the samples' losses, and their number, of a pass of 'train' or 'test'
        self._sums: dict[str, tuple[Any, int]] = {}
        self.logs = EventLogs()
        self._shared = self.logs  # those of the Learner's first callback of Keras

    def _find_hook(self, name: str) -> Any:
        "Return the hook, or the hook of its older name, or None."
        return self._hooks.get(name) or self._hooks.get(_OLDER.get(name, ''))

    def _call(
        self,
        name: str,
        *place: Any,
        collect: Callable[[], dict[str, Any]] = dict,  # returns the logs of the event
    ) -> None:
        hook = self._find_hook(name)
        if hook is not None:
            event = (name, *place, self.learn.dl_name)
            hook(*place, self._shared.find(event, self, collect))

    def _set_model(self) -> None:
        learn = self.learn
        parts = {
            'params': {
                'epochs': learn.n_epoch,
                'steps': find_length(learn, learn.dls.train),
                'verbose': 0,
            },
            'model': ModelView(learn),
        }
        for name, value in parts.items():
            setter = getattr(self.wrapped, f'set_{name}', None)
            setter(value) if setter else setattr(self.wrapped, name, value)

    # -- events ------------------------------------------------------------------------------------

    def before_fit(self) -> None:
        self._set_model()
        self._shared = list_adapters(self.learn, 'keras')[0].logs
        if self.learn.fitting:
            self._call('on_train_begin')

    def before_epoch(self) -> None:
        if self.learn.fitting:
            self._sums = {}
            self._call('on_epoch_begin', self.epoch)

    def _find_kind(self) -> str:
        "Return what Keras calls the current pass."
        if self.training:
            return 'train'
        return 'predict' if self.learn.phase == 'predict' else 'test'

    def before_batch(self) -> None:
        self._call(f'on_{self._find_kind()}_batch_begin', self.iter)

    def after_batch(self) -> None:
        kind = self._find_kind()
        name = f'on_{kind}_batch_end'
        if self._find_hook(name) is None:
            return None
        if kind == 'predict':
            outputs = self.learn.pred
            return self._call(name, self.iter, collect=lambda: {'outputs': outputs})
        total, n = self._sums.get(kind, (0.0, 0))
        if 'loss_grad' in vars(self.learn):
            size = sample_count(self.learn) or 1
            total = total + self.learn.loss.detach() * size
            n += size
            self._sums[kind] = total, n
        return self._call(name, self.iter, collect=lambda: self._collect_of_batch(total, n))

    def _collect_of_batch(self, total: Any, n: int) -> dict[str, Any]:
        "Return the mean loss and the metrics of the current pass so far."
        recorder = recorder_of(self.learn)
        metrics = {} if recorder is None or not n else recorder.read_running()
        return {**metrics, 'loss': float(total) / n} if n else {}

    def before_validate(self) -> None:
        if self.learn.phase != 'predict':
            self._sums.pop('test', None)
            self._call('on_test_begin')

    def after_validate(self) -> None:
        if self.learn.phase != 'predict':
            self._call('on_test_end', collect=self._collect_of_evaluation)

    def _collect_of_evaluation(self) -> dict[str, Any]:
        measured = collect_measured(self.learn)
        return {name.removeprefix('valid_'): value for name, value in measured.items()}

    def before_predict(self) -> None:
        self._call('on_predict_begin')

    def after_predict(self) -> None:
        self._call('on_predict_end')

    def after_epoch(self) -> None:
        if self.learn.fitting:
            self._call('on_epoch_end', self.epoch, collect=self._collect_logs)

    def _collect_logs(self) -> dict[str, float]:
        "Return the values of the epoch under Keras's names; a value that was not evaluated is absent."
        recorder = recorder_of(self.learn)
        if recorder is None:
            return {}
        evaluated = set(recorder.evaluated_columns())
        logs = {name: v for name, v in recorder.read_uncolumned().items() if v is not None}
        for name, value in (epoch_row(self) or {}).items():
            if value is None:
                continue
            if name in evaluated:
                logs[f'val_{name.removeprefix("valid_")}'] = value
            elif isinstance(value, float) and name != 'time':
                logs[name.removeprefix('train_')] = value
        return logs

    def after_fit(self) -> None:
        if self.learn.fitting:
            self._call('on_train_end', collect=self._collect_logs)

    # -- checkpoints -------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the callback's attributes, and the sum of losses of the pass."
        op = _find_direction(getattr(self.wrapped, 'monitor_op', None))
        return {**super().state_dict(), 'sums': dict(self._sums), 'monitor_op': op}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the callback's attributes, and the sum of losses of the pass."
        super().load_state_dict(sd)
        self._sums = dict(sd['sums'])
        name = sd['monitor_op']
        if name in _MONITOR_OPS and getattr(self.wrapped, 'monitor_op', None) is None:
            self.wrapped.monitor_op = _MONITOR_OPS[name]


class EventLogs:
    """The `logs` of the current event, one dict for all callbacks of Keras in a Learner.

    >>> logs = EventLogs()
    >>> one, another = object(), object()
    >>> first = logs.find(('on_epoch_end', 0), one, dict)
    >>> first['val_f1'] = 0.5
    >>> logs.find(('on_epoch_end', 0), another, dict)
    {'val_f1': 0.5}
    """

    def __init__(self) -> None:
        self._event: tuple[Any, ...] = ()
        self._readers: set[int] = set()  # ids of the callbacks that have the event's logs
        self._logs: dict[str, Any] = {}

    def find(
        self,
        event: tuple[Any, ...],  # name and place of the event
        reader: object,  # callback that is called
        collect: Callable[[], dict[str, Any]],  # returns the logs of a new event
    ) -> dict[str, Any]:
        "Return the logs of an event; an event that the same callback has seen is a new one."
        if event != self._event or id(reader) in self._readers:
            self._event = event
            self._readers = set()
            self._logs = collect()
        self._readers.add(id(reader))
        return self._logs


def _find_direction(monitor_op: Any) -> str | None:
    """Return the key in `_MONITOR_OPS` for a comparison, or None without one.

    The comparison is called, because its name depends on its origin: Keras, NumPy, or a loaded state.

    >>> _find_direction(np.less), _find_direction(operator.gt), _find_direction(None)
    ('less', 'greater', None)
    """
    if not callable(monitor_op):
        return None
    try:
        is_less, is_greater = bool(monitor_op(0.0, np.inf)), bool(monitor_op(np.inf, 0.0))
    except (TypeError, ValueError, RuntimeError):
        return None  # it compares something else
    if is_less == is_greater:
        return None
    return 'less' if is_less else 'greater'


class ModelView:
    "View of a Learner with what callbacks of Keras read and set of their model."

    def __init__(self, learn: Learner) -> None:
        vars(self).update(_learn=learn, optimizer=OptimizerView(learn))

    @property
    def _model(self) -> torch.nn.Module:
        return bare_model(vars(self)['_learn'].model)

    @property
    def stop_training(self) -> bool:
        "True if the fit stops after the current batch or epoch; False cannot be set again."
        return bool(vars(self)['_learn'].run.stopping)

    @property
    def metrics_names(self) -> list[str]:
        "Names of the loss and the metrics."
        return ['loss', *(metric.name for metric in vars(self)['_learn'].metrics)]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == 'history':  # the callback `History` sets it
            vars(self)[name] = value
        elif name != 'stop_training':
            raise AttributeError(
                f'from_keras: only `model.stop_training` can be set, not `{name}`.'
            )
        elif value:
            vars(self)['_learn'].stop()

    def __getattr__(self, name: str) -> Any:
        model = self._model
        try:
            return getattr(model, name)
        except AttributeError:
            given = [own for own in dir(ModelView) if not own.startswith('_')]
            raise AttributeError(
                f'`self.model.{name}`: the model is a {type(model).__name__} of PyTorch, to which '
                f'from_keras adds only optimizer, {", ".join(given)}.'
            ) from None

    def get_weights(self) -> list[np.ndarray]:
        "Return copies of all parameters and buffers, in the order of the state dict."
        return [t.detach().cpu().numpy().copy() for t in self._list_tensors().values()]

    def _list_tensors(self) -> dict[str, torch.Tensor]:
        "Return the parameters and buffers by name; Keras cannot store extra state."
        state = self._model.state_dict()
        return {name: t for name, t in state.items() if name.rpartition('.')[2] != '_extra_state'}

    def set_weights(
        self,
        weights: list[Any],  # arrays, as from `get_weights`
    ) -> None:
        "Copy arrays into all parameters and buffers; raise `CallbackError` for another number of them."
        names = list(self._list_tensors())
        if len(weights) != len(names):
            raise CallbackError(f'set_weights: {len(weights)} arrays for {len(names)} tensors.')
        tensors = [torch.as_tensor(np.asarray(w)) for w in weights]
        state = self._model.state_dict()  # extra state stays as it is
        self._model.load_state_dict({**state, **dict(zip(names, tensors, strict=True))})

    def save_weights(
        self,
        filepath: Any,  # path of the file
        overwrite: bool = True,  # whether to replace an existing file
    ) -> None:
        "Write the weights to a file that `torch.load` reads; raise `FileExistsError` for an existing file."
        if Path(filepath).exists() and not overwrite:
            raise FileExistsError(f'save_weights: {filepath} exists.')
        torch.save(self._model.state_dict(), filepath)

    def load_weights(
        self,
        filepath: Any,  # path of a file from `save_weights`
    ) -> None:
        "Read the weights from a file that `save_weights` has written."
        self._model.load_state_dict(torch.load(filepath, weights_only=True))

    def predict(
        self,
        x: Any,  # inputs: an array or a tensor
        batch_size: int = 32,
        verbose: Any = 0,  # ignored
    ) -> np.ndarray:
        "Return the model's outputs for a tensor of inputs, in evaluation mode."
        learn = vars(self)['_learn']
        device = model_device(learn.model, learn.dls)
        batches = torch.as_tensor(x).to(device).split(batch_size)
        with torch.no_grad(), preserved_modes(learn.model):
            learn.model.eval()
            outputs: np.ndarray = torch.cat([self._model(xb) for xb in batches]).cpu().numpy()
        return outputs


class OptimizerView:
    "View of a Learner's optimizer with its rate and its number of steps."

    def __init__(self, learn: Learner) -> None:
        vars(self)['_learn'] = learn

    @property
    def learning_rate(self) -> Rate:
        "The rate of the last parameter group. If it is set, the other groups keep their ratio to it."
        rate = Rate(vars(self)['_learn'].opt.param_groups[-1]['lr'])
        rate.assign = self._set_rate  # type: ignore[method-assign]
        return rate

    lr = learning_rate

    @property
    def iterations(self) -> int:
        "Number of steps."
        return int(vars(self)['_learn'].time.st)

    def _set_rate(self, value: Any) -> None:
        before = self.learning_rate
        for group in vars(self)['_learn'].opt.param_groups:
            group['lr'] = float(value) * (group['lr'] / before if before else 1.0)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ('learning_rate', 'lr'):
            raise AttributeError(
                f'from_keras: only `optimizer.learning_rate` can be set, not `{name}`.'
            )
        self._set_rate(value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f'`self.model.optimizer.{name}`: from_keras offers callbacks only `learning_rate` and '
            '`iterations` of the optimizer.'
        )


class Rate(float):
    "Learning rate with the methods of a variable of Keras."

    def assign(self, value: Any) -> None:
        "Set the rate of the optimizer."

    def numpy(self) -> float:
        "Return the rate as a number."
        return float(self)
