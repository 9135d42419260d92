"""`state` and `logger` of Composer callbacks, as live views of the Learner."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from learnkit.callbacks.mixed_precision import MixedPrecision
from learnkit.core.batch import count_samples, find_bs, form_of, to_device
from learnkit.core.errors import BatchError, did_you_mean
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import model_device
from learnkit.data.dataloaders import evaluation_loaders, n_batches
from learnkit.interop.composer_time import ComposerTime
from learnkit.interop.hooks import send_to_loggers

__all__ = ['ComposerState', 'ComposerLogger', 'Precision', 'Measured', 'label_of', 'log_as_named']

# attributes of Composer's State that are missing here, with their meaning and a replacement
NOT_HERE = {
    'fsdp_config': 'the settings of FSDP',
    'deepspeed_config': 'the settings of DeepSpeed',
    'tp_config': 'the settings of tensor parallelism',
    'parallelism_config': 'the settings of parallel training',
    'device_mesh': 'the mesh of devices of parallel training',
    'profiler': 'the profiler; here `learn.timings` shows where the time goes',
    'precision_config': 'options of the precision; here they are arguments of `MixedPrecision`',
    'train_metric_names': 'names of training metrics; here `learn.recorder.metric_names`',
    'eval_metric_names': 'names of evaluation metrics; here `learn.recorder.metric_names`',
    'dataset_resumption': 'positions of data sets; here a checkpoint has them',
    'deterministic_mode': 'whether torch is deterministic; here `torch.are_deterministic_algorithms_enabled()`',
    'set_dataloader': 'a method that replaces the loader; here assign `learn.dls`',
}
WRITABLE = ('batch', 'outputs', 'loss', 'model', 'max_duration')


class Precision(StrEnum):
    "Precision of the forward pass, by Composer's names."

    FP32 = 'fp32'
    AMP_FP16 = 'amp_fp16'
    AMP_BF16 = 'amp_bf16'


class Measured(float):
    """Value of a metric, which `compute()` returns as a tensor.

    >>> Measured(0.5).compute(), Measured(0.5) > 0.4
    (tensor(0.5000), True)
    """

    def compute(self) -> torch.Tensor:
        "Return the value as a 0-dim tensor."
        return torch.tensor(float(self))


class ComposerState:
    """Composer's state, read from the Learner at each access.

    Writable attributes: `batch` (the input of the model, before the forward pass), `outputs` (in
    `after_forward` and `before_loss`, the input of the loss), `loss` (in `after_loss` and
    `before_backward`, the input of backward), `model`, and `max_duration` if it has been reached
    already, which ends the fit like `stop_training()`. Metrics and loaders have the Learner's
    names, except an unnamed validation loader, which is `'eval'`. Any other attribute raises
    `AttributeError` with a replacement.
    """

    def __init__(
        self,
        watch: Any,  # adapter, with its counts and its learner
    ) -> None:
        self.__dict__['_watch'] = watch

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        reason = NOT_HERE.get(name)
        if reason:
            what = f'Composer has there {reason}.'
        else:
            what = (
                'Attributes of the Learner are `state.learn.<name>`.'
                f'{did_you_mean(name, dir(self))}'
            )
        raise AttributeError(
            f'`state.{name}` is not offered by from_composer. {what}', name=name, obj=self
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in WRITABLE:
            raise AttributeError(
                f'`state.{name}` cannot be set: of the state, {", ".join(WRITABLE)} can. What else is '
                'to change, a learnkit callback changes through `self.learn`.',
                name=name,
                obj=self,
            )
        object.__setattr__(self, name, value)

    @property
    def learn(self) -> Any:
        "The Learner itself; not part of Composer."
        return self._watch.learn

    def _time(self, value: Any, unit: str) -> Any:
        types = self._watch.types
        return types.Time(value, types.TimeUnit(unit))

    # -- time --------------------------------------------------------------------------------------

    @property
    def timestamp(self) -> Any:
        "Finished training over all fits; wall-clock times exclude evaluation."
        return self._watch.types.Timestamp(**self._watch.counts())

    @property
    def previous_timestamp(self) -> Any:
        "Timestamp before the last batch, or before the end of the epoch."
        return self._watch.types.Timestamp(**self._watch.counts_before())

    @property
    def eval_timestamp(self) -> Any:
        "Finished part of the current or last evaluated loader."
        return self._watch.passes['eval'].timestamp(self._watch.types)

    @property
    def predict_timestamp(self) -> Any:
        "Finished part of the predictions."
        return self._watch.passes['predict'].timestamp(self._watch.types)

    @property
    def max_duration(self) -> Any:
        "End of training over all fits; None before the first fit, without an end, and for steps."
        end = self._watch.end()
        return None if end is None else self._time(*end)

    @max_duration.setter
    def max_duration(self, end: Any) -> None:
        if end is not None and self.timestamp >= end:
            return self.learn.stop()
        raise AttributeError(
            '`state.max_duration` can only be set to a time that is reached already, which ends the '
            'fit. Give the length to `learn.fit`.'
        )

    def get_elapsed_duration(self) -> Any:
        "Return the share of the fit that is done, None before the first fit."
        return self._time(self.learn.pct_train, 'dur') if self._watch.has_fitted else None

    def stop_training(self) -> None:
        "End the fit after the current batch or epoch, like `learn.stop()`."
        self.learn.stop()

    # -- the batch ---------------------------------------------------------------------------------

    @property
    def batch(self) -> Any:
        "The batch or microbatch: as the loader gave it up to `after_dataloader`, then on the device."
        learn = self.learn
        if not self._watch.is_split:
            return learn.batch
        return (*learn.xb, *learn.yb) if isinstance(learn.batch, (tuple, list)) else learn.xb[0]

    @batch.setter
    def batch(self, batch: Any) -> None:
        if self._watch.is_split:
            self.learn._split(batch)
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
        "Output of the model for this batch; None before the forward pass."
        return self.learn.__dict__.get('pred')

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self.learn.pred = outputs

    @property
    def loss(self) -> Any:
        "The loss; in `after_loss` and `before_backward` the loss that backward uses."
        learn = self.learn
        return learn.__dict__.get('loss_grad', learn.loss) if self._watch.has_graph else learn.loss

    @loss.setter
    def loss(self, loss: Any) -> None:
        self.learn.loss = loss.detach().clone()
        if self.learn.training:
            self.learn.loss_grad = loss

    @property
    def total_loss_dict(self) -> dict[str, Any]:
        "Loss of the batch under Composer's name, as a 0-dim tensor."
        return {'loss/train/total': self.learn.loss}

    @property
    def device_train_microbatch_size(self) -> Any:
        "Samples of a microbatch; for 'auto' the size that fits so far; otherwise of the batch."
        size = self.learn.microbatch
        return (self.learn.auto_microbatch if size == 'auto' else size) or self._samples()

    @property
    def grad_accum(self) -> int:
        "Number of microbatches of a batch."
        size = self.device_train_microbatch_size
        return -(-self._samples() // size) if size else 1

    def _samples(self) -> int:
        try:
            if self.learn.batch is None:
                return count_samples(self.learn)
            form = form_of(self.learn.dls, self.learn.dl_name)
            return find_bs(*form.split(self.learn.batch), self.learn.size_func)
        except BatchError:
            return 0

    # -- parts of the Learner ----------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self.learn.model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self.learn.model = model

    @property
    def optimizers(self) -> list[Any]:
        "The torch optimizers; empty before the first fit."
        return list(self.learn.opt.optimizers.values()) if self.learn.opt is not None else []

    @property
    def schedulers(self) -> list[Any]:
        "Empty: schedulers are callbacks in learnkit."
        return []

    @property
    def algorithms(self) -> list[Any]:
        "Empty: algorithms are callbacks in learnkit."
        return []

    @property
    def _mixed_precision(self) -> Any:
        return next((cb for cb in self.learn.cbs if isinstance(cb, MixedPrecision)), None)

    @property
    def scaler(self) -> Any:
        "Gradient scaler for float16, or None."
        return getattr(self._mixed_precision, 'scaler', None)

    @property
    def precision(self) -> Precision:
        "Precision of the forward pass."
        cb = self._mixed_precision
        if cb is None:
            return Precision.FP32
        return Precision.AMP_FP16 if cb.scales else Precision.AMP_BF16

    @property
    def device(self) -> Any:
        "Object with the device's `name` and `tensor_to_device`, `batch_to_device`, `module_to_device`."
        device = model_device(self.learn.model, self.learn.dls)
        move = lambda b: to_device(b, device)
        return SimpleNamespace(
            name=device.type,
            tensor_to_device=move,
            batch_to_device=move,
            module_to_device=lambda module: module.to(device),
            torch_device=device,
        )

    @property
    def callbacks(self) -> list[Any]:
        "The Composer callbacks of the Learner, unwrapped."
        return [cb.wrapped for cb in self.learn.cbs if hasattr(type(cb), 'is_composer')]

    @property
    def run_name(self) -> str:
        "Name of the Learner's folder."
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

    fsdp_enabled = deepspeed_enabled = fsdp_sharded_state_dict_enabled = False

    # -- data and metrics --------------------------------------------------------------------------

    @property
    def dataloader(self) -> Any:
        return self.learn.dl

    @property
    def dataloader_label(self) -> str | None:
        "'train', 'eval', 'predict', or the name of the validation loader."
        learn = self.learn
        if learn.dl is None:
            return None
        return 'predict' if learn.phase == 'predict' else label_of(learn.dl_name)

    @property
    def dataloader_len(self) -> ComposerTime | None:
        "Number of batches of the loader; None if unknown."
        n = n_batches(self.learn.dl) if self.learn.dl is not None else None
        return None if n is None else self._time(n, 'ba')

    @property
    def train_dataloader(self) -> Any:
        return self.learn.dls.train

    @property
    def evaluators(self) -> list[Any]:
        "The validation loaders with their labels: `evaluator.label`, `evaluator.dataloader.dataloader`."
        return [
            SimpleNamespace(
                label=label_of(name),
                dataloader=SimpleNamespace(dataloader=dl),
                subset_num_batches=-1,
            )
            for name, dl in evaluation_loaders(self.learn.dls)
        ]

    @property
    def train_metrics(self) -> dict[str, Measured]:
        "Training loss and metrics of the epoch by name, from `epoch_end` on."
        return self._watch.measured.get('train', {})

    @property
    def eval_metrics(self) -> dict[str, dict[str, Measured]]:
        "Loss and metrics of the last evaluation by name, by label of the loader."
        measured = {k: v for k, v in self._watch.measured.items() if k != 'train'}
        labels = [label_of(name) for name, _ in evaluation_loaders(self.learn.dls)]
        return {**{label: {} for label in labels}, **measured}

    @property
    def metrics(self) -> dict[str, Any]:
        "Loss and metrics of training and of every loader, by label."
        return {'train': self.train_metrics, **self.eval_metrics}

    @property
    def loggers(self) -> list[Any]:
        return []

    def state_dict(self) -> dict[str, Any]:
        "Return states of model and optimizers, and timestamp; to resume, use the Learner's checkpoints."
        return {
            'model': self.model.state_dict(),
            'optimizers': [opt.state_dict() for opt in self.optimizers],
            'timestamp': self.timestamp.state_dict(),
        }


def label_of(dl_name: str) -> str:
    "Return Composer's label of a loader: 'eval' for the unnamed validation loader, else its name."
    return 'eval' if dl_name == 'valid' else dl_name


def log_as_named(learn: LearnerLike, name: str, value: Any) -> None:
    "Log a value without the prefix of the loader that `learn.log` adds in evaluation."
    for cb in learn.cbs:
        receive = getattr(type(cb), 'receive_log', None)
        if receive:
            receive(cb, name, value, 1, True)


class ComposerLogger:
    """Composer's logger: metrics go to `learn.log`, other content to callbacks that accept it.

    Metrics are averaged over the epoch and become columns of the history; `step` is ignored in
    favor of the Learner's step. Hyper-parameters, tables and traces (as text) and images go to
    learnkit's loggers, and to each callback with such a method (`log_params(params)`,
    `log_text(step, name, text)`, `log_images(step, name, images)`); files go to callbacks with
    `log_file(name, path)`.
    """

    destinations: tuple[Any, ...] = ()

    def __init__(
        self,
        watch: Any,  # adapter
    ) -> None:
        self._watch = watch

    def _methods(self, method: str) -> list[Any]:
        return [getattr(cb, method) for cb in self._watch.learn.cbs if hasattr(type(cb), method)]

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        "Log numbers by name."
        for name, value in metrics.items():
            log_as_named(self._watch.learn, name, value)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        "Log the settings of the run."
        send_to_loggers(self._watch.learn, 'log_params', parameters)

    def log_table(
        self,
        columns: list[str],
        rows: list[list[Any]],
        name: str = 'Table',
        step: int | None = None,
    ) -> None:
        "Log a table as text, in Markdown."
        lines = []
        for cells in [columns, ['---'] * len(columns), *rows]:
            lines.append(f'| {" | ".join(map(str, cells))} |')
        self._log_text(name, '\n'.join(lines))

    def log_traces(self, traces: dict[str, Any]) -> None:
        "Log traces as text."
        for name, value in traces.items():
            self._log_text(name, str(value))

    def _log_text(self, name: str, text: str) -> None:
        send_to_loggers(self._watch.learn, 'log_text', name, text)

    def log_images(
        self,
        images: Any,
        name: str = 'Images',
        channels_last: bool = False,
        step: int | None = None,
        masks: Any = None,
        mask_class_labels: Any = None,
        use_table: bool = True,
    ) -> None:
        "Log images, with the channels first."
        if channels_last:
            images = torch.as_tensor(images).movedim(-1, -3)
        send_to_loggers(self._watch.learn, 'log_images', name, images)

    def upload_file(
        self, remote_file_name: str, file_path: Any, *, overwrite: bool = False
    ) -> None:
        "Pass a file to the callbacks that store files."
        for log in self._methods('log_file'):
            log(remote_file_name, file_path)

    def has_file_upload_destination(self) -> bool:
        "Return True if a callback stores files."
        return bool(self._methods('log_file'))
