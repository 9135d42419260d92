# SPDX-License-Identifier: Apache-2.0
"""Hooks of Lightning's callbacks and of a LightningModule, called at the events of a Learner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.training import clip_norm, clip_values
from learnkit.core.batch import map_tensors
from learnkit.core.errors import CancelEpochException, OptionError
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.loader_state import capture_loader_state, restore_loader_state
from learnkit.engine.callback_state import decode, encode
from learnkit.engine.train_eval import keep_modes, restore_modes
from learnkit.inference.validate import open_evaluation, run_in_fit_and_epoch
from learnkit.interop.common.hooks import (
    keep_plain,
    send_to_loggers,
)
from learnkit.interop.lightning.files import (
    list_saved,
    load_module_state,
    load_optimizers,
    module_state,
)
from learnkit.interop.lightning.flow import checking_sanity
from learnkit.interop.lightning.host import LightningHost
from learnkit.interop.lightning.log import EPOCH_HOOKS, STEP_HOOKS, LoggedValues
from learnkit.interop.lightning.loggers import log_hyperparams
from learnkit.interop.lightning.optim import Optimization
from learnkit.interop.lightning.options import check_alone
from learnkit.interop.lightning.trainer import Trainer

HOOKS = (
    *(name for name in sorted(STEP_HOOKS | EPOCH_HOOKS) if name.startswith('on_')),
    *'setup teardown on_fit_start on_fit_end on_train_end on_validation_end on_test_end'.split(),
    *'on_predict_start on_predict_epoch_start on_predict_batch_start on_predict_batch_end'.split(),
    *'on_predict_epoch_end on_predict_end on_exception on_save_checkpoint on_load_checkpoint'.split(),
    *'on_sanity_check_start on_sanity_check_end'.split(),
)
# hooks of callbacks at the events of a batch
BATCH_HOOKS = {
    'before_batch': ('on_train_batch_start', 'on_validation_batch_start', 'on_predict_batch_start'),
    'before_backward': ('on_before_zero_grad', 'on_before_backward'),
    'after_backward': ('on_after_backward',),
    'before_step': ('on_before_optimizer_step',),
    'after_batch': ('on_train_batch_end', 'on_validation_batch_end', 'on_predict_batch_end'),
}
# callbacks that need parts of Lightning's own Trainer, and what does the same in a Learner
REPLACED = {
    'BasePredictionWriter': '`learn.get_preds(sink=folder)`',
    'BatchSizeFinder': '`learn.find_batch_size()`',
    'LearningRateFinder': '`learn.lr_find()`',
    'ThroughputMonitor': 'the callback `SpeedMonitor`',
}
CLIP_NORM = partial(clip_norm, norm_type=2.0)
OPTIMIZATION_METHODS = ('optimizers', 'lr_schedulers', 'manual_backward', 'clip_gradients')


class LightningRun(LightningHost):
    """Call the hooks of a Learner's Lightning callbacks, and of its LightningModule, at the Learner's events.

    Checkpointed: schedules, logged values, and the state of the module that is not weights.
    """

    order = 60
    runs_first = ('after_epoch',)  # what is logged there belongs to the epoch's row

    def __init__(
        self,
        module: Any = None,  # LightningModule; None: the hooks are of callbacks alone
        trainer: Trainer | None = None,  # None: one that the Learner has made
        **options: Any,  # of the trainer
    ) -> None:
        super().__init__(module)
        # hooks before the optimizers that were called already: 'all', 'module' or none
        self.set_up_by = ''
        self._compiled_clip: Any = None  # function that clips the gradients in a compiled step
        self.predictions: list[Any] | None = None  # of the running prediction
        self.trainer = Trainer.of_learner(self, **options) if trainer is None else trainer
        self.logged = LoggedValues(self)
        self.optimization = Optimization(self)
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

    def bind_events(self) -> None:
        "Handle the events of a batch for which there are hooks."
        self.forget_hooks()
        for event, names in BATCH_HOOKS.items():
            is_needed = self.module is not None or any(self.find_hooks(name)[0] for name in names)
            if is_needed and event not in vars(self):
                setattr(self, event, getattr(self, f'_{event}'))
        if self.module is not None:
            self.compiled_step = self._compiled_step

    # -- events of batches, bound by `bind_events` -------------------------------------------------

    def _compiled_step(self) -> dict[str, Any]:
        "Return the clipping of a compiled step, and what it does with the values that `training_step` logs."
        functions: dict[str, Any] = {
            'state': self._read_step_state,
            'after_loss': self.logged.take_collected,
            'finish': self._end_passes,
        }
        clip = self._compiled_clip = self._find_clip()
        return functions | ({} if clip is None else {'before_step': clip})

    def _find_clip(self) -> Any:
        "Return the function that clips the gradients in a compiled step, or None."
        trainer = self.trainer
        if not trainer.gradient_clip_val:
            return None
        kind = trainer.gradient_clip_algorithm
        return clip_values if getattr(kind, 'value', kind) == 'value' else CLIP_NORM

    def _read_step_state(self) -> dict[str, Any] | None:
        "Return the limit of the gradients; None if the backward pass is left out, or the clipping has changed."
        trainer = self.trainer
        if trainer.fit_loop._skip_backward or self._find_clip() is not self._compiled_clip:
            return None
        limit = float(trainer.gradient_clip_val or 0)
        return {'max_norm': limit, 'max_value': limit} if limit else {}

    def _end_passes(self, found: dict[str, Any]) -> None:
        self.logged.log_collected(found['logged'])
        self.optimization.end_compiled_passes()

    def _batch_stage(self) -> str:
        learn = self.learn
        return 'predict' if learn.phase == 'predict' else 'train' if learn.training else self.stage

    def _before_batch(self) -> None:
        if self.module is None:
            self.forget_batch()
        if self.learn.training:
            self.count_stepped()
            self.n_begun += 1
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
        self._log_batch(is_step)
        if is_step and not is_last:
            optimization.step_schedulers('step', True)
        self.forget_batch()

    def _log_batch(self, is_step: bool) -> None:
        "Log the values of the batch, and end the fit after it if it is to end."
        learn, steps = self.learn, self.logged.steps
        if learn.training:
            self._has_stepped = is_step
            steps.log_batch()
            self.trainer.stop_if_due()
        elif self.predictions is not None:
            self.predictions.append(move_to_host(self.optimization.output))
        elif self.stage and not self.trainer.sanity_checking:
            steps.log_evaluation_batch()

    # -- events of a fit -------------------------------------------------------------------------

    def set_up(self) -> None:
        "Call the hooks that come before the optimizers of a fit are made."
        self.forget_hooks()
        self.attach()
        done, self.set_up_by = self.set_up_by, ''
        if done == 'all':
            return
        fire = self.fire_callbacks if done == 'module' else self.fire
        fire('setup', 'fit')
        self.fire_own('configure_model', bool)

    def set_up_module(self) -> None:
        "Call the module's `setup` before its loaders are asked for."
        self.fire_own('setup', bool, 'fit')
        self.set_up_by = 'module'

    def begin(self, fn: str) -> None:
        "Call the hooks of the Trainer's run that come before its loaders are asked for."
        self.forget_hooks()
        self.trainer.open_loggers()
        self.fire('setup', fn)
        self.fire_own('configure_model', bool)
        dtype = self.trainer.precision_option.dtype
        if dtype is not None:
            self.module.to(dtype)
        self.set_up_by = 'all'

    def end(self, fn: str) -> None:
        "Call the hooks at the end of the Trainer's run."
        self.trainer.tear_down(fn)
        self.fire('teardown', fn)
        self.trainer.close('success')

    def before_fit(self) -> None:
        learn = self.learn
        if learn.run.depth == 1:
            self.logged.forget()
        if not learn.fitting:
            return
        trainer = self.trainer
        if not trainer.is_independent:
            check_alone(learn.world.size)
        self.is_over = False
        learn.epoch = trainer.first_epoch
        has_length = trainer.num_training_batches != math.inf or not trainer.is_independent
        if trainer.accumulate_grad_batches > 1 and not has_length:
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
        self.fire('on_fit_start')
        if not trainer.is_independent:
            self._begin_flow()
        if not trainer.is_trained:
            self.fire('on_train_start')
        # Lightning leaves the mode of each module as it is
        keep_modes(learn)

    def _begin_flow(self) -> None:
        "Do what Lightning's Trainer does between the hooks `on_fit_start` and `on_train_start`."
        trainer, learn = self.trainer, self.learn
        if trainer.enable_autolog_hparams:
            log_hyperparams(self)
        checkpoint = trainer.take_checkpoint()
        if checkpoint is not None:
            load_optimizers(trainer, checkpoint)
        if learn.run.resuming is not None:
            return
        is_continued = trainer.first_epoch > 0 and checkpoint is None
        begin = partial(self.positions.begin_training, learn, twice=is_continued)
        check = self.check_sanity if trainer.num_sanity_val_steps else bool
        # to estimate the steps, Lightning begins the pass over the training loader
        for call in (begin, check) if self.has_estimated else (check, begin):
            call()

    def check_sanity(self) -> None:
        "Evaluate some batches before the fit."
        if not self.trainer.enable_validation:
            return
        self.logged.forget()
        with checking_sanity(self.learn, self):
            self.fire('on_sanity_check_start')
            self.learn.do_evaluation()
            self.fire('on_sanity_check_end')
        self.logged.forget()

    def before_epoch(self) -> None:
        if self.learn.fitting:
            self.trainer.reload_loaders()

    def before_train(self) -> None:
        self.is_in_epoch = True
        if not self.learn.resumed:  # a resumed epoch began before its checkpoint
            self.fire('on_train_epoch_start')

    def after_train(self) -> None:
        if self.learn.n_iter is None and self.trainer.is_independent:
            self.optimization.step_schedulers('epoch', False)

    def after_epoch(self) -> None:
        if not self.learn.fitting:
            return
        if self.module is None:
            self.logged.note_metrics()
        self.is_in_epoch = False
        self.count_stepped()
        self.logged.publish(training=True)
        self.fire('on_train_epoch_end')
        if self.is_last_batch:  # those of other batches had their step
            self.optimization.step_schedulers('step', True)
        self.optimization.step_schedulers('epoch', True)
        self.logged.steps.log_epoch(training=True)
        self.logged.reset(training=True)
        self.trainer.stop_if_due()

    def after_fit(self) -> None:
        if self.learn.fitting:
            self.is_over = not self.trainer.is_trained
            if self.is_over:
                self.fire('on_train_end')
            self.fire('on_fit_end')
            self.end('fit')

    # -- events of evaluations -------------------------------------------------------------------

    def before_validate(self) -> None:
        learn = self.learn
        if self.stage or learn.phase == 'predict':
            return
        self.stage = stage = self._find_stage()
        if self.loaders is None and not learn.fitting:
            self.fire('setup', self.trainer.state.fn)
        if not self.trainer.is_independent:
            self.positions.begin_evaluation(learn)
        is_within = learn.fitting and not self.trainer.sanity_checking
        if is_within and self.module is not None and not self.optimization.accumulates():
            self.fire_own('on_validation_model_zero_grad', self.module.zero_grad)
        self.fire_own(f'on_{stage}_model_eval', bool)
        self.fire_all(f'on_{stage}_start on_{stage}_epoch_start')

    def _find_stage(self) -> str:
        "Return 'test' for the loaders of `Trainer.test`, and for others of a module with `test_step`."
        learn = self.learn
        if self.loaders is not None:
            return 'test' if self.trainer.fn == 'test' else 'validation'
        is_known = any(dl is learn.dl for _, dl in evaluation_loaders(learn.dls))
        is_test = not (learn.fitting or is_known) and self.find_own('test_step') is not None
        return 'test' if is_test else 'validation'

    @torch.no_grad()
    def after_eval(self) -> None:
        stage = self.stage
        if not stage:
            return
        if self.module is None:
            self.logged.note_metrics()
        self.logged.results = {}
        self.logged.publish(training=False)
        self.has_evaluated = not self.trainer.sanity_checking
        self.fire(f'on_{stage}_epoch_end')
        self.logged.steps.log_epoch(training=False)
        self.fire(f'on_{stage}_end')
        self.logged.reset(training=False)
        self.fire_own(f'on_{stage}_model_train', partial(restore_modes, self.learn))
        if self.loaders is None and not self.learn.fitting:
            self.fire('teardown', self.trainer.state.fn)
        self.stage = ''

    def before_predict(self) -> None:
        if self.loaders is None:
            self.fire('setup', 'predict')
        self.fire_all('on_predict_start on_predict_epoch_start')

    def after_predict(self) -> None:
        self.fire_all('on_predict_epoch_end on_predict_end')
        if self.loaders is None:
            self.fire('teardown', 'predict')

    @contextmanager
    def _running_loaders(self, kind: str, named: Mapping[str, Any]) -> Iterator[None]:
        "Run loaders that the Learner does not have within a context, as a run of one kind."
        learn = self.learn
        self.loaders = list(named.items())
        try:
            with open_evaluation(learn, kind):
                if self.trainer.enable_autolog_hparams:
                    log_hyperparams(self)
                yield
        finally:
            self.loaders = None

    def evaluate(self, named: Mapping[str, Any]) -> None:
        "Evaluate loaders with their names."
        with self._running_loaders('evaluation', named):
            body = partial(self.learn.do_evaluation, self.loaders)
            run_in_fit_and_epoch(self.learn, body)

    def predict(self, named: Mapping[str, Any], keeps: bool) -> list[list[Any]]:
        "Return the predictions of each loader by batch; without `keeps`, only call the hooks."
        learn = self.learn
        found: list[list[Any]] = [[] for _ in named]

        def body() -> None:
            learn('before_predict')
            for i, (learn.dl_name, dl) in enumerate(named.items()):
                self.predictions = found[i] if keeps else []
                learn._do_epoch_validate(dl=dl)
            learn('after_predict')

        with self._running_loaders('prediction', named):
            learn.phase = 'predict'
            run_in_fit_and_epoch(learn, body)
        self.predictions = None
        return found

    def after_error(self) -> None:
        self.fire('on_exception', self.learn.error)

    def cleanup(self) -> None:
        self.stage = ''
        self.predictions = None
        self.optimization.output = None
        self.forget_batch()
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
            'batches': (self.n_begun, self._n_stepped, self._has_stepped),
            'loaders': {} if self.trainer.is_independent else capture_loaders(self.learn),
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
        self.n_begun, self._n_stepped, self._has_stepped = sd['batches']
        for name, dl in evaluation_loaders(self.learn.dls):
            if name in sd['loaders']:
                restore_loader_state(dl, decode(sd['loaders'][name], self))
        for config, state in zip(self.optimization.configs, sd['schedulers'], strict=False):
            scheduler = config.scheduler
            scheduler.load_state_dict(scheduler.state_dict() | decode(state, self))
        self.logged.load_state_dict(sd['logged'], self)
        if self.module is not None:
            load_module_state(self, sd['module'])


def capture_loaders(learn: Any) -> dict[str, Any]:
    "Return the states of the validation loaders, from which evaluations and trainings draw alike."
    loaders = evaluation_loaders(learn.dls)
    return {name: encode(capture_loader_state(dl)) for name, dl in loaders}


def move_to_host(output: Any) -> Any:
    "Return the result of `predict_step` on the CPU."
    return map_tensors(output, lambda t: t.cpu())
