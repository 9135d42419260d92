"""Callbacks of Hugging Face's Trainer in a Learner; `tests/peers/hf_bench.py` compares with the real Trainer."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import Callback, Checkpoint, GradientAccumulation, Learner
from learnkit.checkpoint.digest import learn_digest
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


def test_callbacks_share_state_and_control() -> None:
    calls: list[Any] = []

    def ask(args: Any, state: Any, control: Any, kwargs: Any) -> None:
        state.note = 'seen'
        control.should_evaluate = state.global_step == 3

    def note(args: Any, state: Any, control: Any, kwargs: Any) -> None:
        calls.append((state.note, state.global_step, kwargs['metrics']['eval_loss']))

    learn = learner(
        from_hf(Look('on_step_end', ask)), from_hf(Look('on_evaluate', note)), n_valid=1
    )
    learn.fit(1)
    assert [call[:2] for call in calls] == [('seen', 3), ('seen', 4)]
    calls.clear()
    (loss,) = learn.validate()  # outside of a fit
    assert calls == [('seen', 4, loss)]


def test_arguments_that_the_learner_contradicts(tmp_path: Path) -> None:
    options = {'eval_strategy': 'epoch', 'metric_for_best_model': 'f1', 'use_cpu': True}
    args = transformers.TrainingArguments(tmp_path, gradient_accumulation_steps=2, **options)
    learn = learner(from_hf(transformers.EarlyStoppingCallback(), args))
    with pytest.raises(CallbackError, match=r'GradientAccumulation\(batches=2\)'):
        learn.fit(1)
    assert learn.time.ba == 0
    args.gradient_accumulation_steps = 1
    with pytest.raises(CallbackError, match=r'eval_f1.*measured eval_loss'):
        learn.fit(1)
    args.metric_for_best_model = 'loss'
    args.load_best_model_at_end = True
    with pytest.warns(UserWarning, match='SaveModelCallback'):
        learn.fit(1)


def test_length_of_a_fit_in_batches() -> None:
    seen = []

    def look(args: Any, state: Any, control: Any, kwargs: Any) -> None:
        seen.append(state.max_steps)

    cbs = [from_hf(Look('on_train_begin', look)), GradientAccumulation(batches=2)]
    learner(*cbs).fit('6ba')
    learner(*cbs).fit('5st')
    learner(*cbs).fit('1h', cbs=Callback(after_batch=lambda cb: cb.learn.stop()))
    assert seen == [3, 5, sys.maxsize]


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, 'transformers')

    class Stop:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3
            with pytest.raises(
                AttributeError, match=r'TrainerState\.trial_name.*Import transformers'
            ):
                print(state.trial_name)

    learn = learner(from_hf(Stop()))
    learn.fit(2)
    assert learn.time.ba == 3


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(CallbackError, match='method such as on_init_end'):
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
    return learn_digest(learn), learn.trainer_run.state.best_metric, learn.time.ba


def test_a_killed_run_stops_at_the_same_step(tmp_path: Path) -> None:
    expected = train(tmp_path / 'whole')
    job = partial(train, tmp_path / 'killed')
    lives = run_until_done(job, kill=[('train after_batch', 3)] * 3)
    assert lives.kills == 3 and lives.result == expected
    assert 8 < expected[2] < 32
