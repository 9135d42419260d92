# SPDX-License-Identifier: Apache-2.0
"""`state` and `logger` of Composer callbacks, as live views of the Learner."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from fastcore.basics import noop
from torch import nn

from learnkit.callbacks.mixed_precision import MixedPrecision
from learnkit.core.batch import to_device
from learnkit.core.errors import did_you_mean
from learnkit.core.model import model_device, takes_batches, whole_batch
from learnkit.data.dataloaders import batch_size_of, evaluation_loaders
from learnkit.engine.counters import sample_count
from learnkit.engine.dispatch import log_to_callbacks
from learnkit.engine.lengths import find_length
from learnkit.engine.microbatch import find_microbatch_size
from learnkit.engine.run import set_batch
from learnkit.interop.common.adapter import list_adapters
from learnkit.interop.common.hooks import send_to_loggers
from learnkit.interop.composer.time import ComposerTime
from learnkit.metrics.averages import ModelMetric

if TYPE_CHECKING:
    from learnkit.learner import Learner


class Precision(StrEnum):
    "Precision of the forward pass, by Composer's names."

    FP32 = 'fp32'
    AMP_FP16 = 'amp_fp16'
    AMP_BF16 = 'amp_bf16'


class Measured(float):
    """Float that `compute()` returns as a tensor, like the value of a torchmetrics metric.

    >>> Measured(0.5).compute(), Measured(0.5) > 0.4
    (tensor(0.5000), True)
    """

    def compute(self) -> torch.Tensor:
        "Return the value as a 0-dim tensor."
        return torch.tensor(float(self))


def wrap_values(values: Mapping[str, Any]) -> dict[str, Measured]:
    "Return the numbers among values by name, with `compute()`."
    return {k: Measured(v) for k, v in values.items() if isinstance(v, (int, float))}


def compute_all(metrics: Mapping[str, Any]) -> dict[str, Any]:
    "Return the values of metric objects by name."
    return {name: metric.compute() for name, metric in metrics.items()}


class ComposerState:
    """Composer's state, read from the Learner at each access.

    Writable attributes: `batch` (the input of the model, before the forward pass), `outputs` (in
    `after_forward` and `before_loss`, the input of the loss), `loss` (in `after_loss` and
    `before_backward`, the input of backward), `model`, the metrics, and `max_duration`, which can
    end the fit earlier. Attributes that a callback adds are there for all callbacks of the Learner.
    Metrics and loaders have the Learner's names, except that an unnamed validation loader is
    `'eval'`. Any other attribute raises `AttributeError` with a replacement.
    """

    def __init__(
        self,
        run: Any,  # `ComposerRun`
    ) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        raise AttributeError(
            f'`state.{name}` is not offered by from_composer. Attributes of the Learner are '
            f'`state.learn.<name>`.{did_you_mean(name, dir(self))}',
            name=name,
            obj=self,
        )

    @property
    def learn(self) -> Any:
        "The Learner; Composer's state has no such attribute."
        return self._run.learn

    def _make_time(self, value: Any, unit: str) -> Any:
        "Return a time of the class that the callback expects."
        types = self._run.types
        return types.Time(value, types.TimeUnit(unit))

    # -- time --------------------------------------------------------------------------------------

    @property
    def timestamp(self) -> Any:
        "Finished training over all fits; wall-clock times exclude evaluation."
        return self._run.types.Timestamp(**self._run.collect_counts())

    @property
    def previous_timestamp(self) -> Any:
        "Timestamp before the last batch or before the last end of an epoch; None before the first batch."
        counts = self._run.previous_counts
        return None if counts is None else self._run.types.Timestamp(**counts)

    @property
    def eval_timestamp(self) -> Any:
        "Finished batches and samples of the current or last evaluation of a loader."
        return self._run.passes['eval'].make_timestamp(self._run.types)

    @property
    def predict_timestamp(self) -> Any:
        "Finished batches and samples of the current or last predictions."
        return self._run.passes['predict'].make_timestamp(self._run.types)

    @property
    def max_duration(self) -> Any:
        "End of the fit over all fits; None outside of a fit, without an end, and for a budget of steps."
        end = self._run.find_end()
        return None if end is None else self._make_time(*end)

    @max_duration.setter
    def max_duration(self, end: Any) -> None:
        if end is None:
            return self._run.set_end(None)
        end = ComposerTime.from_timestring(end) if isinstance(end, str) else end
        if self.timestamp >= end:
            return self._run.stop()
        now = self.max_duration
        if now is not None and now.unit == end.unit and end > now:
            raise AttributeError(
                f'`state.max_duration` cannot be set to {end}: the fit ends at {now}. Pass the length to '
                '`learn.fit`.'
            )
        self._run.set_end((end.value, str(getattr(end.unit, 'value', end.unit))))

    def get_elapsed_duration(self) -> Any:
        "Return the finished share of `max_duration`, in its unit; None outside of a fit."
        end = self.max_duration
        return None if end is None else self.timestamp.get(end.unit) / end

    def stop_training(self) -> None:
        "End the fit after the current batch or epoch, like `learn.stop()`, and set `max_duration`."
        self._run.stop()

    # -- the batch ---------------------------------------------------------------------------------

    @property
    def batch(self) -> Any:
        "The batch or microbatch; up to `after_dataloader` as the loader returned it, later on the device."
        learn = self.learn
        if not self._run.is_split:
            return learn.batch
        return whole_batch(learn)

    @batch.setter
    def batch(self, batch: Any) -> None:
        if self._run.is_split:
            set_batch(self.learn, batch)
        else:
            self.learn.batch = batch

    def batch_get_item(self, key: Any) -> Any:
        "Return a part of the batch by index, key, or function (or the first function of a pair)."
        get = key[0] if isinstance(key, (tuple, list)) and callable(key[0]) else key
        if callable(get):
            return get(self.batch)
        if isinstance(self.batch, Mapping) or isinstance(key, (int, slice)):
            return self.batch[key]
        return getattr(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
        "Replace a part of the batch by index, key, or the second function of a pair."
        if isinstance(key, (tuple, list)) and callable(key[1]):
            self.batch = key[1](self.batch, value)
        elif isinstance(self.batch, Mapping):
            self.batch = {**self.batch, key: value}
        else:
            parts = list(self.batch)
            parts[key] = value
            self.batch = tuple(parts)

    @property
    def outputs(self) -> Any:
        "Output of the model for this batch or microbatch; an empty tensor before the forward pass."
        outputs = self.learn.__dict__.get('pred')
        return torch.Tensor() if outputs is None else outputs

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self.learn.pred = outputs

    @property
    def loss(self) -> Any:
        """Loss of the last training microbatch, also during evaluation; an empty tensor before the first one.

        In `after_loss` and `before_backward`, `loss` is the tensor on which `backward` is called.
        """
        learn = self.learn
        adapter = self._run
        if adapter.has_graph and 'loss_grad' in learn.__dict__:
            return learn.loss_grad
        return torch.Tensor() if adapter.last_loss is None else adapter.last_loss

    @loss.setter
    def loss(self, loss: Any) -> None:
        self.learn.loss = loss.detach().clone()
        if self.learn.training:
            self.learn.loss_grad = loss
            self._run.last_loss = self.learn.loss

    @property
    def total_loss_dict(self) -> dict[str, float]:
        "Loss of the last batch under Composer's name; reading the attribute waits for the device."
        loss = self._run.batch_loss
        return {} if loss is None else {'loss/train/total': float(loss)}

    @property
    def device_train_microbatch_size(self) -> Any:
        "Samples per microbatch (for 'auto', the current size), or per training batch without microbatches."
        learn = self.learn
        if learn.microbatch is None and not self._run.loader_kind:
            return None
        size = find_microbatch_size(learn)
        return size or batch_size_of(learn.dls.train) or sample_count(learn)

    # -- parts of the Learner ----------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self.learn.model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self.learn.model = model

    @property
    def optimizers(self) -> list[Any]:
        "The torch optimizers; before the first fit, the Learner's `opt_func` if it is an optimizer."
        learn = self.learn
        if learn.opt is not None:
            return list(learn.opt.optimizers.values())
        return [learn.opt_func] if isinstance(learn.opt_func, torch.optim.Optimizer) else []

    @property
    def schedulers(self) -> list[Any]:
        "Empty: schedulers are callbacks in learnkit."
        return []

    @property
    def algorithms(self) -> list[Any]:
        "The Composer algorithms of the Learner, unwrapped."
        return [cb.wrapped for cb in list_adapters(self.learn, 'composer') if cb.is_algorithm]

    @property
    def scaler(self) -> Any:
        "Gradient scaler for float16, or None."
        return getattr(_mixed_precision_of(self.learn), 'scaler', None)

    @property
    def precision(self) -> Precision:
        "Precision of the forward pass."
        return precision_of(self.learn)

    _precision = precision
    precision_config = None

    @property
    def device(self) -> Any:
        "Namespace with the device's `name`, and `tensor_to_device`, `batch_to_device`, `module_to_device`."
        device = model_device(self.learn.model, self.learn.dls)
        move = lambda b: to_device(b, device)
        return SimpleNamespace(
            name=device.type,
            tensor_to_device=move,
            batch_to_device=move,
            module_to_device=lambda module: module.to(device),
            torch_device=device,
            _device=device,  # Composer's name, which users' callbacks read
        )

    @property
    def callbacks(self) -> list[Any]:
        "The Composer callbacks of the Learner, unwrapped."
        return [cb.wrapped for cb in list_adapters(self.learn, 'composer') if not cb.is_algorithm]

    @property
    def run_name(self) -> str:
        "Name of the folder `learn.path`."
        return self.learn.path.resolve().name

    @property
    def rank_zero_seed(self) -> int:
        "Initial seed of torch."
        return torch.initial_seed()

    seed = rank_zero_seed

    @property
    def is_model_ddp(self) -> bool:
        return isinstance(self.learn.model, nn.parallel.DistributedDataParallel)

    @property
    def auto_microbatching(self) -> bool:
        return self.learn.microbatch == 'auto'

    fsdp_enabled = fsdp_sharded_state_dict_enabled = load_monolith_rank0_only = False
    fsdp_config_version = 0
    fsdp_config = None

    # -- data and metrics --------------------------------------------------------------------------

    @property
    def dataloader(self) -> Any:
        "The training loader, or the loader of the current evaluation or prediction; None in `init`."
        if self._run.given_loader is not None:
            return self._run.given_loader[0]
        kind = self._run.loader_kind
        if not kind:
            return None
        return self.learn.dls.train if kind == 'train' else self.learn.dl

    @property
    def dataloader_label(self) -> str | None:
        "Label of `dataloader`: 'train', 'eval', 'predict', or the name of a validation loader."
        if self._run.given_loader is not None:
            return str(self._run.given_loader[1])
        kind: str = self._run.loader_kind
        return label_of(self.learn.dl_name) if kind == 'eval' else kind or None

    @property
    def dataloader_len(self) -> ComposerTime | None:
        "Number of batches of the loader; None if unknown."
        dl = self.dataloader
        n = None if dl is None else find_length(self.learn, dl)
        if self._run.given_loader is not None and self._run.given_loader[2] is not None:
            n = int(self._run.given_loader[2])
        return None if n is None else self._make_time(n, 'ba')

    def set_dataloader(
        self,
        dataloader: Any = None,
        dataloader_label: str | None = None,
        dataloader_len: Any = None,  # number of batches; None: of the loader
    ) -> None:
        "Set the loader that the state reports, until the Learner's next pass over a loader."
        self._run.given_loader = dataloader, dataloader_label, dataloader_len

    @property
    def train_dataloader(self) -> Any:
        return self.learn.dls.train

    @property
    def evaluators(self) -> list[Any]:
        "The validation loaders with their labels: `evaluator.label`, `evaluator.dataloader.dataloader`."
        if not self._run.loader_kind:
            return []
        return [
            SimpleNamespace(
                label=label_of(name),
                dataloader=SimpleNamespace(dataloader=dl),
                subset_num_batches=-1,
            )
            for name, dl in evaluation_loaders(self.learn.dls)
        ]

    @property
    def train_metrics(self) -> dict[str, Any]:
        """Metrics of the last batch by name, for a `ComposerModel` with training metrics.

        For other models, training loss and metrics of the epoch, from `epoch_end` on.
        """
        trainer = trainer_of(self.learn) if self._run.loader_kind else None
        if trainer is not None and trainer.batch_metrics:
            metrics: dict[str, Any] = trainer.batch_metrics
            return metrics
        measured: dict[str, Any] = self._run.measured.get('train', {})
        return measured

    @train_metrics.setter
    def train_metrics(self, metrics: dict[str, Any]) -> None:
        trainer = trainer_of(self.learn)
        if trainer is None:
            self._run.measured['train'] = metrics
        else:
            trainer.batch_metrics = metrics

    @property
    def eval_metrics(self) -> dict[str, dict[str, Any]]:
        """Loss and metrics of the last evaluation of each loader: `eval_metrics[label][name]`.

        Metrics of a `ComposerModel` are its metric objects, before and after an evaluation.
        """
        measured = {k: v for k, v in self._run.measured.items() if k != 'train'}
        unused = {m.name: m.metric for m in self.learn.metrics if isinstance(m, ModelMetric)}
        return {evaluator.label: unused for evaluator in self.evaluators} | measured

    @eval_metrics.setter
    def eval_metrics(self, metrics: dict[str, dict[str, Any]]) -> None:
        self._run.measured.update(metrics)

    @property
    def train_metric_values(self) -> dict[str, Any]:
        "Values of `train_metrics`."
        return compute_all(self.train_metrics)

    @property
    def eval_metric_values(self) -> dict[str, Any]:
        "Values of the last evaluation's metrics, by name; of several loaders, the last one's."
        found: dict[str, Any] = {}
        for label, metrics in self._run.measured.items():
            if label != 'train':
                found |= compute_all(metrics)
        return found

    @property
    def metric_outputs(self) -> Any:
        "What the model's `update_metric` returned last in an evaluation; an empty dict for nothing."
        outputs = [m.outputs for m in self.learn.metrics if isinstance(m, ModelMetric)]
        return (outputs and outputs[-1]) or {}

    # -- checkpoints -------------------------------------------------------------------------------

    def get_model_state_dict(self) -> dict[str, Any]:
        "Return the model's state dict."
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return get_model_state_dict(self.model)

    def get_optim_state_dict(self) -> dict[str, Any]:
        "Return the optimizers' state dicts by class name, with parameters by name."
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return {
            type(opt).__qualname__: get_optimizer_state_dict(self.model, opt)
            for opt in self.optimizers
        }

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizers, timestamp and callbacks' states in the format of Composer's checkpoints.

        To resume a fit, use the Learner's checkpoints.
        """
        return {
            'model': self.get_model_state_dict(),
            'optimizers': self.get_optim_state_dict(),
            'timestamp': {'Timestamp': self.timestamp.state_dict()},
            'callbacks': _states_by_class(self.callbacks),
            'algorithms': list(_states_by_class(self.algorithms).items()),
            'rank_zero_seed': self.rank_zero_seed,
            'run_name': self.run_name,
            'integrations': self._get_integrations_state_dict(),
            'metadata': self._get_state_metadata(),
        }

    def _get_integrations_state_dict(self) -> dict[str, Any]:
        return {}

    def _get_state_metadata(self) -> dict[str, Any]:
        return {
            'torch_version': torch.__version__,
            'device': self.device.name,
            'precision': self.precision.value,
            'world_size': self.learn.world.size,
            'device_train_microbatch_size': self.device_train_microbatch_size,
        }

    def load_model_state(
        self,
        state_dict: Mapping[str, Any],  # `state` of a Composer checkpoint
        logger: Any = None,  # unused
        strict: bool = True,  # whether all names must match
        **_: Any,  # options of Composer for algorithms
    ) -> None:
        "Load the model's weights from a Composer checkpoint."
        self.model.load_state_dict(state_dict['model'], strict)


def _states_by_class(cbs: list[Any]) -> dict[str, Any]:
    return {type(cb).__qualname__: cb.state_dict() for cb in cbs if hasattr(cb, 'state_dict')}


def _mixed_precision_of(learn: Learner) -> Any:
    return next((cb for cb in learn.cbs if isinstance(cb, MixedPrecision)), None)


def precision_of(learn: Learner) -> Precision:
    "Return the precision of the forward pass by Composer's name."
    cb = _mixed_precision_of(learn)
    if cb is None:
        return Precision.FP32
    return Precision.AMP_FP16 if cb.scales else Precision.AMP_BF16


def label_of(dl_name: str) -> str:
    "Return Composer's label of a loader: 'eval' for the unnamed validation loader, otherwise its name."
    return 'eval' if dl_name == 'valid' else dl_name


def trainer_of(learn: Learner) -> Any:
    "Return the Learner's `ComposerTrainer`, or None."
    return next((cb for cb in learn.cbs if hasattr(type(cb), 'is_composer_trainer')), None)


def measured_values(
    learn: Learner,
    values: Mapping[str, Any],  # values of an evaluation by column
) -> dict[str, float]:
    """Return loss and metrics of the evaluated loader by name, without the loader's prefix.

    The loss that a `ComposerModel` computes is left out, because Composer does not evaluate it.
    """
    name = learn.dl_name
    prefix = '' if name == 'valid' else f'{name}/'
    found = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
    if not prefix:
        found = {k: v for k, v in found.items() if '/' not in k and not k.startswith('train_')}
    if learn.loss_func is None and takes_batches(learn.model):
        found.pop('loss' if prefix else 'valid_loss', None)
    return {k: v for k, v in found.items() if isinstance(v, (int, float))}


def destinations_of(learn: Learner) -> list[Any]:
    "Return the adapters of Composer's logger destinations, after running their `init`."
    destinations: list[Any] = [cb for cb in learn.cbs if getattr(type(cb), 'is_destination', False)]
    for cb in destinations:
        cb.begin()
    return destinations


def log_as_named(learn: Learner, name: str, value: Any) -> None:
    "Log a value without the loader's prefix, which `learn.log` adds in an evaluation."
    others = [cb for cb in learn.cbs if not getattr(type(cb), 'is_destination', False)]
    log_to_callbacks(learn, name, value, to=others)


class ComposerLogger:
    """Composer's logger: pass metrics to `learn.log`, and other content to callbacks that accept it.

    Metrics are averaged over the epoch and become columns of the history. Hyperparameters, images,
    and tables (as text) are passed to learnkit's loggers, and to each callback with such
    a method (`log_params(params)`, `log_text(step, name, text)`, `log_images(step, name, images)`).
    Composer's logger destinations, added with `from_composer`, receive these and files, at the same
    step as in Composer.
    """

    def __init__(
        self,
        run: Any,  # `ComposerRun`
    ) -> None:
        self._run = run

    def __deepcopy__(self, memo: Any) -> ComposerLogger:
        return self  # a `ComposerModel` has the logger as an attribute, and is copied

    @property
    def destinations(self) -> tuple[Any, ...]:
        "The Composer logger destinations of the Learner, unwrapped."
        return tuple(cb.wrapped for cb in destinations_of(self._run.learn))

    def _send(self, method: str, *content: Any, **options: Any) -> None:
        "Call a method of each destination that has it."
        for destination in self.destinations:
            getattr(destination, method, noop)(*content, **options)

    def _find_step(self, step: int | None) -> int:
        return self._run.collect_counts()['batch'] if step is None else step

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        "Log numbers by name."
        for name, value in metrics.items():
            log_as_named(self._run.learn, name, value)
        self._send('log_metrics', metrics, self._find_step(step))

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        "Log the settings of the run."
        send_to_loggers(self._run.learn, 'log_params', parameters)
        self._send('log_hyperparameters', parameters)

    def log_table(
        self,
        columns: list[str],
        rows: list[list[Any]],
        name: str = 'Table',
        step: int | None = None,
    ) -> None:
        "Log a table as Markdown text."
        lines = []
        for cells in [columns, ['---'] * len(columns), *rows]:
            lines.append(f'| {" | ".join(map(str, cells))} |')
        send_to_loggers(self._run.learn, 'log_text', name, '\n'.join(lines))
        self._send('log_table', columns, rows, name, self._find_step(step))

    def log_images(
        self,
        images: Any,
        name: str = 'Images',
        channels_last: bool = False,
        step: int | None = None,
        **options: Any,  # masks and other options of the destinations
    ) -> None:
        "Log images; learnkit's loggers receive images with channels first."
        self._send('log_images', images, name, channels_last, self._find_step(step), **options)
        if channels_last:
            images = torch.as_tensor(images).movedim(-1, -3)
        send_to_loggers(self._run.learn, 'log_images', name, images)

    def upload_file(
        self, remote_file_name: str, file_path: Any, *, overwrite: bool = False
    ) -> None:
        "Pass a file to the destinations."
        state = self._run.view
        name, path = (
            text.replace('{run_name}', state.run_name)
            for text in (remote_file_name, str(file_path))
        )
        self._send('upload_file', state, name, Path(path), overwrite=overwrite)

    def has_file_upload_destination(self) -> bool:
        "Return True if a destination stores files."
        return any(getattr(d, 'can_upload_files', bool)() for d in self.destinations)
