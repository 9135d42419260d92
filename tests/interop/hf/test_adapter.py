"""Callbacks of Hugging Face's Trainer in a Learner; `tests/peers/hf_bench.py` compares with the real Trainer."""

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import Callback, Checkpoint, DataLoaders, GradientAccumulation, Learner
from learnkit.checkpoint.compare import learn_digest
from learnkit.core.errors import CallbackError
from learnkit.data.evaluator import Evaluator
from learnkit.interop import from_hf
from learnkit.metrics import ValueMetric
from learnkit.testing import synth_dls, synth_learner
from tests.faults.run_helpers import Reach, quiet
from tests.helpers.harness import run_until_done
from tests.helpers.learners import quiet_synth_learner

transformers = pytest.importorskip('transformers')


learner = partial(quiet_synth_learner, n_train=4, has_bar=False)


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


def hf_arguments(path: Path, **options: Any) -> Any:
    return transformers.TrainingArguments(path, use_cpu=True, report_to='none', **options)


def log_losses(args: Any, values: list[float], *cbs: Any) -> list[Any]:
    "Return the losses that a fit with these losses of its batches logs, the mean of all last."
    logs: list[Any] = []
    note = Look('on_log', lambda args, state, control, kwargs: logs.append(kwargs['logs']))
    y = torch.tensor(values)[:, None]
    dls = DataLoaders.from_tensors((torch.ones_like(y), y), bs=1, shuffle=False)
    options = {'loss_func': lambda pred, targ: targ.mean() + 0 * pred.sum()}
    learn = synth_learner(dls=dls, cbs=[from_hf(note, args), *cbs], **options)
    quiet(learn).fit(1)
    return [log[name] for log in logs for name in ('loss', 'train_loss') if name in log]


@pytest.mark.filterwarnings('ignore:train_loss is')
@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_a_loss_that_is_not_finite_counts_as_the_mean_since_the_last_log(
    bad: float, tmp_path: Path
) -> None:
    # the numbers are transformers.Trainer's: 4 + 4/2, 8 + 2, 0 + 6; then 4 + 4/2 + 8, 2 + 2/2 + 6
    values = [4.0, bad, 8.0, 2.0, bad, 6.0]
    args = partial(hf_arguments, tmp_path, logging_strategy='steps')
    assert log_losses(args(logging_steps=2), values) == pytest.approx([3, 5, 3, 22 / 6])
    assert log_losses(args(logging_steps=3), values) == pytest.approx([14 / 3, 3, 23 / 6])
    unfiltered = args(logging_steps=3, logging_nan_inf_filter=False)
    found = log_losses(unfiltered, [1.0, 2.0, 3.0, bad, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert found == pytest.approx([2.0, bad, math.nan, math.nan], nan_ok=True)
    accumulate = GradientAccumulation(batches=2)
    halves = args(logging_steps=1, gradient_accumulation_steps=2)
    assert log_losses(halves, values, accumulate) == pytest.approx([4, 5, 3, 4])


def test_numbers_in_the_logs_equal_a_loop_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    learn = learner(lr=0.1, opt_func=torch.optim.SGD, loss_func=torch.nn.functional.mse_loss)
    learn.dls.train.shuffle = False
    logs: list[Any] = []
    note = Look('on_log', lambda args, state, control, kwargs: logs.append(kwargs['logs']))
    learn.add_cb(from_hf(note, hf_arguments(tmp_path, logging_strategy='steps', logging_steps=2)))
    a, b = (p.item() for p in learn.model.parameters())
    losses, norms = [], []
    for x, y in learn.dls.train:
        error = a * x + b - y
        losses.append(error.square().mean().item())
        grads = [(2 * error * x).mean().item(), (2 * error).mean().item()]
        norms.append(math.hypot(*grads))
        a, b = a - 0.1 * grads[0], b - 0.1 * grads[1]
    learn.fit(1)
    valid = [(a * x + b - y).square().mean().item() for x, y in learn.dls.valid]
    trained = [[log[k] for k in ('loss', 'grad_norm', 'learning_rate')] for log in logs[:2]]
    expected = [[(losses[i] + losses[i + 1]) / 2, norms[i + 1], 0.1] for i in (0, 2)]
    assert trained == [pytest.approx(row, rel=1e-5) for row in expected]
    assert logs[2]['eval_loss'] == pytest.approx(sum(valid) / len(valid), rel=1e-5)
    assert logs[3]['train_loss'] == pytest.approx(sum(losses) / 4, rel=1e-5)


def test_saves_within_an_epoch(tmp_path: Path) -> None:
    saved: list[int] = []

    def save(args: Any, state: Any, control: Any, kwargs: Any) -> None:
        control.should_save = state.global_step % 2 == 0

    note = Look('on_save', lambda args, state, control, kwargs: saved.append(state.global_step))
    learn = synth_learner(n_train=6, cbs=[from_hf(Look('on_step_end', save)), from_hf(note)])
    quiet(learn).fit(1, cbs=Checkpoint(None, tmp_path, keep_last=None))
    assert saved == [2, 4, 6]
    batches = {int(path.stem.rpartition('ba')[2]) for path in tmp_path.glob('*.ckpt')}
    assert batches == {2, 4, 6}


NAN = math.nan


@pytest.mark.parametrize('sign', [1.0, -1.0])
@pytest.mark.parametrize(
    ('values', 'patience', 'epochs', 'best'),
    # epochs and best metric of transformers.Trainer, with an evaluation an epoch
    [
        ([NAN, 5.0, 4.0, 3.0, 2.0, 1.0], 1, 6, 1.0),
        ([NAN, NAN, 4.0, 3.0, 3.0, 3.0], 1, 2, math.inf),
        ([NAN, NAN, 4.0, 3.0, 3.0, 3.0], 2, 6, 3.0),
        ([5.0, NAN, 4.0, NAN, NAN], 2, 5, 4.0),
        ([5.0, NAN, NAN, NAN], 2, 3, 5.0),
        ([NAN] * 5, 3, 4, math.inf),
    ],
)
def test_the_best_metric_is_the_trainers(
    values: list[float], patience: int, epochs: int, best: float, sign: float, tmp_path: Path
) -> None:
    options = {'eval_strategy': 'epoch', 'metric_for_best_model': 'score'}
    args = hf_arguments(tmp_path, greater_is_better=sign < 0, **options)
    at: dict[str, Learner] = {}
    score = ValueMetric(lambda: sign * values[at['learn'].epoch], 'score')
    stopper = transformers.EarlyStoppingCallback(patience)
    at['learn'] = learn = learner(from_hf(stopper, args), metrics=score)
    learn.fit(len(values))
    assert len(learn.history) == epochs and learn.trainer_run.state.best_metric == sign * best


def test_an_evaluation_of_another_loader_is_no_evaluation_of_the_best_metric() -> None:
    parts = synth_dls(n_train=2)
    dls = DataLoaders(parts.train, {'valid': parts.valid, 'night': Evaluator(parts.valid, '1ep')})
    best: list[Any] = []
    note = Look('on_epoch_begin', lambda args, state, *others: best.append(state.best_metric))
    cbs = [from_hf(transformers.EarlyStoppingCallback(1)), from_hf(note)]
    learn = quiet(synth_learner(dls=dls, cbs=cbs, eval_every='2ep'))
    learn.fit(4)
    losses = [row['valid_loss'] for row in learn.history]
    assert losses[0] is None and losses[2] is None
    assert best == [None, None, losses[1], losses[1]]
    assert learn.trainer_run.state.best_metric == min(losses[1::2])


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
