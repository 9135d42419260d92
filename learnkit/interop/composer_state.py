"""The `state` and the `logger` that a Composer-style callback is called with: live views of the Learner."""

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
from learnkit.core.model import model_device
from learnkit.data.dataloaders import evaluation_loaders, n_batches
from learnkit.interop.composer_time import ComposerTime
from learnkit.interop.hooks import hand_on

__all__ = ['ComposerState', 'ComposerLogger', 'Precision', 'Measured', 'label_of', 'log_as_named']

# what Composer's State has and this one has not, with what to use here
NOT_HERE = {
    'fsdp_config': 'the settings of FSDP',
    'deepspeed_config': 'the settings of DeepSpeed',
    'tp_config': 'the settings of tensor parallelism',
    'parallelism_config': 'the settings of parallel training',
    'device_mesh': 'the mesh of devices of parallel training',
    'profiler': 'the profiler; here `learn.timings` says where the time goes',
    'precision_config': 'options of the precision; here they are arguments of `MixedPrecision`',
    'train_metric_names': 'names of training metrics; here `learn.recorder.metric_names`',
    'eval_metric_names': 'names of evaluation metrics; here `learn.recorder.metric_names`',
    'dataset_resumption': 'positions of data sets; here a checkpoint has them',
    'deterministic_mode': 'whether torch is deterministic; here `torch.are_deterministic_algorithms_enabled()`',
    'set_dataloader': 'a method that replaces the loader; here assign `learn.dls`',
}
WRITABLE = ('batch', 'outputs', 'loss', 'model', 'max_duration')


class Precision(StrEnum):
    "The precision of the forward pass, by Composer's names."

    FP32 = 'fp32'
    AMP_FP16 = 'amp_fp16'
    AMP_BF16 = 'amp_bf16'


class Measured(float):
    """The value of a metric, which `compute()` returns as a tensor.

    >>> Measured(0.5).compute(), Measured(0.5) > 0.4
    (tensor(0.5000), True)
    """

    def compute(self) -> torch.Tensor:
        "Return the value as a 0-dim tensor."
        return torch.tensor(float(self))


class ComposerState:
    """What Composer calls the state, read from the Learner each time it is asked.

    Written may be: `batch` (before the forward pass it is what the model gets), `outputs` (in `after_forward` and
    `before_loss` the loss is computed from it), `loss` (in `after_loss` and `before_backward` it is what backward runs
    on), `model`, and `max_duration` where it is reached already, which ends the fit as `stop_training()` does. A
    metric's or loader's name is that of the Learner, except for an unnamed validation loader, which is `'eval'`.
    Anything else raises `AttributeError` with what to use here.
    """

    def __init__(
        self,
        watch: Any,  # the adapter: what it has counted, and its learner
    ) -> None:
        self.__dict__['_watch'] = watch

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        reason = NOT_HERE.get(name)
        what = (
            f'Composer has there {reason}.'
            if reason
            else f'What the Learner has under a name of its own is `state.learn.<name>`.{did_you_mean(name, dir(self))}'
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
        "The Learner itself, which Composer does not have."
        return self._watch.learn

    def _time(self, value: Any, unit: str) -> Any:
        types = self._watch.types
        return types.Time(value, types.TimeUnit(unit))

    # -- time --------------------------------------------------------------------------------------

    @property
    def timestamp(self) -> Any:
        "What training has finished, over all fits; wall-clock times leave evaluation out."
        return self._watch.types.Timestamp(**self._watch.counts())

    @property
    def previous_timestamp(self) -> Any:
        "The timestamp before the last batch, or before the epoch's end."
        return self._watch.types.Timestamp(**self._watch.counts_before())

    @property
    def eval_timestamp(self) -> Any:
        "What is finished of the loader that is being evaluated, or was last."
        return self._watch.passes['eval'].timestamp(self._watch.types)

    @property
    def predict_timestamp(self) -> Any:
        "What is finished of the predictions."
        return self._watch.passes['predict'].timestamp(self._watch.types)

    @property
    def max_duration(self) -> Any:
        "When training ends, or ended, over all fits; None before the first, without an end, and for one in steps."
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
        "Return the share of the fit that is over, None before the first one."
        return self._time(self.learn.pct_train, 'dur') if self._watch.has_fitted else None

    def stop_training(self) -> None:
        "End the fit after the current batch or epoch, as `learn.stop()` does."
        self.learn.stop()

    # -- the batch ---------------------------------------------------------------------------------

    @property
    def batch(self) -> Any:
        "The batch, or the microbatch: as the loader gave it up to `after_dataloader`, then on the device."
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
        "Return a part of the batch: by index, by name, or what a function (or the first of a pair) makes of it."
        get = key[0] if isinstance(key, (tuple, list)) and callable(key[0]) else key
        if callable(get):
            return get(self.batch)
        if isinstance(self.batch, Mapping) or isinstance(key, (int, slice)):
            return self.batch[key]
        return getattr(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
        "Replace a part of the batch: by index, by name, or by the second function of a pair."
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
        "What the model returned for this batch; None before."
        return self.learn.__dict__.get('pred')

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self.learn.pred = outputs

    @property
    def loss(self) -> Any:
        "The loss; in `after_loss` and `before_backward` the one that backward runs on."
        learn = self.learn
        return learn.__dict__.get('loss_grad', learn.loss) if self._watch.has_graph else learn.loss

    @loss.setter
    def loss(self, loss: Any) -> None:
        self.learn.loss = loss.detach().clone()
        if self.learn.training:
            self.learn.loss_grad = loss

    @property
    def total_loss_dict(self) -> dict[str, Any]:
        "The loss of the batch under Composer's name, as a 0-dim tensor."
        return {'loss/train/total': self.learn.loss}

    @property
    def device_train_microbatch_size(self) -> Any:
        "The samples of a microbatch; for 'auto' what memory has held so far; without microbatches those of the batch."
        size = self.learn.microbatch
        return (self.learn.auto_microbatch if size == 'auto' else size) or self._samples()

    @property
    def grad_accum(self) -> int:
        "How many microbatches a batch is cut into."
        size = self.device_train_microbatch_size
        return -(-self._samples() // size) if size else 1

    def _samples(self) -> int:
        try:
            if self.learn.batch is None:
                return count_samples(self.learn)
            return find_bs(
                *form_of(self.learn.dls, self.learn.dl_name).split(self.learn.batch),
                self.learn.size_func,
            )
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
        "The torch optimizers; none before the first fit."
        return list(self.learn.opt.optimizers.values()) if self.learn.opt is not None else []

    @property
    def schedulers(self) -> list[Any]:
        "None: what schedules here is a callback."
        return []

    @property
    def algorithms(self) -> list[Any]:
        "None: what Composer calls an algorithm is a callback here."
        return []

    @property
    def _mixed_precision(self) -> Any:
        return next((cb for cb in self.learn.cbs if isinstance(cb, MixedPrecision)), None)

    @property
    def scaler(self) -> Any:
        "The gradient scaler of float16; None without one."
        return getattr(self._mixed_precision, 'scaler', None)

    @property
    def precision(self) -> Precision:
        "The precision of the forward pass."
        cb = self._mixed_precision
        return (
            Precision.FP32
            if cb is None
            else Precision.AMP_FP16
            if cb.scales
            else Precision.AMP_BF16
        )

    @property
    def device(self) -> Any:
        "An object with the device's `name` and `tensor_to_device`, `batch_to_device`, `module_to_device`."
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
        "The Composer-style callbacks of the Learner, as they were given."
        return [cb.wrapped for cb in self.learn.cbs if hasattr(type(cb), 'is_composer')]

    @property
    def run_name(self) -> str:
        "The name of the Learner's folder."
        return self.learn.path.resolve().name

    @property
    def rank_zero_seed(self) -> int:
        "The seed that torch was started with."
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
        "The batches of the loader; None where that is not known."
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
        "Loss and metrics of the epoch's training, by name, from `epoch_end` on."
        return self._watch.measured.get('train', {})

    @property
    def eval_metrics(self) -> dict[str, dict[str, Measured]]:
        "By label of the loader, loss and metrics of its last evaluation, by name."
        found = {k: v for k, v in self._watch.measured.items() if k != 'train'}
        return {**{label_of(name): {} for name, _ in evaluation_loaders(self.learn.dls)}, **found}

    @property
    def metrics(self) -> dict[str, Any]:
        "Loss and metrics of training and of every loader, by label."
        return {'train': self.train_metrics, **self.eval_metrics}

    @property
    def loggers(self) -> list[Any]:
        return []

    def state_dict(self) -> dict[str, Any]:
        "Return the states of model and optimizers, and the timestamp. To resume from, use the Learner's checkpoints."
        return {
            'model': self.model.state_dict(),
            'optimizers': [opt.state_dict() for opt in self.optimizers],
            'timestamp': self.timestamp.state_dict(),
        }


def label_of(dl_name: str) -> str:
    "Return Composer's label of a loader: 'eval' for the unnamed validation loader, else its name."
    return 'eval' if dl_name == 'valid' else dl_name


def log_as_named(learn: Any, name: str, value: Any) -> None:
    "Log a value under its name as it is, also in evaluation, where `learn.log` would put the loader's before it."
    for cb in learn.cbs:
        if receive := getattr(type(cb), 'receive_log', None):
            receive(cb, name, value, 1, True)


class ComposerLogger:
    """What Composer calls the logger: metrics go to `learn.log`, the rest to every callback that has a place for it.

    Metrics are averaged over the epoch and become columns of the history; `step` is the Learner's own.
    Hyper-parameters, tables and traces (as texts) and images go to learnkit's loggers, and to each callback of the
    Learner that has such a method of their protocol (`log_params(params)`, `log_text(step, name, text)`,
    `log_images(step, name, images)`); files go to those with a `log_file(name, path)`.
    """

    destinations: tuple[Any, ...] = ()

    def __init__(
        self,
        watch: Any,  # the adapter
    ) -> None:
        self._watch = watch

    def _all(self, method: str) -> list[Any]:
        return [getattr(cb, method) for cb in self._watch.learn.cbs if hasattr(type(cb), method)]

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        "Log named numbers."
        for name, value in metrics.items():
            log_as_named(self._watch.learn, name, value)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        "Log the settings of the run."
        hand_on(self._watch.learn, 'log_params', parameters)

    def log_table(
        self,
        columns: list[str],
        rows: list[list[Any]],
        name: str = 'Table',
        step: int | None = None,
    ) -> None:
        "Log a table as text, in Markdown."
        lines = [columns, ['---'] * len(columns), *rows]
        self._log_text(name, '\n'.join(f'| {" | ".join(map(str, line))} |' for line in lines))

    def log_traces(self, traces: dict[str, Any]) -> None:
        "Log traces as text."
        for name, value in traces.items():
            self._log_text(name, str(value))

    def _log_text(self, name: str, text: str) -> None:
        hand_on(self._watch.learn, 'log_text', name, text)

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
        hand_on(self._watch.learn, 'log_images', name, images)

    def upload_file(
        self, remote_file_name: str, file_path: Any, *, overwrite: bool = False
    ) -> None:
        "Hand a file to the callbacks that keep files."
        for log in self._all('log_file'):
            log(remote_file_name, file_path)

    def has_file_upload_destination(self) -> bool:
        "Tell whether a callback keeps files."
        return bool(self._all('log_file'))
