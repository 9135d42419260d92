"""Callbacks of Hugging Face's Trainer in a Learner; `tests/peers/hf_bench.py` compares with the real Trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import Callback, Checkpoint, GradientAccumulation, Learner
from learnkit.checkpoint.compare import learn_digest
from learnkit.core.errors import CallbackError
from learnkit.interop import from_hf
from learnkit.testing import synth_learner
from tests.faults.run_helpers import Reach, quiet
from tests.helpers.harness import run_until_done

transformers = pytest.importorskip('transformers')


def learner(*cbs: Any, **options: Any) -> Learner:
    return quiet(synth_learner(n_train=4, cbs=[*cbs], **options))


class Look(transformers.TrainerCallback):
    def __init__(self, on: str, f: Any) -> None:
        self.f = f
        setattr(self, on, self.call)

    def call(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self.f(args, state, control, kwargs)


def test_order_of_the_methods() -> None:
    calls: list[Any] = []
    hooks = (
        'on_init_end on_train_begin on_epoch_begin on_step_begin on_substep_end on_pre_optimizer_step '
        'on_optimizer_step on_step_end on_epoch_end on_log on_prediction_step on_evaluate on_train_end'
    ).split()
    All = type('All', (), {h: lambda self, *given, h=h, **more: calls.append(h) for h in hooks})
    learner(from_hf(All()), GradientAccumulation(batches=2)).fit(1)
    step = ['on_step_begin', 'on_substep_end', *hooks[5:8]]
    assert calls[:3] == hooks[:3] and calls[3:13] == 2 * step
    evaluated = ['on_prediction_step'] * calls.count('on_prediction_step')
    end = ['on_epoch_end', 'on_log', *evaluated, 'on_log', 'on_evaluate', 'on_log', 'on_train_end']
    assert calls[13:] == end


def test_what_a_callback_reads() -> None:
    seen: list[Any] = []

    def look(args: Any, state: Any, control: Any, kwargs: Any) -> None:
        assert kwargs['model'] is learn.model and kwargs['optimizer'] is learn.opt.optimizers['']
        assert kwargs['lr_scheduler'].get_last_lr() == [args.learning_rate]
        with pytest.raises(AttributeError, match='ParamScheduler'):
            kwargs['lr_scheduler'].step()
        seen.append((state.max_steps, state.num_train_epochs, args.per_device_train_batch_size))

    learn = learner(from_hf(Look('on_step_end', look)), lr=0.1)
    learn.fit(2)
    assert seen == [(8, 2, learn.dls.train.bs)] * 8


def test_control_that_is_set_or_returned() -> None:
    def stop(args: Any, state: Any, control: Any, kwargs: Any) -> Any:
        return transformers.TrainerControl(should_training_stop=state.global_step == 6)

    learn = learner(from_hf(Look('on_step_end', stop)))
    learn.fit(3)
    assert learn.time.ba == 6 and len(learn.history) == 2

    def save(args: Any, state: Any, control: Any, kwargs: Any) -> None:
        control.should_save = True

    with pytest.raises(CallbackError, match='Checkpoint'):
        learner(from_hf(Look('on_step_end', save))).fit(1)


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(CallbackError, match='all hooks on_init_end'):
        from_hf(object())
    with pytest.raises(CallbackError, match=r'write from_hf\(PrinterCallback\('):
        from_hf(transformers.PrinterCallback)
    with pytest.raises(CallbackError, match='needs no from_hf'):
        from_hf(Callback(before_fit=print))


def train(folder: Path) -> Any:
    torch.manual_seed(0)
    stopper = transformers.EarlyStoppingCallback(2, 1.0)
    learn = learner(from_hf(stopper), Checkpoint('1ba', folder), path=folder)
    learn.add_cb(Reach())
    learn.fit(8, resume=True)
    learn.remove_cb(Reach)
    state = learn.cbs.filter(lambda cb: cb.name.startswith('hf_'))[0].state
    losses = [row for row in state.log_history if 'train_runtime' not in row]
    return learn_digest(learn), losses, state.best_metric, learn.time.ba


def test_a_killed_run_stops_at_the_same_step(tmp_path: Path) -> None:
    expected = train(tmp_path / 'whole')
    job = partial(train, tmp_path / 'killed')
    lives = run_until_done(job, kill=[('train after_batch', 7)])
    assert lives.kills == 1 and lives.result[1:] == expected[1:]
    assert 8 < expected[3] < 32
