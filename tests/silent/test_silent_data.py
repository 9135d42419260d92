"""Evaluations inside handlers, targets, streams, metrics with several values, the end of a Learner."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from learnkit import Callback, Learner
from learnkit.core.errors import BatchError, EmptyLoaderError, LoaderError, LossError, MetricError
from learnkit.data.dataloaders import DataLoaders
from learnkit.losses import CrossEntropyLossFlat
from tests.helpers.learners import quiet_learner


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
    return quiet_learner(dls, nn.Linear(1, 1).double(), **options)


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
def test_a_loss_of_the_predictions_alone(form: str) -> None:
    torch.manual_seed(0)
    dls = DataLoaders(unlabeled(form), unlabeled(form, 2))
    learn = quiet_learner(dls, Encoder(), spread, opt_func=torch.optim.SGD, lr=0.1)
    losses: list[float] = []
    learn.fit(1, cbs=Callback(after_batch=lambda cb: losses.append(cb.loss.item())))
    torch.manual_seed(0)
    model = Encoder()
    expected = plain_loop(unlabeled('tensor'), lambda m, x: spread(m(x)), model)
    with torch.no_grad():
        valid = sum(spread(model(x)).item() for x in unlabeled('tensor', 2)) / 2
    assert losses[:4] == pytest.approx(expected, rel=1e-12)
    assert learn.history[0]['valid_loss'] == pytest.approx(valid, rel=1e-12)
    assert learn.validate()[0] == pytest.approx(valid, rel=1e-12)
    preds, targs = learn.get_preds()
    assert targs is None and preds.shape == (10, 2)


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


def test_targets_of_dicts_by_name() -> None:
    torch.manual_seed(0)
    dls = DataLoaders(boxed(), boxed(2), targets=('boxes', 'labels'))
    learn = quiet_learner(dls, Detector(), detection_loss, opt_func=torch.optim.SGD, lr=0.1)
    losses: list[float] = []
    learn.fit(1, cbs=Callback(after_batch=lambda cb: losses.append(cb.loss.item())))
    torch.manual_seed(0)
    model = Detector()
    loss_of = lambda m, b: detection_loss(m(b['x']), b['boxes'], b['labels'])
    expected = plain_loop(boxed(), loss_of, model)
    assert losses[:4] == pytest.approx(expected, rel=1e-12)
    _, targs = learn.get_preds()
    assert torch.equal(targs[0], torch.cat([b['boxes'] for b in boxed(2)]))
    assert targs[1].dtype == torch.int64
    preds, none = learn.get_preds(dl=[{'x': boxed(1)[0]['x']}])
    assert none is None and len(preds) == 2


@pytest.mark.parametrize(
    ('batch', 'options', 'error'),
    [
        ({'x': 1, 'labels': 2}, {'targets': ('boxes', 'labels')}, BatchError),
        ('tuple', {'targets': 'labels'}, BatchError),
        ('tuple', {'n_inp': {'valid': 4}}, BatchError),
        ('tuple', {'n_inp': {'test': 1}}, LoaderError),
        ('tuple', {'n_inp': 1, 'targets': 'y'}, LoaderError),
    ],
)
def test_a_form_that_cannot_be_is_an_error_before_the_first_step(
    batch: Any, options: dict[str, Any], error: type[Exception]
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
    with pytest.raises(error):
        Learner(DataLoaders(train, [batch], **options), model, nn.MSELoss(), lr=1.0).fit(1)
    assert torch.equal(model.weight, before)


def test_n_inp_by_loader() -> None:
    x, y = points(6, 1)
    seen: list[tuple[str, int, int]] = []

    def look(cb: Any) -> None:
        seen.append((cb.phase, len(cb.xb), len(cb.yb)))
        cb.learn.xb = cb.xb[:1]

    dls = DataLoaders([(x, x, y)], [(x, y)], n_inp={'train': 2, 'valid': 1})
    learn = quiet_learner(
        dls, nn.Linear(1, 1).double(), nn.MSELoss(), cbs=Callback(before_batch=look)
    )
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
    return quiet_learner(
        dls, model, nn.MSELoss(), cbs=[Notes, *cbs], opt_func=torch.optim.SGD, lr=1e-3
    )


def test_an_endless_stream_continues() -> None:
    stream = Counting()
    learn = streaming(stream, 3)
    learn.fit(3)
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
    'torch': lambda: DataLoader(Numbers(11), 2),
    'workers': lambda: DataLoader(Numbers(40), 2, num_workers=2),
}


@pytest.mark.parametrize(
    ('kind', 'at'), [*product(['endless', 'ends', 'torch'], [1, 4, -1, -2]), ('workers', 4)]
)
def test_a_stream_resumes_exactly(kind: str, at: int) -> None:
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
        one.close()
    assert later.notes.seen[-3:] == learn.notes.seen[-3:]


# -- the end of a Learner --------------------------------------------------------------------------


def closing(calls: list[str]) -> Callback:
    return Callback(
        close=lambda cb: calls.append('close'), post_close=lambda cb: calls.append('post_close')
    )


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


# -- metrics with several values -------------------------------------------------------------------


def errors(pred: Tensor, targ: Tensor) -> dict[str, Any]:
    "Return means over samples, one of them in an inner dict."
    return {'bias': (pred - targ).mean(), 'abs': {'mean': (pred - targ).abs().mean().item()}}


def test_bad_dicts_are_errors_before_the_first_step() -> None:
    for bad in ({}, {'a': torch.ones(2)}, {'a': {}}, {'a': 'b'}):
        learn = regression(metrics=lambda pred, targ, bad=bad: bad)
        before = learn.model.weight.clone()
        with pytest.raises(MetricError):
            learn.fit(1)
        assert torch.equal(learn.model.weight, before)


CROSS_ENTROPIES = (
    nn.CrossEntropyLoss(),
    nn.functional.cross_entropy,
    nn.CrossEntropyLoss(label_smoothing=0.1),
    CrossEntropyLossFlat(),
)


@pytest.mark.parametrize('whole', [False, True])
def test_cross_entropy_of_one_class_is_refused(whole: bool) -> None:
    x, y = points(8, 1)
    targets = torch.zeros(8, dtype=torch.long) if whole else y
    for loss in CROSS_ENTROPIES:
        dls = DataLoaders.from_tensors((x, targets), bs=4)
        learn = Learner(dls, nn.Linear(1, 1).double(), loss)
        before = learn.model.weight.clone()
        with pytest.raises(LossError, match=r'\(4, 1\) have one class.*`MSELoss\(\)`'):
            learn.fit(1)
        assert torch.equal(learn.model.weight, before)


def test_numbers_in_place_of_probabilities_are_warned_of() -> None:
    x, _ = points(8, 1)
    share = torch.softmax(torch.randn(8, 3, dtype=torch.float64), 1)

    def fit(y: Tensor) -> None:
        data = DataLoaders.from_tensors((x, y), bs=8)
        learn = quiet_learner(data, nn.Linear(1, 3).double(), nn.CrossEntropyLoss())
        learn.fit(1)

    fit(share)
    fit(share * torch.tensor([1.0, 0.0] * 4)[:, None])  # samples without a class
    for y in (share * 3, share - 0.5):
        with pytest.warns(UserWarning, match='these are not: they are negative, or do not sum'):
            fit(y)
