# SPDX-License-Identifier: Apache-2.0
"""Stand-in for Lightning's Trainer, with what modules and callbacks read of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from learnkit.core.model import model_device
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.callback import MissingAttribute
from learnkit.engine.callback_state import decode, encode
from learnkit.engine.lengths import find_length
from learnkit.interop.hooks import keep_plain, send_to_loggers
from learnkit.interop.lightning_host import LightningHost
from learnkit.metrics.state import collect_torchmetrics, list_parts, set_states

if TYPE_CHECKING:
    from learnkit.learner import Learner


class View:
    "Part of the Learner by Lightning's names: an attribute that it does not have is an error by name."

    def __init__(self, host: LightningHost) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Any:
        why = 'The trainer of `from_lightning` has what modules and callbacks read, and not this.'
        raise MissingAttribute(name, self, why=why)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # a copy of the module logs to the same Learner

    @property
    def learn(self) -> Learner:
        return self.host.learn


class Strategy(View):
    "`trainer.strategy`: operations over the processes."

    @property
    def root_device(self) -> torch.device:
        return model_device(self.learn.model, self.learn.dls)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self.learn.world.broadcast(value)

    def barrier(self, name: str | None = None) -> None:
        self.learn.world.barrier()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        world = self.learn.world
        return not world.any(not decision) if all else world.any(decision)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        world = self.learn.world
        return data if world.size == 1 else torch.stack(world.gather(data)).to(data.device)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.learn.world.is_first:
            Path(filepath).unlink(missing_ok=True)


class LoggerView(View):
    "`trainer.logger`: the loggers of the Learner."

    name, version = 'lightning_logs', 0

    @property
    def save_dir(self) -> str:
        return str(self.learn.path)

    @property
    def log_dir(self) -> str:
        return str(Path(self.save_dir, self.name, f'version_{self.version}'))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.host.logged.send(name, value, None, False)

    def log_hyperparams(self, params: Any, *args: Any) -> None:
        send_to_loggers(self.learn, 'log_params', dict(params))

    def save(self) -> None:
        "Do nothing: loggers write by themselves."

    def finalize(self, status: str) -> None:
        "Do nothing: loggers close by themselves."

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        "Do nothing: loggers do not upload Lightning's files."


class FitLoop(View):
    "What Lightning's own callbacks read of `trainer.fit_loop`, which is not public there."

    def __init__(self, host: LightningHost) -> None:
        super().__init__(host)
        self._skip_backward = False
        self._n_added = 0  # number of batches that a callback has added to `max_batches`
        self.epoch_loop = self.batch_progress = self.val_loop = self

    is_last_batch = property(attrgetter('host.is_last_batch'))
    _has_run = property(attrgetter('host.has_evaluated'))
    _batches_that_stepped = property(attrgetter('host.trainer.global_step'))

    @property
    def should_update_logs(self) -> bool:
        trainer: Trainer = self.host.trainer
        return (trainer.global_step + 1) % trainer.log_every_n_steps == 0

    @property
    def max_epochs(self) -> int:
        n: int = self.host.trainer.max_epochs
        return n

    @max_epochs.setter
    def max_epochs(self, n: int) -> None:
        self.host.trainer.max_epochs = self.learn.n_epoch = n

    @property
    def max_batches(self) -> int:
        return int(self.host.trainer.num_training_batches) + self._n_added

    @max_batches.setter
    def max_batches(self, n: int) -> None:
        self._n_added += n - self.max_batches


class Trainer(View):
    "The Learner as Lightning's `Trainer`."

    # options of a Trainer that have one value here
    fast_dev_run = sanity_checking = barebones = received_sigterm = False
    ckpt_path = min_epochs = min_steps = None
    num_sanity_val_steps = overfit_batches = reload_dataloaders_every_n_epochs = 0
    limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = 1.0
    num_nodes, node_rank, precision = 1, 0, '32-true'

    def __init__(
        self,
        host: LightningHost,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        log_every_n_steps: int = 50,
        datamodule: Any = None,
    ) -> None:
        super().__init__(host)
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.log_every_n_steps = log_every_n_steps
        self.datamodule = datamodule
        self.max_epochs = self.max_steps = -1  # of the fit; -1: no limit
        self.strategy = Strategy(host)
        self.fit_loop = self._logger_connector = FitLoop(host)
        self.logger = LoggerView(host)
        self.loggers = [self.logger]

    # what the Learner and its parts have under other names
    callback_metrics = property(attrgetter('host.logged.callback_metrics'))
    logged_metrics = property(attrgetter('host.logged.logged_metrics'))
    progress_bar_metrics = property(attrgetter('host.logged.progress_bar_metrics'))
    lr_scheduler_configs = property(attrgetter('host.optimization.configs'))
    is_last_batch = property(attrgetter('host.is_last_batch'))
    model = lightning_module = property(attrgetter('learn.model'))
    train_dataloader = property(attrgetter('learn.dls.train'))
    world_size = num_devices = property(attrgetter('learn.world.size'))
    global_rank = local_rank = property(attrgetter('learn.world.rank'))
    is_global_zero = property(attrgetter('learn.world.is_first'))
    log_dir = property(attrgetter('logger.log_dir'))

    # -- progress --------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        return self.learn.epoch + self.host.is_over

    @property
    def global_step(self) -> int:
        is_own = self.host.module is not None
        return self.host.optimization.n_steps if is_own else int(self.learn.finished('st'))

    @property
    def should_stop(self) -> bool:
        return self.learn.run.stopping

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.learn.stop()

    @property
    def num_training_batches(self) -> float:
        return self._length(self.learn.dls.train)

    @property
    def num_val_batches(self) -> list[float]:
        return [self._length(dl) for _, dl in evaluation_loaders(self.learn.dls)]

    @property
    def num_predict_batches(self) -> list[float]:
        return [math.inf if self.learn.n_iter is None else self.learn.n_iter]

    def _length(self, dl: Any) -> float:
        n = find_length(self.learn, dl)
        return math.inf if n is None else n

    @property
    def estimated_stepping_batches(self) -> float:
        "Number of optimizer steps of the fit."
        limit = math.inf if self.max_steps == -1 else self.max_steps
        if self.max_epochs == -1 or self.num_training_batches == math.inf:
            return limit
        n_steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches)
        return min(limit, n_steps * self.max_epochs)

    @property
    def state(self) -> SimpleNamespace:
        "Function and stage: 'fit', 'validate', 'test', 'predict', and 'train' as a stage; None outside of a run."
        learn = self.learn
        if learn.phase == 'predict':
            return SimpleNamespace(fn='predict', stage='predict')
        stage = {'validation': 'validate', 'test': 'test'}.get(self.host.stage)
        if learn.fitting:
            return SimpleNamespace(fn='fit', stage=stage or 'train')
        return SimpleNamespace(fn=stage, stage=stage)

    @property
    def training(self) -> bool:
        return self.state.stage == 'train'

    @property
    def validating(self) -> bool:
        return self.state.stage == 'validate'

    @property
    def testing(self) -> bool:
        return self.state.stage == 'test'

    @property
    def predicting(self) -> bool:
        return self.state.stage == 'predict'

    @property
    def evaluating(self) -> bool:
        return self.validating or self.testing

    @property
    def enable_validation(self) -> bool:
        return bool(self.num_val_batches)

    @property
    def check_val_every_n_epoch(self) -> int | None:
        every = self.learn.eval_every
        return int(every.value) if every is not None and every.unit == 'ep' else None

    @property
    def val_check_interval(self) -> float:
        return 0.5 if self.check_val_every_n_epoch is None else 1.0

    # -- parts -----------------------------------------------------------------------------------

    @property
    def default_root_dir(self) -> str:
        return str(self.learn.path)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        opt = self.learn.opt
        return [] if opt is None else list(opt.optimizers.values())

    @property
    def val_dataloaders(self) -> Any:
        loaders = [dl for _, dl in evaluation_loaders(self.learn.dls)]
        return loaders[0] if len(loaders) == 1 else loaders

    @property
    def callbacks(self) -> list[Any]:
        return self.host.list_callbacks()

    def _list_kind(self, name: str) -> list[Any]:
        "Return the callbacks with a class of Lightning of this name."
        return [cb for cb in self.callbacks if self.host.is_kind(cb, name)]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        return self._list_kind('Checkpoint')

    @property
    def checkpoint_callback(self) -> Any:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        return self._list_kind('EarlyStopping')

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        return next(iter(self._list_kind('ProgressBar')), None)

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_global_zero:
            print(*args, **kwargs)

    # -- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        "Write a file that `load_from_checkpoint` reads. To resume, `Checkpoint` writes files of its own."
        if self.is_global_zero:
            Path(filepath).parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.dump_checkpoint(weights_only), filepath)
        self.strategy.barrier()

    def dump_checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        "Return the contents of a checkpoint of Lightning."
        module: Any = self.model
        checkpoint: dict[str, Any] = {
            'epoch': self.current_epoch,
            'global_step': self.global_step,
            'pytorch-lightning_version': '2.6.0',  # the format
            'state_dict': module.state_dict(),
            'loops': {},
        }
        if not weights_only:
            states = {cb: cb.state_dict() for cb in self.callbacks if hasattr(cb, 'state_dict')}
            named = {getattr(cb, 'state_key', type(cb).__name__): sd for cb, sd in states.items()}
            checkpoint['callbacks'] = {key: sd for key, sd in named.items() if sd}
            checkpoint['optimizer_states'] = [opt.state_dict() for opt in self.optimizers]
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            checkpoint['lr_schedulers'] = [scheduler.state_dict() for scheduler in schedulers]
        if getattr(module, 'hparams', None):
            checkpoint['hparams_name'] = getattr(module, '_hparams_name', None)
            checkpoint['hyper_parameters'] = dict(module.hparams)
        self.host.fire('on_save_checkpoint', checkpoint)
        return checkpoint


def plain_attributes(module: Any) -> dict[str, Any]:
    "Return the public attributes of a module that are plain data, encoded."
    own = {k: v for k, v in vars(module).items() if not k.startswith('_') and k != 'training'}
    return keep_plain(own)


def list_saved(module: Any) -> list[str]:
    "Return the names of the attributes that `module_state` holds."
    metrics = list_parts(module).items()
    return [
        *(f'model.{name}' for name in plain_attributes(module)),
        *(f'model.{path}.{name}' for path, metric in metrics for name in vars(metric)),
    ]


def module_state(host: LightningHost) -> dict[str, Any]:
    "Return the state of a module that is not weights: metrics, plain public attributes, what its hook adds."
    module = host.module
    checkpoint: dict[str, Any] = {'state_dict': module.state_dict()}
    save = host.find_own('on_save_checkpoint')
    if save is not None:
        save(checkpoint)
    del checkpoint['state_dict']
    return {
        'checkpoint': encode(checkpoint),
        'attributes': plain_attributes(module),
        'torchmetrics': collect_torchmetrics(module),
    }


def load_module_state(host: LightningHost, sd: Mapping[str, Any]) -> None:
    "Restore the state that `module_state` returned."
    module = host.module
    load = host.find_own('on_load_checkpoint')
    if load is not None:
        load({'state_dict': module.state_dict(), **decode(sd['checkpoint'], host)})
    vars(module).update(decode(sd['attributes'], host))
    for path, metric in list_parts(module).items():
        if path in sd['torchmetrics']:
            state = sd['torchmetrics'][path]
            set_states(metric, decode(encode(state['states']), host), state['n_updates'])
