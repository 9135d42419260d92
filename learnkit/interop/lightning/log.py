# SPDX-License-Identifier: Apache-2.0
"""Values that a LightningModule and its callbacks log, by `self.log`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.errors import FitError, MetricError, OptionError
from learnkit.core.model import model_device
from learnkit.engine.callback_state import decode, encode
from learnkit.engine.dispatch import log_to_callbacks
from learnkit.interop.common.hooks import collect_epoch_values
from learnkit.interop.lightning.host import LightningHost
from learnkit.interop.lightning.loggers import LoggedSteps
from learnkit.metrics.averages import RESERVED

# hooks of a training batch, whose values are logged by step; values of other hooks are means of an epoch
STEP_HOOKS = frozenset(
    'training_step on_train_batch_start on_train_batch_end on_before_backward backward on_after_backward '
    'on_before_optimizer_step optimizer_step configure_gradient_clipping on_before_zero_grad '
    'optimizer_zero_grad'.split()
)
EPOCH_HOOKS = frozenset(
    f'on_{stage}_{moment}'
    for stage in ('train', 'validation', 'test')
    for moment in 'start epoch_start epoch_end batch_start batch_end'.split()
) | {'validation_step', 'test_step'}
LOSS_NAMES = ('val_loss', 'valid_loss', 'val/loss', 'test_loss')  # of an evaluation
REDUCTIONS = ('mean', 'sum', 'min', 'max')
KEPT = ('callback_metrics', 'logged_metrics', 'progress_bar_metrics')


class LoggedValues:
    """Values by hook and name since the start of an epoch or an evaluation, and the newest by name.

    `callback_metrics`, `logged_metrics` and `progress_bar_metrics` are the trainer's.
    """

    def __init__(self, host: LightningHost) -> None:
        self.host = host
        self.entries: dict[str, dict[str, Any]] = {}
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, Any] = {}
        self.steps = LoggedSteps(host)  # what Lightning's loggers receive
        self.results: dict[str, Any] = {}  # of the last evaluation
        self.newest: dict[str, Tensor] = {}  # values of the current batch by their own names
        # calls in a compiled `training_step`, which are logged after it; None outside of one
        self.collected: list[tuple[str, Any, dict[str, Any]]] | None = None

    def log(
        self,
        name: str,
        value: Any,  # number, tensor of one element, or torchmetrics metric
        prog_bar: bool = False,  # the printed table has the column
        logger: bool | None = None,  # False: not in the history and not in loggers
        on_step: bool | None = None,  # None: True in the hooks of a training batch
        on_epoch: bool | None = None,  # None: True in all other hooks
        reduce_fx: Any = 'mean',  # or sum, min, max; a function of torch of that name
        add_dataloader_idx: bool = True,  # several validation loaders: add the number to the name
        batch_size: int | None = None,  # weight in the mean; None: size of the batch
        **unused: Any,  # `sync_dist`: values of an epoch are always of all processes
    ) -> None:
        "Log a value, as `LightningModule.log`."
        if self.collected is not None:
            options = {
                'prog_bar': prog_bar,
                'logger': logger,
                'on_step': on_step,
                'on_epoch': on_epoch,
                'reduce_fx': reduce_fx,
                'add_dataloader_idx': add_dataloader_idx,
                'batch_size': batch_size,
            }
            kept = value.detach().clone() if isinstance(value, Tensor) else value
            self.collected.append((name, kept, options))
            return
        hook = self.host.hook_name
        by_step = hook in STEP_HOOKS
        if not by_step and hook not in EPOCH_HOOKS:
            where = f'in `{hook}`' if hook else 'outside of a fit'
            raise FitError(f'self.log({name!r}) {where}: Lightning logs nothing there.')
        reduce = getattr(reduce_fx, '__name__', reduce_fx)
        if reduce not in REDUCTIONS:
            raise OptionError(f'self.log(reduce_fx={reduce_fx!r}): pass {", ".join(REDUCTIONS)}.')
        name += self.host.loader_suffix() if add_dataloader_idx else ''
        new = {
            'name': name,
            'reduce': reduce,
            'on_step': by_step if on_step is None else on_step,
            'on_epoch': not by_step if on_epoch is None else on_epoch,
            'prog_bar': prog_bar,
            'logger': logger is not False,
            'training': by_step or 'train' in hook,
            'total': None,
            'weight': 0,
            'metric': None,
        }
        entry = self.entries.setdefault(f'{hook}.{name}', new)
        step_value = self._add(entry, value, batch_size)
        if entry['on_step']:
            self._receive(entry, step_value, '_step' if entry['on_epoch'] else '', 1)
        if hook.endswith('epoch_end'):
            self._publish(entry)

    def take_collected(self, pred: Any, loss: Tensor, state: dict[str, Any]) -> tuple[Any, Tensor]:
        "Return what a compiled `training_step` has logged as an entry of a state."
        state['logged'] = self.collected
        self.collected = None
        return pred, loss

    def log_collected(self, calls: list[tuple[str, Any, dict[str, Any]]]) -> None:
        "Log what a compiled `training_step` has logged."
        with self.host.running('training_step'):
            for name, value, options in calls:
                self.log(name, value, **options)

    def list_metrics(self) -> list[str]:
        "Return the names of the values of training that are metrics of torchmetrics."
        entries = self.entries.values()
        return [e['name'] for e in entries if e['training'] and e['metric'] is not None]

    def forget(self) -> None:
        "Forget the values of the last run."
        for name in KEPT:
            getattr(self, name).clear()
        self.steps.forget()

    def find_loss(self) -> Tensor | None:
        "Return the loss that a validation step has logged for its batch, or None."
        return next((self.newest[name] for name in LOSS_NAMES if name in self.newest), None)

    def log_dict(self, dictionary: Any, **options: Any) -> None:
        "Log several values, as `LightningModule.log_dict`."
        is_collection = hasattr(dictionary, 'compute')  # torchmetrics: names with their prefix
        for name, value in dictionary.items(**({'keep_base': False} if is_collection else {})):
            self.log(name, value, **options)

    def _add(self, entry: dict[str, Any], value: Any, batch_size: int | None) -> Any:
        "Add a value to an entry, and return the value of the step."
        if hasattr(value, 'compute'):
            entry['metric'] = value
            return getattr(value, '_forward_cache', None)  # of torchmetrics
        value = self._as_scalar(entry['name'], value)
        self.newest[entry['name'].partition('/dataloader_idx_')[0]] = value
        total, reduce = entry['total'], entry['reduce']
        if reduce == 'mean':
            weight = self.host.batch_size() if batch_size is None else batch_size
            entry['weight'] += weight
            entry['total'] = value * weight + (0.0 if total is None else total)
        elif total is None:
            entry['total'] = value
        else:
            entry['total'] = getattr(torch, reduce)(torch.stack([total, value]))
        return value

    def _as_scalar(self, name: str, value: Any) -> Tensor:
        "Return a number as a detached tensor of at least single precision."
        learn = self.host.learn
        default = torch.promote_types(torch.get_default_dtype(), torch.float32)
        if not isinstance(value, Tensor):
            value = torch.tensor(value, device=model_device(learn.model, learn.dls), dtype=default)
        if value.numel() != 1:
            raise MetricError(f'self.log({name!r}): {value.numel()} elements: log their mean.')
        value = value.detach().clone().squeeze()
        return value if value.dtype in (torch.float32, torch.float64) else value.to(default)

    def publish(self, training: bool) -> None:
        "Compute the values of an epoch or an evaluation, and pass them on."
        for entry in self.entries.values():
            if entry['training'] == training and entry['on_epoch']:
                self._publish(entry)

    def _publish(self, entry: dict[str, Any]) -> None:
        self._receive(entry, self._compute(entry), '_epoch' if entry['on_step'] else '', None)

    def _compute(self, entry: dict[str, Any]) -> Any:
        "Return the value of an entry over its epoch, of all processes."
        if entry['metric'] is not None:
            return entry['metric'].compute()
        total, weight, reduce = entry['total'], entry['weight'], entry['reduce']
        world = self.host.learn.world
        if world.size > 1:
            parts = world.gather((total, weight))[:: world.copies]
            totals = torch.stack([t.to(total.device) for t, _ in parts])
            total = totals.sum() if reduce == 'mean' else getattr(totals, reduce)()
            weight = sum(w for _, w in parts)
        return total / weight if reduce == 'mean' else total

    def reset(self, training: bool) -> None:
        "Forget the values of an epoch or an evaluation, and reset the torchmetrics among them."
        for key in [k for k, entry in self.entries.items() if entry['training'] == training]:
            metric = self.entries.pop(key)['metric']
            if metric is not None:
                metric.reset()

    def _receive(self, entry: dict[str, Any], value: Any, suffix: str, weight: int | None) -> None:
        "Note a value for callbacks, and pass it to history and loggers; the weight is None at the end of an epoch."
        base, mark, loader = entry['name'].partition('/dataloader_idx_')
        name = f'{base}{suffix}{mark}{loader}'
        if weight is None or entry['training']:
            self.callback_metrics |= {entry['name']: value, name: value}
        if entry['prog_bar']:
            self.progress_bar_metrics[name] = value
        if entry['logger']:
            self.logged_metrics[name] = value
            self._note_for_loggers(entry, name, value, weight is not None)
            self.send(name, value, weight, entry['prog_bar'])

    def _note_for_loggers(
        self, entry: dict[str, Any], name: str, value: Any, is_batch: bool
    ) -> None:
        "Note a value for Lightning's loggers, and as a result of an evaluation."
        if self.host.trainer.sanity_checking:
            return
        if not entry['training'] and not is_batch:
            self.results[name] = value
        if self.host.trainer.own_loggers:
            self.steps.note(name, value, is_batch, entry['training'])

    def list_results(self, n_loaders: int) -> list[dict[str, float]]:
        "Return the values of the last evaluation, for each loader with those of all loaders."
        found: list[dict[str, float]] = [{} for _ in range(n_loaders)]
        shared: dict[str, float] = {}
        for name, value in self.results.items():
            _, mark, index = name.partition('/dataloader_idx_')
            (found[int(index)] if mark else shared)[name] = float(value)
        return [values | shared for values in found]

    def send(self, name: str, value: Any, weight: int | None, shown: bool) -> None:
        "Pass a value to history and loggers. A value of an epoch replaces the Recorder's `train_loss` or `valid_loss`."
        learn = self.host.learn
        if self.host.trainer.sanity_checking:
            return
        recorder = recorder_of(learn)
        if name not in RESERVED and name != 'step':
            log_to_callbacks(learn, name, value, weight, shown)
        elif recorder is not None and name.endswith('loss') and weight is None:
            recorder.epoch_metrics.values[name] = float(value)

    def note_metrics(self) -> None:
        "Let callbacks monitor the losses and metrics of a Learner without a LightningModule."
        values = collect_epoch_values(self.host.learn).items()
        numbers = {k: torch.tensor(v) for k, v in values if isinstance(v, (int, float))}
        self.callback_metrics |= numbers

    def state_dict(self) -> dict[str, Any]:
        "Return the values, and the names of torchmetrics, whose states belong to the module."
        paths = {id(m): path for path, m in self.host.learn.model.named_modules()}
        entries = {k: {**e, 'metric': paths.get(id(e['metric']))} for k, e in self.entries.items()}
        return {'entries': encode(entries), **{name: encode(getattr(self, name)) for name in KEPT}}

    def load_state_dict(self, sd: Mapping[str, Any], cb: Any) -> None:
        "Restore the values."
        for name, values in sd.items():
            own = getattr(self, name)
            own.clear()
            own.update(decode(values, cb))
        for entry in self.entries.values():
            path = entry['metric']
            entry['metric'] = path and self.host.learn.model.get_submodule(path)
