"""Evaluations inside handlers, targets, streams, metrics with several values, the end of a Learner."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from learnkit import BestMetric, Callback, Learner, Recorder, TrackerCallback, TrainEvalCallback
from learnkit.core.errors import BatchError, EmptyLoaderError, LoaderError, LossError, MetricError
from learnkit.data.dataloaders import DataLoaders
from learnkit.data.evaluator import Evaluator
from learnkit.engine.events import event
from learnkit.losses import CrossEntropyLossFlat
from learnkit.metrics import Metric
from learnkit.metrics.averages import AvgMetric
from learnkit.metrics.merge import shared_state

EVALUATING_EVENTS = (
    'before_fit before_epoch before_train after_train before_eval before_validate after_validate '
    'after_eval after_epoch after_fit'
).split()


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    "Return `x` and `y`, each `[n, 1]`, in float64."
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, n, 1, generator=gen, dtype=torch.float64))


def regression(**kwargs: Any) -> Learner:
    "Return a Learner of a linear layer with a loader of 8 and one of 6 samples, and no output."
    torch.manual_seed(0)
    dls = DataLoaders.from_tensors(points(8, 1), points(6, 2), bs=4, shuffle=False)
    options: dict[str, Any] = {
        'loss_func': nn.MSELoss(),
        'opt_func': torch.optim.SGD,
        'lr': 0.1,
        **kwargs,
    }
    learn = Learner(dls, nn.Linear(1, 1).double(), **options)
    learn.logger = lambda row: None
    return learn


def mean_square(learn: Any, x: Tensor, y: Tensor) -> float:
    "Return the loss of all samples in one pass of plain torch."
    with torch.no_grad():
        return float((learn.model(x) - y).square().mean())


# -- evaluations that a callback starts ------------------------------------------------------------


@pytest.mark.silent('validate(dl=) in after_epoch: loss on a test set')
def test_validate_in_after_epoch(row: Callable[..., None]) -> None:
    test = points(10, 3)
    found: list[tuple[float, float]] = []

    def evaluate(cb: Any) -> None:
        now = cb.learn.validate(dl=[test])[0]
        found.append((now, mean_square(cb.learn, *test)))

    learn = regression(cbs=Callback(after_epoch=evaluate))
    learn.fit(3)
    row(was='RecursionError', now=found[-1][0], independent=found[-1][1])
    assert len(found) == 3
    for now, independent in found:
        assert now == pytest.approx(independent, rel=1e-12)
    assert learn.validate(dl=[test])[0] == pytest.approx(found[-1][1], rel=1e-12)


@pytest.mark.parametrize('event', EVALUATING_EVENTS)
def test_every_event_may_evaluate_and_changes_nothing(event: str) -> None:
    test = points(10, 3)
    found: list[Any] = []

    def evaluate(cb: Any) -> None:
        loss = cb.learn.validate(dl=[test])[0]
        preds, _ = cb.learn.get_preds(dl=[test])
        with torch.no_grad():
            expected = cb.learn.model(test[0])
        found.append((loss, mean_square(cb.learn, *test), torch.equal(preds, expected)))

    plain, learn = regression(), regression(cbs=Callback(**{event: evaluate}))
    for one in (plain, learn):
        one.fit(2)
    assert len(found) == (1 if event in ('before_fit', 'after_fit') else 2)
    for loss, expected, same_preds in found:
        assert loss == pytest.approx(expected, rel=1e-12) and same_preds
    assert torch.equal(plain.model.weight, learn.model.weight)
    timeless = [[{**r, 'time': 0} for r in one.history] for one in (plain, learn)]
    assert timeless[0] == timeless[1]
    # from a stand-alone validation too, which returns its own result
    found.clear()
    assert learn.validate() == plain.validate()
    assert bool(found) == (event not in ('before_train', 'after_train'))


def test_callbacks_that_evaluate_call_each_other_once() -> None:
    "A starts B's handler once a run, and B starts A's: each level of runs has one callback fewer."
    calls: list[str] = []

    def evaluating(name: str) -> Callback:
        def evaluate(cb: Any) -> None:
            calls.append(name)
            cb.learn.validate()

        return Callback(after_epoch=evaluate)

    regression(cbs=[evaluating('a'), evaluating('b')]).fit(2)
    assert calls == ['a', 'b', 'b', 'a'] * 2


class Every(Callback):
    "Take every event in one method, and evaluate at the end of an epoch."

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.losses: list[float] = []

    def run_event(self, event_name: str) -> None:
        self.events.append(event_name)
        if event_name == 'after_epoch':
            self.losses.append(self.learn.validate()[0])


class Foreign:
    "A callback with fastai's protocol and another base class."

    order, run, run_train, run_valid, name, learn = 0, True, True, True, 'foreign', None

    def __init__(self) -> None:
        self.losses: list[float] = []

    def __call__(self, event_name: str) -> None:
        getattr(self, event_name)()

    def after_epoch(self) -> None:
        self.losses.append(self.learn.validate()[0])


@pytest.mark.parametrize('make', [Every, Foreign])
def test_other_kinds_of_callbacks_evaluate_too(make: Callable[[], Any]) -> None:
    cb = make()
    learn = regression(cbs=cb)
    learn.fit(2)
    assert len(cb.losses) == 2
    assert cb.losses[-1] == pytest.approx(mean_square(learn, *points(6, 2)), rel=1e-12)
    if make is Every:
        assert cb.events.count('after_epoch') == 2 and cb.events.count('before_validate') == 2
        learn.fit(1)  # it is on again
        assert cb.events.count('after_epoch') == 3


def test_a_failed_evaluation_leaves_the_callback_on() -> None:
    calls: list[int] = []

    def evaluate(cb: Any) -> None:
        calls.append(cb.epoch)
        with pytest.raises(OSError):
            cb.learn.validate(cbs=Callback(before_pred=fail))

    def fail(cb: Any) -> None:
        raise OSError

    regression(cbs=Callback(after_epoch=evaluate)).fit(3)
    assert calls == [0, 1, 2]


def test_a_callback_that_changes_batches_and_evaluates_is_named() -> None:
    class Double(Callback):
        def before_batch(self) -> None:
            self.learn.xb = (2 * self.x,)

        def after_epoch(self) -> None:
            self.losses = self.learn.validate()

    learn = regression(cbs=Double())
    with pytest.warns(UserWarning, match='Double.*before_batch'):
        learn.fit(1)
    assert learn.double.losses[0] == pytest.approx(mean_square(learn, *points(6, 2)), rel=1e-12)


def test_logging_after_an_evaluation_inside_another_keeps_its_column() -> None:
    def evaluate(cb: Any) -> None:
        cb.learn.validate()
        cb.learn.log('gap', 2.0)

    learn = regression(cbs=Callback(after_eval=evaluate))
    learn.fit(1)
    assert learn.history[0]['valid_gap'] == 2.0 and 'gap' not in learn.history[0]


# -- targets ---------------------------------------------------------------------------------------


def spread(pred: Tensor) -> Tensor:
    "Return a loss of the predictions alone."
    return (pred - pred.mean(0)).square().mean() + pred.square().mean()


def plain_loop(
    batches: list[Any], loss_of: Callable[[nn.Module, Any], Tensor], model: nn.Module
) -> list[float]:
    "Train a model by SGD with lr=0.1, one step a batch; return the losses."
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


class Encoder(nn.Linear):
    "Take `x` by name, or alone."

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def unlabeled(form: str, n: int = 4) -> list[Any]:
    gen = torch.Generator().manual_seed(3)
    xs = [torch.randn(5, 3, generator=gen, dtype=torch.float64) for _ in range(n)]
    if form == 'tensor':
        return xs
    return [(x,) if form == 'tuple' else {'x': x, 'length': torch.tensor(3)} for x in xs]


@pytest.mark.parametrize('form', ['tensor', 'tuple', 'dict'])
@pytest.mark.silent('loss_func(pred) on batches without targets: last training loss')
def test_a_loss_of_the_predictions_alone(form: str, row: Callable[..., None]) -> None:
    torch.manual_seed(0)
    dls = DataLoaders(unlabeled(form), unlabeled(form, 2))
    learn = Learner(dls, Encoder(), spread, opt_func=torch.optim.SGD, lr=0.1)
    learn.logger = lambda r: None
    losses: list[float] = []
    learn.fit(1, cbs=Callback(after_batch=lambda cb: losses.append(cb.loss.item())))
    torch.manual_seed(0)
    model = Encoder()
    expected = plain_loop(unlabeled('tensor'), lambda m, x: spread(m(x)), model)
    with torch.no_grad():
        valid = sum(spread(model(x)).item() for x in unlabeled('tensor', 2)) / 2
    if form == 'dict':
        row(was='BatchError', now=losses[3], independent=expected[3])
    assert losses[:4] == pytest.approx(expected, rel=1e-12)
    assert learn.history[0]['valid_loss'] == pytest.approx(valid, rel=1e-12)
    assert learn.validate()[0] == pytest.approx(valid, rel=1e-12)
    preds, targs = learn.get_preds()
    assert targs is None and preds.shape == (10, 2)


def test_a_loss_that_needs_targets_keeps_its_error() -> None:
    for loss in (nn.MSELoss(), nn.functional.mse_loss, lambda pred, targ: pred.mean()):
        learn = Learner(unlabeled('tuple'), Encoder(), loss)
        with pytest.raises(BatchError, match='Tensor'):
            learn.fit(1)


def test_a_loss_that_may_take_targets_is_not_called_in_predictions_without() -> None:
    def loss(pred: Tensor, *targs: Tensor) -> Tensor:
        return (pred - targs[0]).square().mean()

    x, y = points(8, 1)
    learn = regression(loss_func=loss)
    learn.fit(1)
    preds, targs = learn.get_preds(dl=[(x,)])
    assert targs is None and torch.equal(preds, learn.model(x).detach())
    assert learn.validate(dl=[(x, y)])[0] == pytest.approx(mean_square(learn, x, y), rel=1e-12)


def test_the_loss_of_the_model_itself_comes_first() -> None:
    class Own(Encoder):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = super().forward(x)
            return {'loss': out.square().mean(), 'logits': out}

    dls = unlabeled('tensor', 1)
    learn = Learner(dls, Own(), lambda pred: pred.sum() * 100, opt_func=torch.optim.SGD, lr=0.0)
    losses: list[float] = []
    learn.fit(1, cbs=Callback(after_batch=lambda cb: losses.append(cb.loss.item())))
    with torch.no_grad():
        expected = learn.model(unlabeled('tensor', 1)[0])['loss'].item()
    assert losses == [pytest.approx(expected, rel=1e-12)]


class Detector(nn.Module):
    "Predict a box and a score from `x`."

    def __init__(self) -> None:
        super().__init__()
        self.boxes, self.scores = nn.Linear(3, 4).double(), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.boxes(x), self.scores(x)


def detection_loss(pred: tuple[Tensor, Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.l1_loss(pred[0], boxes) + nn.functional.cross_entropy(pred[1], labels)


def boxed(n: int = 4) -> list[dict[str, Tensor]]:
    gen = torch.Generator().manual_seed(4)
    return [
        {
            'x': torch.randn(5, 3, generator=gen, dtype=torch.float64),
            'labels': torch.randint(2, (5,), generator=gen),
            'boxes': torch.rand(5, 4, generator=gen, dtype=torch.float64),
        }
        for _ in range(n)
    ]


@pytest.mark.silent('targets of dict batches by name, two of them: last training loss')
def test_targets_of_dicts_by_name(row: Callable[..., None]) -> None:
    torch.manual_seed(0)
    dls = DataLoaders(boxed(), boxed(2), targets=('boxes', 'labels'))
    learn = Learner(dls, Detector(), detection_loss, opt_func=torch.optim.SGD, lr=0.1)
    learn.logger = lambda r: None
    losses: list[float] = []
    learn.fit(1, cbs=Callback(after_batch=lambda cb: losses.append(cb.loss.item())))
    torch.manual_seed(0)
    model = Detector()
    loss_of = lambda m, b: detection_loss(m(b['x']), b['boxes'], b['labels'])
    expected = plain_loop(boxed(), loss_of, model)
    row(was='TypeError', now=losses[3], independent=expected[3])
    assert losses[:4] == pytest.approx(expected, rel=1e-12)
    _, targs = learn.get_preds()
    assert torch.equal(targs[0], torch.cat([b['boxes'] for b in boxed(2)]))
    assert targs[1].dtype == torch.int64
    preds, none = learn.get_preds(dl=[{'x': boxed(1)[0]['x']}])
    assert none is None and len(preds) == 2


def test_targets_from_tensors_and_datasets() -> None:
    batch = boxed(1)[0]
    samples = [{k: v[i] for k, v in batch.items()} for i in range(5)]
    for dls in (
        DataLoaders.from_tensors(batch, batch, bs=5, shuffle=False, targets='boxes'),
        DataLoaders.from_datasets(samples, samples, bs=5, shuffle=False, targets='boxes'),
    ):
        learn = Learner(dls, Encoder(), lambda pred, boxes: (pred - boxes[:, :2]).square().mean())
        assert torch.equal(learn.get_preds()[1], batch['boxes'])


@pytest.mark.parametrize(
    ('batch', 'options', 'error'),
    [
        ({'x': 1, 'labels': 2}, {'targets': ('boxes', 'labels')}, BatchError),
        ('tuple', {'targets': 'labels'}, BatchError),
        ('dict', {'n_inp': 1}, BatchError),
        ('dict', {'n_inp': 2}, BatchError),
        ('tuple', {'n_inp': 4}, BatchError),
        ('tuple', {'n_inp': {'valid': 4}}, BatchError),
        ('tuple', {'n_inp': {'test': 1}}, LoaderError),
        ('tuple', {'n_inp': {'valid': 0}}, LoaderError),
        ('tuple', {'n_inp': 1, 'targets': 'y'}, LoaderError),
        ('tuple', {'targets': ()}, LoaderError),
        ('tuple', {'targets': 3}, LoaderError),
    ],
)
@pytest.mark.parametrize('workers', [0, 1])
def test_a_form_that_cannot_be_is_an_error_before_the_first_step(
    batch: Any, options: dict[str, Any], error: type[Exception], workers: int
) -> None:
    x, y = points(4, 1)
    if batch == 'tuple':
        batch = (x, y)
    elif batch == 'dict':
        batch = {'x': x, 'y': y}
    else:
        batch = {'x': x, 'labels': y}
    model = nn.Linear(1, 1).double()
    before = model.weight.clone()
    train = [(x, y)] if options == {'n_inp': {'valid': 4}} else [batch]
    valid: Any = [batch]
    if workers:
        valid = torch.utils.data.DataLoader([batch], batch_size=None, num_workers=1)
    with pytest.raises(error):
        Learner(DataLoaders(train, valid, **options), model, nn.MSELoss(), lr=1.0).fit(1)
    assert torch.equal(model.weight, before)


def test_n_inp_by_loader() -> None:
    x, y = points(6, 1)
    seen: list[tuple[str, int, int]] = []

    def look(cb: Any) -> None:
        seen.append((cb.phase, len(cb.xb), len(cb.yb)))
        cb.learn.xb = cb.xb[:1]

    dls = DataLoaders([(x, x, y)], [(x, y)], n_inp={'train': 2, 'valid': 1})
    learn = Learner(dls, nn.Linear(1, 1).double(), nn.MSELoss(), cbs=Callback(before_batch=look))
    learn.logger = lambda r: None
    learn.fit(1)
    learn.get_preds()
    learn.get_preds(ds_idx=0)
    learn.validate(ds_idx=0)
    list(learn.predict_iter(ds_idx=0))
    assert seen == [
        ('train', 2, 1),
        ('valid', 1, 1),
        ('predict', 1, 1),
        ('predict', 2, 1),
        ('valid', 2, 1),
        ('predict', 2, 1),
    ]


def test_a_wrong_form_of_the_validation_loader_costs_no_epoch() -> None:
    x, y = points(6, 1)
    steps: list[int] = []
    dls = DataLoaders([(x, x, y)], [(x,)], n_inp=2)
    model = nn.Linear(1, 1).double()
    learn = Learner(dls, model, nn.MSELoss(), cbs=Callback(after_step=lambda cb: steps.append(1)))
    with pytest.raises(BatchError, match='n_inp=2'):
        learn.fit(1)
    assert not steps


# -- streams ---------------------------------------------------------------------------------------


class Counting:
    "Yield batches numbered from 0, endless or `n` of them; `passes` counts how often it was iterated."

    def __init__(self, n: int | None = None) -> None:
        self.n, self.passes = n, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for i in count() if self.n is None else range(self.n):
            yield (
                torch.full((2, 1), float(i), dtype=torch.float64),
                torch.ones(2, 1, dtype=torch.float64),
            )


class Noisy(Counting):
    "Batches with noise from a generator of the loader, and from torch's global generator."

    def __init__(self, n: int | None = None) -> None:
        super().__init__(n)
        self.gen = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield x + torch.rand(2, 1, generator=self.gen, dtype=torch.float64), y


class Numbers(IterableDataset[Any]):
    "Each worker yields its own numbers, with noise."

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for i in range(info.id if info else 0, self.n, info.num_workers if info else 1):
            yield i + torch.rand(1).double(), torch.ones(1).double()


class Stateful(Counting):
    "A stream that saves its position."

    def __init__(self, n: int | None = None) -> None:
        super().__init__(n)
        self.at = self.first = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for i, batch in enumerate(super().__iter__()):
            if i < first:
                continue
            self.at = i + 1
            yield batch
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {'at': self.at}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        self.first = sd['at']


class Notes(Callback):
    "Record the first input of each training batch, and the state at one of them."

    def __init__(self, save_at: int = 0) -> None:
        super().__init__()
        self.seen, self.save_at, self.saved = [], save_at, None

    def before_batch(self) -> None:
        if self.learn.fitting and self.training:
            self.seen.append(float(self.x[0, 0]))

    def batch_checkpoint(self) -> None:
        if self.learn.train_iter == self.save_at:
            self.saved = self.learn.checkpoint_state()

    def epoch_checkpoint(self) -> None:
        if self.save_at == -1 - self.epoch:
            self.saved = self.learn.checkpoint_state()

    def state_dict(self) -> None:
        return None


def streaming(dl: Any, n_iter: int, *cbs: Any) -> Learner:
    torch.manual_seed(0)
    dls = DataLoaders(dl, n_iter=n_iter)
    model = nn.Linear(1, 1).double()
    learn = Learner(dls, model, nn.MSELoss(), cbs=[Notes, *cbs], opt_func=torch.optim.SGD, lr=1e-3)
    learn.logger = lambda row: None
    return learn


@pytest.mark.silent('n_iter=3 on an endless stream, three epochs: distinct batches')
def test_an_endless_stream_continues(row: Callable[..., None]) -> None:
    stream = Counting()
    learn = streaming(stream, 3)
    learn.fit(3)
    row(was=3, now=len(set(learn.notes.seen)), independent=9)
    assert learn.notes.seen == list(range(9)) and stream.passes == 1
    learn.fit(1)
    learn.lr_find(num_it=4, show_plot=False)  # takes batches of a pass apart
    learn.fit(1)
    assert learn.notes.seen[9:12] == [9, 10, 11] and learn.notes.seen[-3:] == [12, 13, 14]


def test_a_stream_that_ends_begins_again() -> None:
    stream = Counting(5)
    learn = streaming(stream, 3)
    learn.fit(4)
    assert learn.notes.seen == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1] and stream.passes == 3
    assert [len(streaming(Counting(2), 5).dls.one_batch())] == [2]
    short = streaming(Counting(2), 5)
    short.fit(2)
    assert short.notes.seen == [0, 1] * 5
    with pytest.raises(EmptyLoaderError):
        streaming(Counting(0), 2).fit(1)


def test_an_iterator_continues_as_before() -> None:
    learn = streaming(iter(Counting(9)), 3)
    learn.fit(3)
    assert learn.notes.seen == list(range(9))


def test_a_fit_that_failed_begins_the_stream_again() -> None:
    def fail(cb: Any) -> None:
        if cb.train_iter == 2:
            raise OSError

    learn = streaming(Counting(), 3)
    with pytest.raises(OSError):
        learn.fit(1, cbs=Callback(before_batch=fail))
    learn.fit(1)
    assert learn.notes.seen[-3:] == [0, 1, 2]


LOADERS: dict[str, Callable[[], Any]] = {
    'endless': Noisy,
    'ends': lambda: Noisy(5),
    'stateful': Stateful,
    'stateful ends': lambda: Stateful(5),
    'torch': lambda: DataLoader(Numbers(11), 2),
    'workers': lambda: DataLoader(Numbers(40), 2, num_workers=2),
    'persistent workers': lambda: DataLoader(
        Numbers(12), 2, num_workers=2, persistent_workers=True
    ),
}


@pytest.mark.parametrize('at', [1, 3, 4, 7, -1, -2])
@pytest.mark.parametrize('kind', LOADERS)
def test_a_stream_resumes_exactly(kind: str, at: int) -> None:
    if 'workers' in kind and at not in (4, -2):
        pytest.skip('starting worker processes takes long')
    learn = streaming(LOADERS[kind](), 3)
    learn.notes.save_at = at
    learn.fit(4)
    done = at if at > 0 else -at * 3
    later = streaming(LOADERS[kind](), 3)
    torch.manual_seed(99)
    later.fit(4, resume=learn.notes.saved)
    assert later.notes.seen == learn.notes.seen[done:] and len(learn.notes.seen) == 12
    assert torch.equal(later.model.weight, learn.model.weight)
    for one in (learn, later):
        torch.manual_seed(7)
        one.fit(1)
    assert later.notes.seen[-3:] == learn.notes.seen[-3:]
    for one in (learn, later):
        one.close()
        if hasattr(one.dls.train, '_iterator'):
            # workers that garbage collection ends take five seconds each
            one.dls.train._iterator = None


def test_workers_of_a_stream_run_on() -> None:
    learn = streaming(DataLoader(Numbers(40), 2, num_workers=2), 3)
    learn.fit(2)
    assert [int(x) for x in learn.notes.seen] == [0, 1, 4, 5, 8, 9]
    learn.close()
    assert learn.passes.stream is None


class Shuffled:
    "A loader like accelerate's, whose `state_dict` raises."

    def __init__(self) -> None:
        self.gen = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[Any]:
        for i in torch.randperm(6, generator=self.gen).tolist():
            yield (
                torch.full((2, 1), float(i), dtype=torch.float64),
                torch.ones(2, 1, dtype=torch.float64),
            )

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError('base_dataloader has no state_dict')

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize('at', [2, -1])
def test_a_loader_whose_state_dict_raises_is_resumed_by_replaying(at: int) -> None:
    learn = streaming(Shuffled(), 6)
    learn.notes.save_at = at
    with pytest.warns(UserWarning, match='Shuffled.*AttributeError'):
        learn.fit(2)
    later = streaming(Shuffled(), 6)
    later.fit(2, resume=learn.notes.saved)
    assert later.notes.seen == learn.notes.seen[2 if at == 2 else 6 :]
    assert len(learn.notes.seen) == 12
    assert torch.equal(later.model.weight, learn.model.weight)


# -- the end of a Learner --------------------------------------------------------------------------


def closing(calls: list[str]) -> Callback:
    return Callback(
        close=lambda cb: calls.append('close'), post_close=lambda cb: calls.append('post_close')
    )


@pytest.mark.silent('close events of a Learner that is dropped')
def test_a_dropped_learner_is_closed(row: Callable[..., None]) -> None:
    calls: list[str] = []
    learn = regression(cbs=closing(calls))
    learn.fit(1)
    del learn
    gc.collect()
    regression()  # the next Learner
    row(was=0, now=len(calls), independent=2)
    assert calls == ['close', 'post_close']


def test_a_learner_is_closed_once() -> None:
    calls: list[str] = []
    learn = regression(cbs=closing(calls))
    learn.fit(1)
    learn.close()
    learn.close()
    del learn
    gc.collect()
    learn = regression()
    assert calls == ['close', 'post_close']
    learn = regression(cbs=closing(calls))
    learn.validate()
    learn.close()
    learn.validate()  # open again
    del learn
    gc.collect()
    regression()
    assert calls == ['close', 'post_close'] * 3


def test_a_learner_that_never_ran_is_not_closed() -> None:
    calls: list[str] = []
    learn = regression(cbs=closing(calls))
    del learn
    gc.collect()
    with pytest.raises(LoaderError):
        Learner(3, nn.Linear(1, 1), cbs=closing(calls))
    gc.collect()
    assert not calls
    learn = regression(cbs=Callback())
    learn.fit(1)
    other = copy.deepcopy(learn)
    assert other._owner_pid is None and learn._owner_pid is not None


def test_an_error_of_a_dropped_learner_is_a_warning() -> None:
    def fail(cb: Any) -> None:
        raise OSError(28, 'disk full')

    calls: list[str] = []
    learn = regression(cbs=[Callback(close=fail), closing(calls)])
    learn.fit(1)
    del learn
    gc.collect()
    with pytest.warns(UserWarning, match='OSError'):
        regression()
    assert calls == ['close', 'post_close']


def test_dropping_learners_at_interpreter_exit_is_silent() -> None:
    code = """
import sys, torch
from torch import nn
from learnkit import Callback, Learner
from learnkit.testing import synth_learner
kept = [synth_learner(cbs=Callback(close=lambda cb: print('closed'))) for _ in range(3)]
for learn in kept[:2]:
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
half = Learner.__new__(Learner)
kept[0].me = kept[0]
"""
    command = [sys.executable, '-c', code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.split().count('closed') == 3 and done.stderr == ''


# -- names of events -------------------------------------------------------------------------------


def test_a_misspelled_event_is_named_with_the_closest() -> None:
    with pytest.raises(AttributeError, match='before_step') as caught:
        event.befor_step  # noqa: B018
    assert caught.value.name == 'befor_step' and event.before_step == 'before_step'
    assert not hasattr(event, 'nothing_like_it') and copy.copy(event).after_fit == 'after_fit'


# -- metrics with several values -------------------------------------------------------------------


def errors(pred: Tensor, targ: Tensor) -> dict[str, Any]:
    "Return means over samples, one of them in an inner dict."
    return {'bias': (pred - targ).mean(), 'abs': {'mean': (pred - targ).abs().mean().item()}}


class Extremes(Metric):
    "Keep the least and the largest error."

    def reset(self) -> None:
        self.low, self.high = [], []

    def accumulate(self, learn: Any) -> None:
        error = learn.pred.detach() - learn.y
        self.low.append(float(error.min()))
        self.high.append(float(error.max()))

    @property
    def value(self) -> Any:
        return {'min': min(self.low), 'max': max(self.high), 'bias': 1.0} if self.low else None


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    with torch.no_grad():
        error = model(x) - y
    return {
        'bias': error.mean().item(),
        'abs_mean': error.abs().mean().item(),
        'min': error.min().item(),
        'max': error.max().item(),
        'extremes_bias': 1.0,
        'mean_squared': error.square().mean().item(),
    }


def squared(pred: Tensor, targ: Tensor) -> Tensor:
    return (pred - targ).square().mean()


def make_several() -> Any:
    "Return a metric of torchmetrics whose compute() is a dict."

    class Several(pytest.importorskip('torchmetrics').Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_state('total', torch.zeros((), dtype=torch.float64), 'sum')
            self.add_state('n', torch.zeros((), dtype=torch.float64), 'sum')

        def update(self, pred: Tensor, targ: Tensor) -> None:
            self.total += (pred - targ).sum()
            self.n += len(pred)

        def compute(self) -> dict[str, Tensor]:
            return {'tm_bias': self.total / self.n, 'tm_n': self.n}

    return Several()


@pytest.mark.silent('column of a Metric whose value is a dict: least error on the validation set')
def test_dicts_become_columns(row: Callable[..., None]) -> None:
    metrics = [errors, Extremes, {'mean_squared': squared}, make_several()]
    learn = regression(metrics=metrics)
    rows: list[Any] = []
    learn.logger = rows.append
    learn.fit(2)
    expected = by_hand(learn.model, *points(6, 2))
    expected |= {'tm_bias': expected['bias'], 'tm_n': 6.0}
    last = {name: learn.history[-1][name] for name in expected}
    row(was="{'min': ...} in one column", now=last['min'], independent=expected['min'])
    assert last == pytest.approx(expected, rel=1e-12)
    names = (
        'epoch train_loss valid_loss bias abs_mean min max extremes_bias mean_squared tm_bias '
        'tm_n time'
    ).split()
    assert list(learn.recorder.metric_names) == names
    assert [len(r) for r in rows] == [len(names)] * 2
    assert list(rows[1][3:-1]) == pytest.approx([last[n] for n in names[3:-1]])
    assert set(names[1:-1]) <= set(learn.metric_names())
    values = learn.validate()
    assert list(values[1:]) == pytest.approx([expected[n] for n in names[3:-1]], rel=1e-12)
    fresh = regression(metrics=metrics)
    fresh.model.load_state_dict(learn.model.state_dict())
    assert fresh.validate() == values


def test_dicts_of_several_loaders_and_of_training() -> None:
    torch.manual_seed(0)
    day, night = points(6, 2), points(5, 3)
    train = points(8, 1)
    dls = DataLoaders([train], {'day': [day], 'night': Evaluator([night], metrics=Extremes)})
    learn = Learner(
        dls,
        nn.Linear(1, 1).double(),
        nn.MSELoss(),
        metrics=errors,
        opt_func=torch.optim.SGD,
        lr=0.0,
        default_cbs=False,
        cbs=[TrainEvalCallback, Recorder(train_metrics=True)],
    )
    learn.logger = lambda r: None
    learn.fit(1)
    of = {
        name: by_hand(learn.model, *data)
        for name, data in (('train', train), ('day', day), ('night', night))
    }
    expected = {
        'train_bias': of['train']['bias'],
        'train_abs_mean': of['train']['abs_mean'],
        'day/bias': of['day']['bias'],
        'day/abs_mean': of['day']['abs_mean'],
        'night/min': of['night']['min'],
        'night/max': of['night']['max'],
        'night/bias': 1.0,
    }
    assert {name: learn.history[0][name] for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize('column', ['bias', 'max', 'tm_n', 'valid_loss', 'mean_squared'])
def test_a_tracker_watches_a_column_of_a_dict(column: str) -> None:
    tracker = TrackerCallback(column, comp=np.less)
    metrics = [errors, Extremes, {'mean_squared': squared}, make_several()]
    learn = regression(metrics=metrics, cbs=tracker)
    best_metric = BestMetric('valid_loss', targets=[column])
    learn.fit(4, cbs=best_metric)
    assert tracker.best == pytest.approx(min(r[column] for r in learn.history), rel=1e-12)
    assert best_metric.at_best[column] == min(learn.history, key=lambda r: r['valid_loss'])[column]
    with pytest.raises(MetricError, match='no_such'):
        learn.fit(1, cbs=TrackerCallback('no_such'))


def test_dicts_survive_a_resume() -> None:
    def make(*cbs: Any) -> Learner:
        return regression(
            metrics=[errors, Extremes],
            default_cbs=False,
            cbs=[TrainEvalCallback, Recorder(train_metrics=True), *cbs],
        )

    saved: list[Any] = []

    def save(cb: Any) -> None:
        if cb.train_iter == 3:
            saved.append(cb.learn.checkpoint_state())

    learn, later = make(), make()
    learn.fit(3, cbs=Callback(batch_checkpoint=save))
    later.fit(3, resume=saved[0])
    rows = [[{**r, 'time': 0} for r in one.history] for one in (learn, later)]
    assert rows[0] == rows[1] and 'train_bias' in rows[0][1] and 'valid_extremes_bias' in rows[0][1]


def test_dicts_merge_over_processes() -> None:
    x, y = points(9, 4)
    parts = [AvgMetric(errors) for _ in range(3)]  # the last one has no batch
    for part, rows in zip(parts, (slice(0, 4), slice(4, 9)), strict=False):
        part.accumulate(SimpleNamespace(pred=x[rows], yb=(y[rows],), xb=(x[rows],)))
    whole = AvgMetric(errors)
    whole.merge([shared_state(part) for part in parts])
    expected = {'bias': (x - y).mean().item(), 'abs_mean': (x - y).abs().mean().item()}
    assert whole.value == pytest.approx(expected)


def test_bad_dicts_are_errors_before_the_first_step() -> None:
    for bad in ({}, {'a': torch.ones(2)}, {'a': {}}, {'a': 'b'}):
        learn = regression(metrics=lambda pred, targ, bad=bad: bad)
        before = learn.model.weight.clone()
        with pytest.raises(MetricError):
            learn.fit(1)
        assert torch.equal(learn.model.weight, before)


@pytest.mark.silent(
    'a callback changes a batch in place: largest change of the data of from_tensors'
)
@pytest.mark.parametrize('form', ['tensor', 'numpy'])
def test_a_batch_that_is_changed_in_place_leaves_the_data(row: Any, form: str) -> None:
    sets = points(8, 1), points(6, 2)
    before = copy.deepcopy(sets)
    given = [(x.numpy(), y.numpy()) if form == 'numpy' else (x, y) for x, y in sets]
    for shuffle in (True, False):
        dls = DataLoaders.from_tensors(*given, bs=4, shuffle=shuffle)
        learn = Learner(dls, nn.Linear(1, 1).double(), nn.MSELoss())
        learn.logger = lambda r: None

        def halve(cb: Callback) -> None:
            for t in (*cb.learn.xb, *cb.learn.yb):
                t.mul_(0.5)

        learn.fit(1, cbs=Callback(before_batch=halve))
        learn.validate(cbs=Callback(before_batch=halve))
        learn.get_preds(cbs=Callback(before_batch=halve))
    pairs = [
        (a, b) for old, new in zip(before, sets, strict=True) for a, b in zip(old, new, strict=True)
    ]
    change = max((a - b).abs().max().item() for a, b in pairs)
    if form == 'numpy':
        row(was=1.4, now=change, independent=0)
    assert change == 0


CROSS_ENTROPIES = (
    nn.CrossEntropyLoss(),
    nn.functional.cross_entropy,
    nn.CrossEntropyLoss(label_smoothing=0.1),
    CrossEntropyLossFlat(),
)


@pytest.mark.silent('cross-entropy of one output and numbers: loss of every epoch')
@pytest.mark.parametrize('whole', [False, True])
def test_cross_entropy_of_one_class_is_refused(row: Any, whole: bool) -> None:
    x, y = points(8, 1)
    targets = torch.zeros(8, dtype=torch.long) if whole else y
    for loss in CROSS_ENTROPIES:
        dls = DataLoaders.from_tensors((x, targets), bs=4)
        learn = Learner(dls, nn.Linear(1, 1).double(), loss)
        before = learn.model.weight.clone()
        with pytest.raises(LossError, match=r'\(4, 1\) have one class.*`MSELoss\(\)`'):
            learn.fit(1)
        assert torch.equal(learn.model.weight, before)
    if not whole:
        row(was=0.0, now='LossError', independent=(-y.softmax(1) * torch.zeros(8, 1)).sum().item())


def test_cross_entropy_of_a_flat_output_is_refused() -> None:
    x, y = points(8, 1)
    model = nn.Sequential(nn.Linear(1, 1), nn.Flatten(0)).double()
    learn = Learner(DataLoaders.from_tensors((x, y[:, 0]), bs=4), model, nn.CrossEntropyLoss())
    with pytest.raises(LossError, match='one sample in 4 classes'):
        learn.fit(1)


@pytest.mark.parametrize('loss', CROSS_ENTROPIES[:2])
def test_numbers_in_place_of_probabilities_are_warned_of(loss: Any) -> None:
    x, _ = points(8, 1)
    share = torch.softmax(torch.randn(8, 3, dtype=torch.float64), 1)
    without_a_class = share * torch.tensor([1.0, 0.0] * 4)[:, None]

    def fit(y: Tensor) -> None:
        learn = Learner(DataLoaders.from_tensors((x, y), bs=8), nn.Linear(1, 3).double(), loss)
        learn.logger = lambda r: None
        learn.fit(1)

    fit(share)
    fit(without_a_class)
    for y in (share * 3, share - 0.5, torch.eye(3, dtype=torch.float64)[[0, 1] * 4] * 2):
        with pytest.warns(UserWarning, match='these are not: they are negative, or do not sum'):
            fit(y)
