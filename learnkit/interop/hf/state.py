# SPDX-License-Identifier: Apache-2.0
"""Objects that callbacks of Hugging Face's Trainer read: `args`, `state` and `control` of a Learner."""

from __future__ import annotations

import sys
from math import ceil
from typing import TYPE_CHECKING, Any

from learnkit.core.errors import CallbackError
from learnkit.core.validation import warn_user
from learnkit.data.dataloaders import batch_size_of, evaluation_loaders
from learnkit.engine.budget import find_budget
from learnkit.engine.lengths import epoch_length
from learnkit.interop.common.hooks import StandIn, batches_per_step

if TYPE_CHECKING:
    from learnkit.learner import Learner

STEP_KINDS = ('logging', 'eval', 'save')  # what `args` counts in steps
CONTROLS = ('training_stop', 'epoch_stop', 'save', 'evaluate', 'log')


def make(cls: str, **fields: Any) -> Any:
    "Return an object of transformers if it is imported, or else one with these fields."
    transformers = sys.modules.get('transformers')
    if transformers is None:
        return StandIn(cls, 'Import transformers before `from_hf` for its own object.', **fields)
    return getattr(transformers, cls)(**fields)


def make_control() -> Any:
    "Return a `TrainerControl` that asks for nothing."
    return make('TrainerControl', **{f'should_{name}': False for name in CONTROLS})


def make_state(args: Any, learn: Learner) -> Any:
    "Return the `TrainerState` at the start of a fit."
    n = count_steps(learn, args.gradient_accumulation_steps)
    state = make(
        'TrainerState',
        epoch=0.0,
        global_step=0,
        max_steps=n,
        num_train_epochs=learn.n_epoch or sys.maxsize,
        train_batch_size=args.per_device_train_batch_size,
        log_history=[],
        best_metric=None,
        best_global_step=None,
        best_model_checkpoint=None,
        is_local_process_zero=learn.world.is_first,
        is_world_process_zero=learn.world.is_first,
    )
    for kind in STEP_KINDS:
        every = getattr(args, f'{kind}_steps')
        setattr(state, f'{kind}_steps', ceil(n * every) if every and every < 1 else every)
    return state


def count_steps(
    learn: Learner,
    n_window: int,  # batches of a step
) -> int:
    "Return the number of steps of a fit, or `sys.maxsize` if it is unknown."
    budget = find_budget(learn)
    if budget is not None:
        per_step = {'st': 1, 'ba': n_window}.get(budget.total.unit)
        return ceil(budget.total.value / per_step) if per_step else sys.maxsize
    n, _ = epoch_length(learn, learn.dls.train)
    return ceil(n / n_window) * learn.n_epoch if n and learn.n_epoch else sys.maxsize


def find_arguments(
    learn: Learner,
    args: list[Any],  # of each callback, `TrainingArguments` or None
) -> Any:
    "Return the first `args` that is given, or make them from the Learner."
    given = [one for one in args if one is not None]
    n_window = batches_per_step(learn, batch_size_of(learn.dls.train)) or 1
    if not given:
        return make_arguments(learn, n_window)
    n_given = given[0].gradient_accumulation_steps
    if n_given != n_window:
        raise CallbackError(
            f'args.gradient_accumulation_steps={n_given}, and the Learner steps every {n_window} '
            f'batches: add `GradientAccumulation(batches={n_given})`.'
        )
    if given[0].load_best_model_at_end:
        warn_user('args.load_best_model_at_end: a Learner does it by `SaveModelCallback`; add one.')
    return given[0]


def make_arguments(learn: Learner, n_window: int) -> Any:
    "Return the `TrainingArguments` that correspond to a Learner."
    return make(
        'TrainingArguments',
        output_dir=str(learn.path),
        num_train_epochs=learn.n_epoch or 1,
        per_device_train_batch_size=batch_size_of(learn.dls.train) or 1,
        gradient_accumulation_steps=n_window,
        learning_rate=learn.opt.param_groups[0]['lr'] if learn.opt else 0.0,
        eval_strategy='epoch' if evaluation_loaders(learn.dls) else 'no',
        logging_strategy='epoch',
        logging_first_step=False,
        save_strategy='no',
        metric_for_best_model='eval_loss' if learn.loss_func else None,
        greater_is_better=False,
        report_to='none',
        **{f'{kind}_steps': 500 for kind in STEP_KINDS},  # transformers' default
    )
