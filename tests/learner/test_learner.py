"""The public Learner: constructor, attributes, contexts, kinds of batches and loaders, closing."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import (
    SGD,
    AvgMetric,
    Callback,
    CancelError,
    CancelFitException,
    DataLoaders,
    FitError,
    Learner,
    LoaderError,
    OptimizerError,
    Periodic,
    ProgressCallback,
    Recorder,
    TrainEvalCallback,
    defaults,
    mae,
    to_detach,
)
from learnkit.testing import RegModel, synth_dls, synth_learner
from tests.helpers.learners import bare_learner


def bare(dls: Any, model: nn.Module, loss: Any = None, *cbs: Any, **kwargs: Any) -> Learner:
    "Return a Learner with a history that prints nothing."
    options = {'opt_func': torch.optim.SGD, 'lr': 0.1, 'wd_bn_bias': True, **kwargs}
    return bare_learner(dls, model, loss, cbs=cbs, **options)


def mean_square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def by_hand(model: nn.Module, loss_of: Any, batches: list[Any], n_epoch: int = 2) -> list[Tensor]:
    "Return the weights after a plain loop with `loss_of(model, batch)`."
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for b in batches * n_epoch:
        loss_of(model, b).backward()
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def same(model: nn.Module, expected: list[Tensor]) -> bool:
    return all(
        torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), expected, strict=True)
    )


def line(n_in: int = 3, n_out: int = 1) -> nn.Linear:
    torch.manual_seed(4)
    return nn.Linear(n_in, n_out)


def rows(n: int = 3, bs: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(bs, 3), torch.randn(bs, 1)) for _ in range(n)]


# Constructor


def test_the_constructors_keywords_are_attributes(tmp_path: Path) -> None:
    given = {
        'loss_func': nn.L1Loss(),
        'opt_func': SGD,
        'lr': 0.2,
        'splitter': lambda m: [[m.a], [m.b]],
        'path': tmp_path,
        'model_dir': 'weights',
        'wd': 0.1,
        'wd_bn_bias': True,
        'train_bn': False,
        'moms': (0.9, 0.8, 0.9),
        'microbatch': 4,
    }
    model, dls = RegModel(), synth_dls()
    learn = Learner(dls, model, metrics=[mae], cbs=Callback(), default_cbs=False, **given)
    assert {name: getattr(learn, name) for name in given} == given
    assert (learn.dls, learn.model, learn.opt, len(learn.cbs)) == (dls, model, None, 1)
    assert [m.name for m in learn.metrics] == ['mae']


def test_the_defaults() -> None:
    learn = Learner(synth_dls(), RegModel(), nn.MSELoss())
    assert (learn.lr, learn.wd, learn.wd_bn_bias, learn.train_bn) == (defaults.lr, None, None, True)
    assert (learn.moms, learn.microbatch) == ((0.95, 0.85, 0.95), None)
    assert (learn.path, learn.model_dir, learn.logger) == (Path('.'), 'models', print)
    assert (
        [type(cb) for cb in learn.cbs]
        == defaults.callbacks
        == [TrainEvalCallback, Recorder, ProgressCallback]
    )
    assert learn.train_eval is learn.cbs[0]
    assert learn.recorder is learn.cbs[1]
    assert learn.progress is learn.cbs[2]
    assert (learn.epoch, learn.n_epoch, learn.iter, learn.train_iter) == (0, 1, 0, 0)
    assert (learn.pct_train, learn.training) == (0.0, False)


def test_the_training_sets_own_loss_function_is_taken() -> None:
    class Set(TensorDataset):
        loss_func = nn.L1Loss()

    ds = Set(torch.randn(4, 3), torch.randn(4, 1))
    assert Learner(DataLoader(ds), line(), default_cbs=False).loss_func is Set.loss_func
    assert Learner(DataLoader(ds), line(), F.mse_loss, default_cbs=False).loss_func is F.mse_loss


# Attributes


def test_x_and_y_are_read_only_views_of_xb_and_yb() -> None:
    learn = synth_learner(default_cbs=False)
    a, b, c = torch.ones(1), torch.zeros(1), torch.ones(2)
    learn.xb, learn.yb = (a,), (b, c)
    assert learn.x is a and learn.y == (b, c)
    learn.yb = ()
    assert learn.y is None
    for name in 'xy':
        with pytest.raises(AttributeError):
            setattr(learn, name, a)
    assert learn.xb == (a,)


def test_the_models_attributes_are_the_learners() -> None:
    class Model(RegModel):
        word = 'hello'

        def shout(self) -> str:
            return self.word.upper()

    learn = synth_learner(model=Model())
    assert learn.a is learn.model.a and learn.word == 'hello' and learn.shout() == 'HELLO'
    assert list(learn.parameters()) == [learn.model.a, learn.model.b]
    assert learn.state_dict().keys() == {'a', 'b'}
    assert not hasattr(learn, 'nothing_like_it')


def test_completion_lists_what_a_user_calls() -> None:
    class Own(Callback):
        def after_loss(self) -> None:
            names.update(dir(self))

    names: set[str] = set()
    learn = synth_learner(cbs=Own())
    listed = {name for name in dir(learn) if not name.startswith('_')}
    assert {'fit', 'model', 'recorder', 'own', 'xb'} <= listed and not {'parts', 'a'} & listed
    assert {'pause', 'paused', 'resume'} <= listed  # a user calls them in the cell after a stop
    assert len(listed) <= 102
    learn.fit(1)
    assert {'after_loss', 'learn', 'xb', 'pred', 'loss', 'opt'} <= names and 'fit' not in names


def test_the_model_can_be_replaced() -> None:
    learn = bare(rows(), line(), nn.MSELoss())
    learn.model = model = nn.Sequential(line())
    learn.fit(2)
    assert same(model, by_hand(line(), mean_square, learn.dls.train))
    assert learn.opt is not None


# Contexts


def test_no_logging_and_no_bar_restore_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    learn = synth_learner()
    learn.fit(1)
    assert capsys.readouterr().out
    with learn.no_logging():
        learn.fit(1)
    with learn.no_bar(), learn.no_logging():
        assert not hasattr(learn, 'progress')
        learn.fit(1)
    assert capsys.readouterr().out == ''
    assert learn.logger is print and learn.progress is learn.cbs[2] and len(learn.history) == 3
    learn.fit(1)
    assert capsys.readouterr().out


def test_loss_not_reduced_and_back() -> None:
    learn = synth_learner()
    x, y = torch.randn(4, 1), torch.randn(4, 1)
    with learn.loss_not_reduced():
        assert learn.loss_func(x, y).shape == (4, 1)
    assert learn.loss_func.reduction == 'mean'
    learn.loss_func = F.mse_loss
    with learn.loss_not_reduced():
        assert torch.equal(learn.loss_func(x, y), (x - y).square())
    assert learn.loss_func is F.mse_loss


EVENTS_AROUND = ['before_fit', 'before_epoch', 'after_epoch', 'after_fit', 'cleanup']


class Journal(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def run_event(self, event_name: str) -> None:
        self.seen.append(event_name)


@pytest.mark.parametrize('inner', [False, True])
def test_validation_context_fires_the_events_around(inner: bool) -> None:
    learn = synth_learner(default_cbs=False, cbs=[TrainEvalCallback, Recorder, log := Journal()])
    log.seen.clear()
    with learn.validation_context(cbs=(extra := Callback()), inner=inner):
        assert extra in learn.cbs and learn.create_mbar is False
        learn._do_epoch_validate()
    around = [] if inner else EVENTS_AROUND
    assert [e for e in log.seen if e in EVENTS_AROUND] == around
    assert log.seen.count('after_validate') == 1
    assert extra not in learn.cbs and learn.logger is print and learn.create_mbar is True


def test_with_learn_fires_around_and_closes() -> None:
    learn = synth_learner(default_cbs=False, cbs=[TrainEvalCallback, log := Journal()])
    log.seen.clear()
    with learn as same_one:
        assert same_one is learn and log.seen == ['before_fit', 'before_epoch']
        learn.one_batch(0, learn.dls.one_batch())
        assert learn.pred.shape == (16, 1)
    of_the_batch = 'before_batch', 'before_pred', 'after_pred', 'after_loss', 'after_batch'
    assert [e for e in log.seen if e not in of_the_batch] == [*EVENTS_AROUND, 'close', 'post_close']


def test_a_with_block_has_no_level_to_cancel() -> None:
    learn = synth_learner(default_cbs=False, cbs=[TrainEvalCallback, log := Journal()])
    with pytest.raises(CancelError, match='CancelFitException'), learn:
        raise CancelFitException
    assert log.seen[-4:] == ['after_error', 'cleanup', 'close', 'post_close']


def test_a_fit_in_a_with_block_is_a_fit_and_closes_at_its_end() -> None:
    closed: list[int] = []

    def run(block: bool) -> tuple[list[Any], list[Tensor]]:
        watcher = Callback(close=lambda cb: closed.append(len(cb.learn.history)))
        learn = bare((rows_, rows_), model := line(), nn.MSELoss(), watcher, metrics=mae)
        if block:
            with learn:
                learn.fit(2)
                learn.validate()
                learn.fit(1)
        else:
            learn.fit(2)
            learn.fit(1)
        history = [{k: v for k, v in r.items() if k != 'time'} for r in learn.history]
        return history, [p.detach() for p in model.parameters()]

    rows_ = rows()
    (history, weights), (plain_history, plain_weights) = run(True), run(False)
    assert history == plain_history
    assert all(torch.equal(p, q) for p, q in zip(weights, plain_weights, strict=True))
    assert closed == [3]


def test_a_fit_in_a_with_block_inside_an_evaluation_is_refused() -> None:
    def train(cb: Any) -> None:
        with cb.learn:
            cb.learn.fit(1)

    learn = bare((rows(), rows()), line(), nn.MSELoss())
    with pytest.raises(FitError, match='inside the evaluation'):
        learn.validate(cbs=Callback(after_batch=train))
    learn.fit(1)  # and afterwards it is allowed
    assert len(learn.history) == 1


def test_a_cancel_before_a_with_block_cannot_skip_it() -> None:
    def cancel(cb: Any) -> None:
        raise CancelFitException

    learn = synth_learner(default_cbs=False, cbs=[TrainEvalCallback, Callback(before_fit=cancel)])
    with pytest.raises(CancelError, match='before_fit'):
        with learn:
            pytest.fail('the block was entered')


def test_to_detach_uses_the_loaders_own_where_it_has_one() -> None:
    learn = synth_learner()
    t = torch.randn(2, requires_grad=True)
    assert not learn.to_detach((t,))[0].requires_grad
    assert torch.equal(learn.to_detach(t), t.detach())
    learn.dl = SimpleNamespace(to_detach=lambda b, cpu, gather: 'mine')
    assert learn.to_detach(t) == 'mine' and to_detach(t).requires_grad is False


# Kinds of batches


class ByName(nn.Module):
    "Takes named inputs, and returns its loss if it gets labels."

    def __init__(self, with_loss: bool = True) -> None:
        super().__init__()
        self.lin, self.with_loss = line(), with_loss

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.lin(ids if mask is None else ids * mask)
        if not self.with_loss or labels is None:
            return {'logits': logits}
        return {'logits': logits, 'loss': F.mse_loss(logits, labels)}


def named(n: int = 3) -> list[dict[str, Any]]:
    return [
        {
            'ids': torch.randn(4, 3),
            'mask': torch.rand(4, 3),
            'labels': torch.randn(4, 1),
            'text': ['a'] * 4,
        }
        for _ in range(n)
    ]


def named_loss(m: ByName, b: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(m.lin(b['ids'] * b['mask']), b['labels'])


@pytest.mark.parametrize('loss', [None, nn.MSELoss()], ids=['own loss', 'loss_func'])
def test_a_dict_batch_is_given_by_name(loss: Any) -> None:
    batches = named()
    learn = bare((batches, batches[:2]), model := ByName(loss is None), loss, metrics=mae)
    learn.fit(2)
    assert same(model, by_hand(ByName(), named_loss, batches))
    whole = {k: torch.cat([b[k] for b in batches[:2]]) for k in ('ids', 'mask', 'labels')}
    expected = named_loss(model, whole).item()
    assert learn.history[-1]['valid_loss'] == pytest.approx(expected, rel=1e-5)
    expected = F.l1_loss(model(whole['ids'], whole['mask'])['logits'], whole['labels']).item()
    assert learn.history[-1]['mae'] == pytest.approx(expected, rel=1e-5)


# Loaders without a length


class Stream:
    "Creates new batches in each pass, and has no length."

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


def test_a_loader_without_length() -> None:
    seen: list[Any] = []
    batches = rows(3)
    watcher = Callback(after_batch=lambda cb: seen.append((cb.n_iter, cb.pct_train)))
    learn = bare((Stream(batches), Stream(batches)), model := line(), nn.MSELoss(), watcher)
    learn.fit(2)
    assert same(model, by_hand(line(), mean_square, batches))
    assert seen == [(None, 0.0)] * 6 + [(None, 0.5)] * 6 and learn.train_iter == 6


def test_n_iter_is_ignored_where_the_length_is_known() -> None:
    learn = bare(DataLoaders(rows(3), n_iter=2), line(), nn.MSELoss())
    learn.fit(1)
    assert learn.train_iter == 3 and learn.pct_train == pytest.approx(1)


# More of a fit


def test_everything_at_once_is_the_loop_by_hand() -> None:
    "Train with momentum, decay, named loaders, metrics, loss parts and several fits."
    train, day, night = rows(4), rows(2), rows(1)
    loss = nn.MSELoss()
    learn = bare(
        DataLoaders(train, {'day': day, 'night': night}),
        model := line(),
        loss,
        opt_func=partial(torch.optim.SGD, momentum=0.9),
        metrics=[mae, AvgMetric(mae, 'mean error', on='train')],
        wd=0.01,
    )
    learn.fit(2)
    learn.fit(1, lr=0.01, wd=0.0)

    other = line()
    opt = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for epoch in range(3):
        if epoch == 2:
            opt.param_groups[0].update(lr=0.01, weight_decay=0.0)
        for x, y in train:
            loss(other(x), y).backward()
            opt.step()
            opt.zero_grad()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    x, y = (torch.cat(p) for p in zip(*day, strict=True))
    assert learn.history[-1]['day/mae'] == pytest.approx(F.l1_loss(other(x), y).item(), rel=1e-5)


def test_a_model_with_reset_is_reset_at_each_run() -> None:
    class Counts(RegModel):
        resets = 0

        def reset(self) -> None:
            self.resets += 1

    learn = synth_learner(model=Counts(), default_cbs=False, cbs=TrainEvalCallback)
    learn.fit(2)
    learn.validate()
    assert learn.model.resets == 2


def test_the_loss_modules_own_tensors_move_with_the_model() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    dls = DataLoaders([(torch.randn(4, 3), torch.randint(2, (4,)))], device='meta')
    learn = Learner(dls, nn.Linear(3, 2), loss, default_cbs=False, cbs=TrainEvalCallback)
    learn('before_fit')
    assert loss.weight.device.type == 'meta' and learn.model.weight.device.type == 'meta'


def test_a_copy_is_a_separate_learner() -> None:
    "`copy.deepcopy` copies callbacks, metrics, optimizer and history; the copy trains like the original."
    periodic = Periodic(every='3ba', on_every=lambda cb: None)
    cbs = [Callback(after_batch=lambda cb: None), periodic]
    learn = synth_learner(metrics=mae, wd=0.1, cbs=cbs)
    with learn.no_bar():
        learn.fit(1)
    duplicate = deepcopy(learn)
    assert [cb.learn is duplicate for cb in duplicate.cbs] == [True] * len(duplicate.cbs)
    assert duplicate.recorder is not learn.recorder
    ends = []
    for one in (learn, duplicate):
        torch.manual_seed(1)
        with one.no_bar():
            one.fit(1)
        ends.append([p.item() for p in one.model.parameters()])
    assert ends[0] == ends[1] and len(learn.history) == len(duplicate.history) == 2
    assert [row['mae'] for row in learn.history] == [row['mae'] for row in duplicate.history]
    duplicate.remove_cb(Periodic)
    assert hasattr(learn, 'periodic') and not hasattr(duplicate, 'periodic')


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = RegModel()
    learn = synth_learner(opt_func=torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match='No parameter of this RegModel'):
        learn.fit(1)


def test_a_loader_that_is_given_may_be_named_and_is_checked() -> None:
    dls = synth_dls()
    learn = synth_learner(
        dls=DataLoaders(dls.train, {'day': dls.valid, 'night': list(dls.valid)}), metrics=mae
    )
    assert learn.validate(dl='night') == learn.validate(2) == learn.validate(dl=list(dls.valid))
    for call in (learn.validate, learn.get_preds):
        with pytest.raises(LoaderError, match='TensorLoader'):
            call(dl=torch.zeros(3, 1))
        with pytest.raises(LoaderError, match='noon'):
            call(dl='noon')


def test_load_leaves_an_optimizer_and_takes_fastais_options(tmp_path: Path) -> None:
    synth_learner(path=tmp_path).save('line', with_opt=False)
    learn = synth_learner(path=tmp_path)
    learn.load('line', with_opt=False, weights_only=False)
    assert [h['lr'] for h in learn.opt.hypers] == [learn.lr]
    learn = synth_learner(path=tmp_path)
    for p in learn.model.parameters():
        p.requires_grad_(False)
    assert learn.load('line').opt is None
