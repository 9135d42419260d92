"""The loop: order and number of events, the state at each event, and state that evaluation does not change."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import SGD, Callback, DataLoaders, Learner, Recorder, TensorLoader, TrainEvalCallback
from learnkit.testing import RegModel, synth_dls, synth_learner
from tests.helpers.learners import bare_learner


class Journal(Callback):
    "Records every event, with the value of `note`."

    def __init__(self, note: Callable[[Any], Any] | None = None, only: str = '') -> None:
        self.seen: list[Any] = []
        self._note, self._only = note, only.split()

    def run_event(self, event_name: str) -> None:
        if self._only and event_name not in self._only:
            return
        self.seen.append((event_name, self._note(self.learn)) if self._note else event_name)


def bare(*cbs: Any, n_train: int = 3, n_valid: int = 2, **kwargs: Any) -> Learner:
    return bare_learner(n_train, n_valid, cls=synth_learner, cbs=cbs, recorder=None, **kwargs)


def named_dls(n_train: int = 12, bs: int = 4) -> DataLoaders:
    "Return three training batches, two of the loader `day` and one of `night`."

    def points(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 1), torch.randn(n, 1)

    train = points(n_train)
    return DataLoaders.from_tensors(train, {'day': points(2 * bs), 'night': points(bs)}, bs=bs)


PIECE = 'before_pred after_pred after_loss before_backward after_backward'.split()
DRAW = ['before_draw', 'after_draw', 'before_batch']


def train_events(n: int, pieces: int = 1) -> list[str]:
    batch = [*DRAW, *PIECE * pieces, 'before_step', 'after_step', 'after_batch', 'batch_checkpoint']
    return ['before_train', *batch * n, 'before_draw', 'after_train']


def valid_events(n: int) -> list[str]:
    return [
        'before_validate',
        *[*DRAW, 'before_pred', 'after_pred', 'after_loss', 'after_batch'] * n,
        'before_draw',
        'after_validate',
    ]


# Order and counts


def test_a_whole_fit_event_by_event() -> None:
    learn = bare_learner(
        named_dls(),
        RegModel(),
        nn.MSELoss(),
        cbs=[log := Journal()],
        recorder=None,
        microbatch=2,
    )
    learn.fit(2, iteration=2)
    epoch = [
        'before_epoch',
        *train_events(3, pieces=2),
        'before_eval',
        *valid_events(2),
        *valid_events(1),
        'after_eval',
        'after_epoch',
        'epoch_checkpoint',
    ]
    assert log.seen == [
        'after_create',
        'before_fit',
        'before_iteration',
        *epoch,
        *epoch,
        'after_iteration',
        'iteration_checkpoint',
        'after_fit',
        'cleanup',
    ]
    counts = Counter(log.seen)
    assert counts['before_draw'] == 2 * (4 + 3 + 2)
    assert counts['after_draw'] == counts['before_batch'] == 2 * (3 + 2 + 1)
    assert counts['before_pred'] == 2 * (3 * 2 + 2 + 1) and counts['after_backward'] == 2 * 3 * 2
    assert counts['after_step'] == 2 * 3


def test_a_fit_without_validation_fires_no_event_of_evaluation() -> None:
    dls = DataLoaders(synth_dls(n_train=2).train)
    learn = bare_learner(dls, RegModel(), nn.MSELoss(), cbs=[log := Journal()], recorder=None)
    learn.fit(1)
    assert log.seen[2:-2] == ['before_epoch', *train_events(2), 'after_epoch', 'epoch_checkpoint']


def test_no_epoch_fires_the_events_of_fit_alone() -> None:
    learn = bare(log := Journal())
    learn.fit(0)
    assert log.seen == ['after_create', 'before_fit', 'after_fit', 'cleanup']


def test_a_standalone_validation() -> None:
    dls = named_dls()
    learn = bare_learner(dls, RegModel(), nn.MSELoss(), cbs=[log := Journal()], recorder=None)
    learn.validate()
    assert log.seen[1:] == [
        'before_fit',
        'before_epoch',
        'before_eval',
        *valid_events(2),
        *valid_events(1),
        'after_eval',
        'after_epoch',
        'after_fit',
        'cleanup',
    ]


@pytest.mark.parametrize('inner', [False, True])
def test_a_prediction(inner: bool) -> None:
    learn = bare(log := Journal(), n_valid=2)
    learn.get_preds(inner=inner)
    body = ['before_predict', *valid_events(2), 'after_predict']
    around = [] if inner else ['before_fit', 'before_epoch']
    expected = [*around, *body, *(['after_epoch', 'after_fit'] if around else []), 'cleanup']
    assert log.seen[1:] == expected


def test_only_whole_iterations_of_epochs_have_an_end() -> None:
    learn = bare(
        log := Journal(
            lambda o: (o.epoch, o.time.iter),
            'before_iteration after_iteration iteration_checkpoint',
        )
    )
    learn.fit(5, iteration=2)
    assert log.seen == [
        ('before_iteration', (0, 0)),
        ('after_iteration', (1, 1)),
        ('iteration_checkpoint', (1, 1)),
        ('before_iteration', (2, 1)),
        ('after_iteration', (3, 2)),
        ('iteration_checkpoint', (3, 2)),
        ('before_iteration', (4, 2)),
    ]


def test_phase_dl_name_fitting_and_training_at_each_pass() -> None:
    def where(o: Learner) -> tuple[Any, ...]:
        return o.phase, o.dl_name, o.fitting, o.training

    log = Journal(where, 'before_train after_batch before_validate')
    dls = named_dls()
    learn = bare_learner(dls, RegModel(), nn.MSELoss(), cbs=[log], recorder=None)
    learn.fit(1)
    assert [w for _, w in log.seen] == [
        *[('train', 'train', True, w) for w in (True, True, True, True)],
        *[('valid', 'day', True, False)] * 3,
        *[('valid', 'night', True, False)] * 2,
    ]
    log.seen.clear()
    learn.validate()
    expected = {('valid', 'day', False, False), ('valid', 'night', False, False)}
    assert {w for _, w in log.seen} == expected
    log.seen.clear()
    learn.get_preds()
    assert {w for _, w in log.seen} == {('predict', 'valid', False, False)}
    assert 'predict' not in where(learn)


def test_batch_is_what_the_loader_gave_and_after_draw_may_change_it() -> None:
    batches = [(torch.full((2, 1), float(i)), torch.zeros(2, 1)) for i in range(3)]
    given, used = [], []

    def change(cb: Any) -> None:
        given.append(cb.batch is batches[len(given)])
        cb.learn.batch = (cb.batch[0] + 10, cb.batch[1])

    cbs = [
        TrainEvalCallback,
        Callback(after_draw=change, before_batch=lambda cb: used.append(cb.x[0].item())),
    ]
    learn = Learner(batches, RegModel(), nn.MSELoss(), default_cbs=False, cbs=cbs)
    learn.fit(1)
    assert given == [True] * 3 and used == [10.0, 11.0, 12.0]


# Counters


def test_counters_at_the_end_of_each_batch() -> None:
    log = Journal(
        lambda o: (o.epoch, o.iter, o.n_iter, o.train_iter, round(o.pct_train * 6, 9), o.n_epoch),
        'after_batch',
    )
    learn = bare(log, n_train=3, n_valid=2)
    learn.fit(2)
    train = lambda e, i: ('after_batch', (e, i, 3, 3 * e + i + 1, 3 * e + i + 1, 2))
    valid = lambda e, i: ('after_batch', (e, i, 2, 3 * e + 3, 3 * e + 3, 2))
    expected = [f(e, i) for e in (0, 1) for f, n in ((train, 3), (valid, 2)) for i in range(n)]
    assert log.seen == expected
    assert (learn.time.ep, learn.time.ba, learn.time.st, learn.time.sp) == (2, 6, 6, 96)


def test_pct_train_starts_each_epoch_at_its_share() -> None:
    log = Journal(lambda o: o.pct_train, 'before_fit before_train after_fit')
    bare(log, n_train=7).fit(4)
    assert [p for _, p in log.seen[:5]] == [0, 0, 0.25, 0.5, 0.75]
    assert log.seen[5][1] == pytest.approx(1)


def test_the_last_batch_counts_its_own_samples() -> None:
    dls = DataLoaders.from_tensors((torch.randn(10, 1), torch.randn(10, 1)), bs=4)
    learn = bare_learner(dls, RegModel(), nn.MSELoss(), recorder=None)
    learn.fit(2)
    assert (learn.time.ba, learn.time.sp) == (6, 20)


# Stopping


@pytest.mark.parametrize(
    'event', ['before_batch', 'before_step', 'after_batch', 'batch_checkpoint']
)
def test_stop_in_a_batch_ends_after_it_with_everything_fired(event: str) -> None:
    def stop(cb: Any) -> None:
        if cb.training and cb.train_iter + (event not in ('after_batch', 'batch_checkpoint')) == 2:
            cb.learn.stop()

    learn = bare(log := Journal(), Callback(**{event: stop}), n_train=5, n_valid=2)
    learn.fit(3, iteration=2)
    seen = log.seen[1:]
    one = [*DRAW, *PIECE, 'before_step', 'after_step', 'after_batch', 'batch_checkpoint']
    assert seen == [
        'before_fit',
        'before_iteration',
        'before_epoch',
        'before_train',
        *one * 2,
        'after_train',
        'before_eval',
        *valid_events(2),
        'after_eval',
        'after_epoch',
        'epoch_checkpoint',
        'after_fit',
        'cleanup',
    ]


@pytest.mark.parametrize(
    'event', ['after_train', 'before_validate', 'after_epoch', 'epoch_checkpoint']
)
def test_stop_after_training_ends_with_this_epoch(event: str) -> None:
    learn = bare(
        Callback(**{event: lambda cb: cb.learn.stop() if cb.epoch == 1 else None}),
        log := Journal(),
        n_train=2,
        n_valid=3,
    )
    learn.fit(5)
    assert learn.train_iter == 4 and Counter(log.seen)['after_epoch'] == 2
    assert Counter(log.seen)['after_batch'] == 2 * (2 + 3)
    learn.fit(1)
    assert learn.train_iter == 2  # the next fit runs whole


# The state at each event of a batch


def closed_form(model: RegModel, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    "Return the prediction, the mean squared error, and its gradients."
    with torch.no_grad():
        pred = x * model.a + model.b
        return pred, ((pred - y) ** 2).mean(), (2 * (pred - y) * x).mean(), (2 * (pred - y)).mean()


def test_full_state_at_each_event_of_one_batch() -> None:
    lr, log = 0.1, []
    x, y = torch.randn(8, 1), torch.randn(8, 1)
    model = RegModel()
    start = model.a.item(), model.b.item()
    pred, loss, grad_a, grad_b = closed_form(model, x, y)

    class Check(Callback):
        order = 100

        def run_event(self, event_name: str) -> None:
            if event_name == 'after_create':
                return
            log.append(event_name)
            at, o = log.index(event_name), self.learn
            assert o.iter == 5 and o.xb == (x,) and o.yb == (y,) and o.x is x and o.y is y
            reached = lambda e: e in log
            assert ('pred' in vars(o)) == reached('after_pred')
            if reached('after_pred'):
                assert torch.allclose(o.pred, pred) and o.pred.requires_grad
            if reached('after_loss'):
                assert torch.allclose(o.loss, loss) and o.loss.requires_grad == (
                    event_name != 'after_batch'
                )
                assert torch.allclose(o.loss_grad, loss) and o.loss_grad.requires_grad
            else:
                assert o.loss is before
            has_grads = reached('after_backward') and event_name not in (
                'after_batch',
                'batch_checkpoint',
            )
            assert (model.a.grad is not None) == (model.b.grad is not None) == has_grads
            if has_grads:
                assert torch.allclose(model.a.grad, grad_a) and torch.allclose(model.b.grad, grad_b)
            now = model.a.item(), model.b.item()
            moved = start[0] - lr * grad_a.item(), start[1] - lr * grad_b.item()
            assert now == (
                start if not reached('after_step') else pytest.approx(moved, abs=1e-6)
            ), at

    dls = [(x, y)]
    learn = Learner(dls, model, nn.MSELoss(), opt_func=SGD, lr=lr, cbs=Check(), default_cbs=False)
    learn.create_opt()
    learn.training = True
    before = learn.loss
    learn.one_batch(5, (x, y))
    assert log == ['before_batch', *PIECE, 'before_step', 'after_step', 'after_batch']

    log.clear()  # a second time, from where it is
    start, before = (model.a.item(), model.b.item()), learn.loss
    pred, loss, grad_a, grad_b = closed_form(model, x, y)
    learn.one_batch(5, (x, y))
    assert len(log) == 9


def test_one_batch_out_of_training_only_evaluates() -> None:
    learn = bare(log := Journal())
    x, y = batch = learn.dls.one_batch()
    learn.one_batch(3, batch)
    pred, loss, *_ = closed_form(learn.model, x, y)
    assert log.seen[1:] == 'before_batch before_pred after_pred after_loss after_batch'.split()
    assert learn.iter == 3 and learn.x is x and learn.y is y
    assert torch.allclose(learn.pred, pred) and torch.allclose(learn.loss, loss)
    assert learn.opt is None and learn.model.a.grad is None


def test_all_batches_by_hand() -> None:
    learn = bare(log := Journal(), n_train=2, n_valid=2)
    learn.create_opt()
    learn(['before_fit', 'before_epoch', 'before_train'])
    learn.dl = learn.dls.train
    log.seen.clear()
    learn.all_batches()
    assert log.seen == train_events(2)[1:-1] and learn.train_iter == 2
    learn('before_validate')
    learn.dl = learn.dls.valid
    log.seen.clear()
    learn.all_batches()
    assert log.seen == valid_events(2)[1:-1] and learn.train_iter == 2


def test_epochs_by_hand() -> None:
    learn = bare(log := Journal(), n_train=2, n_valid=1)
    learn.create_opt()
    log.seen.clear()
    learn._do_epoch_train()
    learn._do_epoch_validate()
    assert log.seen == train_events(2) + valid_events(1)


def test_events_by_hand_set_the_loss_to_zero() -> None:
    learn = synth_learner()
    learn(['before_fit', 'before_epoch'])
    assert learn.loss == 0 and learn.train_iter == 0 and learn.pct_train == 0


def test_before_fit_by_hand_resets_the_counters_outside_of_evaluations() -> None:
    learn = bare(n_train=3)
    learn.fit(2)
    counters = lambda: (learn.epoch, learn.train_iter, learn.pct_train)
    learn.validate()
    assert counters() == (1, 6, pytest.approx(1))
    learn('before_fit')
    assert counters() == (0, 0, 0.0)


def test_one_batch_by_hand_goes_where_the_model_is_now() -> None:
    learn = bare(n_train=1)
    learn.fit(1)
    learn.model.to('meta')  # a second device that every machine has
    learn.one_batch(0, batch := learn.dls.one_batch())
    assert learn.x.device == learn.y.device == learn.loss.device == torch.device('meta')
    learn.model = RegModel()
    learn.one_batch(0, batch)
    assert learn.x.device == torch.device('cpu') and torch.equal(learn.pred, learn.model(batch[0]))


def test_loss_is_a_separate_value_and_stays_between_batches() -> None:
    kept, losses_seen = [], []

    def keep(cb: Any) -> None:
        kept.append((cb.loss, cb.loss.item()))

    learn = bare(
        Callback(after_batch=keep, before_batch=lambda cb: losses_seen.append(cb.loss)),
        n_train=3,
        n_valid=1,
    )
    learn.fit(1)
    assert all(t.item() == v and t.grad_fn is None for t, v in kept)
    assert losses_seen[0] == 0
    assert [a is b for a, (b, _) in zip(losses_seen[1:], kept[:-1], strict=True)] == [True] * 3


def test_a_loss_function_that_works_in_place_cannot_change_what_was_logged() -> None:
    kept: list[float] = []
    cb = Callback(
        before_backward=lambda cb: cb.loss_grad.mul_(3),
        after_batch=lambda cb: kept.append(cb.loss.item()),
    )
    loss_func = lambda pred, y: (pred - y).square().mean()
    learn = bare(cb, n_train=1, n_valid=1, loss_func=loss_func, lr=0.0)
    learn.fit(1)
    x, y = next(iter(learn.dls.train))
    assert kept[0] == pytest.approx(((learn.model(x) - y) ** 2).mean().item(), rel=1e-5)


# Evaluation leaves no trace


class Noisy(Callback):
    "Draws from every generator in each evaluated batch."

    run_train = False

    def before_batch(self) -> None:
        torch.rand(3)
        random.random()
        np.random.rand()


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)
    )


def test_a_fit_with_validation_has_the_weights_of_one_without() -> None:
    def run(valid: bool, defaults: bool) -> list[Tensor]:
        torch.manual_seed(5)
        model, ds = net(), TensorDataset(torch.randn(40, 1), torch.randn(40, 1))
        train, dl = DataLoader(ds, 8, shuffle=True), DataLoader(ds, 8, shuffle=True)
        dls = DataLoaders(train, {'a': dl, 'b': dl} if valid else None)
        cbs = [Noisy, *([Recorder] if defaults else []), TrainEvalCallback]
        learn = Learner(dls, model, nn.MSELoss(), lr=0.05, cbs=cbs, default_cbs=False)
        learn.logger = print
        learn.fit(3)
        return [t.clone() for t in model.state_dict().values()]

    plain = run(False, False)
    for valid, defaults in ((True, False), (True, True)):
        assert all(torch.equal(a, b) for a, b in zip(plain, run(valid, defaults), strict=True))


@pytest.mark.parametrize(
    'evaluate', [lambda o: o.validate(), lambda o: o.get_preds(), lambda o: o.validate(0)]
)
def test_evaluation_restores_generators_modes_and_state(evaluate: Callable[[Learner], Any]) -> None:
    model = net()
    dls = synth_dls(n_train=3, n_valid=2)
    learn = bare_learner(dls, model, nn.MSELoss(), cbs=[Noisy], recorder=None)
    inside: list[bool] = []
    names = (
        'training phase dl dl_name iter n_iter xb yb pred loss epoch train_iter pct_train'.split()
    )

    def state() -> list[Any]:
        return [getattr(learn, n) for n in names]

    def check(cb: Any) -> None:
        model[1].eval()
        before, modes = state(), [m.training for m in model.modules()]
        rngs = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        weights = [p.clone() for p in model.state_dict().values()]
        evaluate(learn)
        inside.append(
            all(a is b for a, b in zip(before, state(), strict=True))
            and modes == [m.training for m in model.modules()]
        )
        assert torch.equal(rngs[0], torch.get_rng_state()) and rngs[1] == random.getstate()
        assert np.array_equal(rngs[2], np.random.get_state()[1])
        for a, b in zip(weights, model.state_dict().values(), strict=True):
            assert torch.equal(a, b)

    cb = Callback(before_step=check)
    learn.add_cb(cb)
    learn.fit(1)
    assert inside == [True] * 3


def test_a_fit_with_validations_inside_it_ends_at_the_same_weights() -> None:
    ends = []
    for cbs in (
        [],
        [Callback(after_batch=lambda cb: cb.learn.validate() if cb.training else None)],
    ):
        torch.manual_seed(2)
        learn = bare(*cbs, model=net(), n_train=4)
        learn.fit(2)
        ends.append(torch.cat([p.flatten() for p in learn.model.parameters()]))
        assert learn.train_iter == 8 and learn.time.ba == 8
    assert torch.equal(*ends)


LOADERS = {
    'tensors': lambda ds: TensorLoader(*ds.tensors, bs=4, shuffle=True, seed=3),
    'torch': lambda ds: DataLoader(ds, 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
}
ON_TRAIN = {
    'validate': lambda o: o.validate(0),
    'by name': lambda o: o.validate(dl='train'),
    'get_preds': lambda o: o.get_preds(ds_idx=0, reorder=False),
    'inner': lambda o: o.get_preds(ds_idx=0, reorder=False, inner=True),
}


@pytest.mark.parametrize('evaluate', ON_TRAIN.values(), ids=ON_TRAIN)
@pytest.mark.parametrize('make', LOADERS.values(), ids=LOADERS)
def test_evaluating_on_the_training_loader_keeps_the_order_of_the_epochs_to_come(
    make: Any, evaluate: Any
) -> None:
    ds, drawn = TensorDataset(torch.arange(20.0)[:, None], torch.zeros(20, 1)), []
    for evaluates in (False, True):
        order: list[float] = []

        def note(cb: Any, order: list[float] = order) -> None:
            if cb.training:
                order.extend(cb.x.flatten().tolist())

        dls = DataLoaders(make(ds))
        cbs = [TrainEvalCallback, Callback(before_batch=note)]
        model = RegModel()
        learn = Learner(dls, model, nn.MSELoss(), opt_func=SGD, lr=0.0, default_cbs=False, cbs=cbs)
        learn.fit(1)
        if evaluates:
            evaluate(learn)
        learn.fit(1)
        drawn.append(order)
    assert drawn[0] == drawn[1] and drawn[0][:20] != drawn[0][20:] != sorted(drawn[0][20:])


def test_evaluation_builds_no_graph() -> None:
    log = Journal(lambda o: (o.pred.requires_grad, torch.is_grad_enabled()), 'after_pred')
    bare(log, n_train=1, n_valid=1).fit(1)
    assert [w for _, w in log.seen] == [(True, True), (False, False)]
