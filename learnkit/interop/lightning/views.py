# SPDX-License-Identifier: Apache-2.0
"""Parts of a run by Lightning's names: strategy, precision, loops, and the loggers of a Learner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from learnkit.comm.ranks import SINGLE_RANK, Comm
from learnkit.core.batch import map_tensors
from learnkit.core.model import model_device
from learnkit.data.dataloaders import default_device
from learnkit.engine.callback import MissingAttribute
from learnkit.interop.common.hooks import send_to_loggers
from learnkit.interop.lightning.host import LightningHost
from learnkit.interop.lightning.options import Precision

if TYPE_CHECKING:
    from learnkit.learner import Learner


class View:
    "Part of a run by Lightning's names: an attribute that it does not have is an error by name."

    def __getattr__(self, name: str) -> Any:
        why = 'The Trainer of learnkit provides what modules and callbacks usually read, but not this.'
        if hasattr(type(self), name):
            why = 'It is known once the loaders and the Learner are made, after the hook `setup`.'
        raise MissingAttribute(name, self, why=why)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # a copy of the module logs to the same Learner

    @property
    def learn(self) -> Learner | None:
        "The Learner, once it is made."
        raise NotImplementedError

    @property
    def world(self) -> Comm:
        return SINGLE_RANK if self.learn is None else self.learn.world


class TrainerView(View):
    "Part of a Trainer."

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @property
    def host(self) -> LightningHost:
        return self.trainer.host

    @property
    def learn(self) -> Learner | None:
        return self.trainer.learn


class Strategy(TrainerView):
    "`trainer.strategy`: operations over the processes."

    handles_gradient_accumulation = False
    model = lightning_module = property(attrgetter('trainer.model'))
    optimizers = property(
        attrgetter('trainer.optimizers'), lambda self, new: setattr(self.trainer, 'optimizers', new)
    )
    lr_scheduler_configs = property(attrgetter('trainer.lr_scheduler_configs'))
    precision_plugin = property(attrgetter('trainer.precision_plugin'))
    is_global_zero = property(attrgetter('world.is_first'))
    global_rank = local_rank = property(attrgetter('world.rank'))
    world_size = property(attrgetter('world.size'))
    node_rank = 0

    @property
    def root_device(self) -> torch.device:
        learn = self.learn
        if learn is None:
            return self.trainer.device or default_device()
        return model_device(learn.model, learn.dls)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self.world.broadcast(value)

    def barrier(self, name: str | None = None) -> None:
        self.world.barrier()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = 'mean') -> Any:
        if self.world.size == 1:
            return tensor
        parts = self.all_gather(tensor)
        return parts.sum(0) if str(reduce_op).lower() == 'sum' else parts.float().mean(0)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        world = self.world
        return not world.any(not decision) if all else world.any(decision)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        world = self.world
        return data if world.size == 1 else torch.stack(world.gather(data)).to(data.device)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return map_tensors(batch, lambda t: t.to(device or self.root_device))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.world.is_first:
            Path(filepath).unlink(missing_ok=True)


class PrecisionView(TrainerView):
    "`trainer.precision_plugin`: the context of forward passes, and the type of inputs."

    @property
    def precision(self) -> str:
        return self.trainer.precision

    @property
    def _precision(self) -> Precision:
        return self.trainer.precision_option

    def convert_input(self, data: Any) -> Any:
        "Convert the floats of a batch to the type of the weights, if the precision sets it."
        dtype = self._precision.dtype
        if dtype is None:
            return data
        return map_tensors(data, lambda t: t.to(dtype) if t.is_floating_point() else t)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        "Compute in the precision of the Trainer within a context."
        option = self._precision
        device = self.trainer.strategy.root_device.type
        if option.autocast:
            dtype = torch.bfloat16 if option.autocast == 'bf16' else torch.float16
            with torch.autocast(device, dtype):
                yield
            return
        with self.default_type():
            yield

    @contextmanager
    def default_type(self) -> Iterator[None]:
        "Make new tensors in the type of the weights within a context, if the precision sets it."
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._precision.dtype or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    train_step_context = val_step_context = test_step_context = predict_step_context = (
        forward_context
    )


class DataConnector(TrainerView):
    "What a LightningModule reads of the trainer to move an example to the device."

    @property
    def _datahook_selector(self) -> SimpleNamespace:
        return SimpleNamespace(get_instance=self.host.find_owner)


class LoggerView(TrainerView):
    "`trainer.logger` of a Learner without loggers of Lightning: the Learner's own loggers."

    name, version = 'lightning_logs', 0

    @property
    def save_dir(self) -> str:
        return self.trainer.default_root_dir

    @property
    def log_dir(self) -> str:
        return str(Path(self.save_dir, self.name, f'version_{self.version}'))

    @property
    def experiment(self) -> Any:
        "The backend of the Learner's first logger that has one: a writer of TensorBoard, a run of W&B."
        learn = self.learn
        backends = [getattr(cb, 'backend', None) for cb in ([] if learn is None else learn.cbs)]
        found = next((backend for backend in backends if backend is not None), None)
        if found is None:
            raise MissingAttribute('experiment', self, why='The Learner has no logger with one.')
        return found

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.host.logged.send(name, value, None, False)

    def log_hyperparams(self, params: Any, *args: Any) -> None:
        if self.learn is not None:
            send_to_loggers(self.learn, 'log_params', dict(params))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        "Do nothing: the Learner's loggers draw no graph."

    def save(self) -> None:
        "Do nothing: loggers write by themselves."

    def finalize(self, status: str) -> None:
        "Do nothing: loggers close by themselves."

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        "Do nothing: loggers do not upload Lightning's files."


def count_progress(ready: int, completed: int) -> SimpleNamespace:
    "Return the counts of a loop's progress by Lightning's names."
    counts = {'ready': ready, 'started': ready, 'processed': completed, 'completed': completed}
    return SimpleNamespace(**counts)


class FitLoop(TrainerView):
    "What Lightning's own callbacks read of `trainer.fit_loop`, which is not public there."

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._skip_backward = False
        self._n_added = 0  # number of batches that a callback has added to `max_batches`
        self.epoch_loop = self.val_loop = self

    is_last_batch = property(attrgetter('host.is_last_batch'))
    _has_run = property(attrgetter('host.has_evaluated'))
    _batches_that_stepped = property(attrgetter('host.n_stepped'))
    global_step = property(attrgetter('trainer.global_step'))
    current_epoch = property(attrgetter('trainer.current_epoch'))
    min_epochs = property(attrgetter('trainer.min_epochs'))
    min_steps = property(attrgetter('trainer.min_steps'))
    max_steps = property(attrgetter('trainer.max_steps'))

    @property
    def should_update_logs(self) -> bool:
        return self.host.is_log_due

    @property
    def batch_idx(self) -> int:
        return -1 if self.learn is None else self.learn.iter

    @property
    def total_batch_idx(self) -> int:
        return self.host.n_begun - 1

    @property
    def epoch_progress(self) -> SimpleNamespace:
        done = self.trainer.n_epochs_done
        return SimpleNamespace(current=count_progress(done + self.host.is_in_epoch, done))

    @property
    def batch_progress(self) -> SimpleNamespace:
        n = self.batch_idx + 1
        return SimpleNamespace(
            current=count_progress(n, n),
            is_last_batch=self.host.is_last_batch,
            total=count_progress(n, n),
        )

    @property
    def max_epochs(self) -> int:
        n: int = self.trainer.max_epochs
        return n

    @max_epochs.setter
    def max_epochs(self, n: int) -> None:
        self.trainer.max_epochs = n
        if self.learn is not None:
            self.learn.n_epoch = n

    @property
    def max_batches(self) -> int:
        return int(self.trainer.num_training_batches) + self._n_added

    @max_batches.setter
    def max_batches(self, n: int) -> None:
        self._n_added += n - self.max_batches
