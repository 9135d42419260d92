"""Objects that a run holds: tensors and graphs are freed in time, loaders are closed, no batch waits for the device.

The device is simulated by tensors on `meta`. A dispatch mode answers transfers to the host, which would raise
otherwise, and records the event of each transfer."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learnkit import (
    SGD,
    AvgMetric,
    Callback,
    CancelBackwardException,
    CancelBatchException,
    DataLoaders,
    GradientAccumulation,
    Learner,
    Periodic,
    TrainEvalCallback,
    accuracy,
)
from tests.helpers.learners import quiet_learner

pytestmark = pytest.mark.filterwarnings('ignore:microbatch=.* on its own')

aten = torch.ops.aten
ASKS = (aten._local_scalar_dense, aten.is_nonzero, aten.equal)  # item, float, bool, tolist ...


class Waits(TorchDispatchMode):
    "Answer transfers of tensors on `meta` to the host, and count them by event."

    def __init__(self) -> None:
        super().__init__()
        self.event, self.counts = '', Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, op = kwargs or {}, func.overloadpacket
        on_device = any(isinstance(o, Tensor) and o.is_meta for o in tree_leaves((args, kwargs)))
        moves = op is aten._to_copy and torch.device(kwargs.get('device') or 'meta').type == 'cpu'
        copies = op is aten.copy_ and not args[0].is_meta
        if not (on_device and (op in ASKS or moves or copies)):
            return func(*args, **kwargs)
        self.counts[self.event] += 1
        if op in ASKS:
            return 0.5
        return (
            args[0].zero_() if op is aten.copy_ else torch.zeros(args[0].shape, dtype=args[0].dtype)
        )


class Watch(Callback):
    "Set the mode's event before other callbacks run."

    order = -1000

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def run_event(self, event_name: str) -> None:
        self._waits.event = event_name


def waits_of_fit(n_batches: int = 5, bs: int = 4, **kwargs: Any) -> Counter[str]:
    "Fit a classifier for an epoch on the simulated device, validate on two batches, and return the waits by event."
    x, y = torch.randn(n_batches * bs, 3), torch.randint(0, 2, (n_batches * bs,))
    with Waits() as waits:
        dls = DataLoaders.from_tensors((x, y), (x[: 2 * bs], y[: 2 * bs]), bs=bs, device='meta')
        model = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2)
        ).to('meta')
        options = {'loss_func': nn.CrossEntropyLoss(), 'opt_func': torch.optim.AdamW, **kwargs}
        learn = Learner(dls, model, **options)
        learn.add_cb(Watch(waits))
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
    return waits.counts


def positive(xb: tuple[Tensor, ...], yb: tuple[Tensor, ...]) -> Tensor:
    return (yb[0] >= 0).sum()


def log_mean(cb: Any) -> None:
    cb.learn.log('mean_pred', cb.pred.mean())


@pytest.mark.parametrize(
    ('kwargs', 'at_end'),
    [
        ({}, {'after_train': 1, 'after_validate': 1}),
        ({'opt_func': partial(SGD, mom=0.9, wd=0.1)}, {'after_train': 1, 'after_validate': 1}),
        ({'metrics': [accuracy]}, {'after_train': 1, 'after_validate': 2}),
        # the first batch is compared with its halves, once
        (
            {'metrics': AvgMetric(accuracy, on='both')},
            {'after_train': 2, 'after_validate': 2, 'before_backward': 3},
        ),
        ({'microbatch': 2}, {'after_train': 1, 'after_validate': 1}),
        ({'microbatch': 2, 'weight_func': positive}, {'after_train': 1, 'after_validate': 1}),
        (
            {'metrics': AvgMetric(accuracy, on='both'), 'microbatch': 2},
            {'after_train': 2, 'after_validate': 2, 'before_backward': 3},
        ),
        # the step with the samples left over, in after_train
        (
            {
                'loss_func': nn.CrossEntropyLoss(torch.ones(2)),
                'microbatch': 2,
                'cbs': GradientAccumulation(8),
            },
            {'after_step': 1, 'after_validate': 1},
        ),
        (
            {'cbs': Callback(after_loss=log_mean)},
            {'after_train': 1, 'after_validate': 1, 'after_epoch': 2},
        ),
        (
            {'cbs': Periodic(every='2ba', on_every=lambda cb: None)},
            {'after_train': 1, 'after_validate': 1},
        ),
        ({'default_cbs': False, 'cbs': TrainEvalCallback}, {}),
    ],
    ids=(
        'plain sgd metric train-metric pieces weights metric-of-pieces class-weights log periodic '
        'bare'
    ).split(),
)
def test_no_batch_waits_for_the_device(kwargs: dict[str, Any], at_end: dict[str, int]) -> None:
    assert waits_of_fit(**kwargs) == at_end


def test_losses_travel_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('learnkit.metrics.base.SEND_EVERY', 8)
    counts = waits_of_fit(2 * 8 + 5, opt_func=torch.optim.SGD)
    assert counts == {'after_batch': 2, 'after_train': 1, 'after_validate': 1}


def test_the_count_sees_what_a_callback_asks() -> None:
    counts = waits_of_fit(cbs=Callback(after_loss=lambda cb: bool(cb.loss > 0)))
    assert counts['after_loss'] == 5 + 2


# What is held


class Watched(nn.Module):
    "A linear model that records at each forward pass how many tensors of the previous pass are alive."

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 4)
        self.alive: list[int] = []
        self.made: list[weakref.ref[Tensor]] = []

    def n_alive(self) -> int:
        return sum(ref() is not None for ref in self.made)

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(self.n_alive())
        hidden = self.linear(x)
        pred = hidden.exp()  # keeps its result for the backward pass
        self.made = [weakref.ref(hidden), weakref.ref(pred)]
        return pred


def squares(pred: Tensor, y: Tensor) -> Tensor:
    return (pred.mean(1, keepdim=True) - y).square().mean()


def mean_pred(pred: Tensor, y: Tensor) -> Tensor:
    return pred.mean()


def watched(**kwargs: Any) -> Any:
    x = torch.randn(16, 1)
    dls = DataLoaders.from_tensors((x, 2 * x), (x[:8], 2 * x[:8]), bs=4, device='cpu')
    return quiet_learner(dls, Watched(), squares, opt_func=torch.optim.SGD, **kwargs)


@pytest.fixture
def no_gc() -> Iterator[None]:
    "Disable garbage collection, so that tensors in reference cycles count as held."
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def cancels(exception: type[Exception]) -> Callable[[Any], None]:
    def cancel(cb: Any) -> None:
        if cb.training:
            raise exception

    return cancel


@pytest.mark.usefixtures('no_gc')
@pytest.mark.parametrize(
    'kwargs',
    [
        {},
        {'microbatch': 2},
        {'metrics': AvgMetric(mean_pred, on='both')},
        {'metrics': AvgMetric(mean_pred, on='both'), 'microbatch': 2},
        {'cbs': Callback(after_loss=cancels(CancelBatchException))},
        {'cbs': Callback(before_backward=cancels(CancelBackwardException))},
    ],
    ids=['plain', 'pieces', 'metric', 'metric-of-pieces', 'cancel-batch', 'cancel-backward'],
)
def test_a_prediction_is_gone_when_the_next_forward_pass_begins(kwargs: dict[str, Any]) -> None:
    learn = watched(**kwargs)
    with learn.no_bar():
        learn.fit(2)
    assert len(learn.model.alive) >= 2 * (4 + 2)
    assert not any(learn.model.alive)
    assert not learn.model.n_alive()


@pytest.mark.usefixtures('no_gc')
@pytest.mark.parametrize(
    'evaluate', [lambda learn: learn.validate(), lambda learn: learn.get_preds(with_input=True)]
)
def test_evaluation_holds_one_prediction_at_a_time_on_the_device(
    evaluate: Callable[[Any], Any],
) -> None:
    learn = watched()
    with learn.no_bar():
        evaluate(learn), evaluate(learn)
    assert learn.model.alive == [0] * 4
    assert not learn.model.n_alive()


@pytest.mark.usefixtures('no_gc')
def test_a_failed_fit_holds_nothing_once_its_exception_is_gone() -> None:
    def fail(cb: Any) -> None:
        if cb.train_iter == 2:
            raise OSError('disk')

    learn = watched()
    with learn.no_bar(), pytest.raises(OSError, match='disk'):
        learn.fit(1, cbs=Callback(after_batch=fail))
    assert not learn.model.n_alive()
    assert all(p.grad is None for p in learn.model.parameters())


@pytest.mark.usefixtures('no_gc')
def test_the_graph_is_free_after_the_step() -> None:
    states = []

    def look(cb: Any) -> None:
        try:
            torch.autograd.grad(cb.learn.loss_grad, list(cb.learn.model.parameters()))
        except RuntimeError as e:
            states.append('second time' in str(e))

    learn = watched()
    with learn.no_bar():
        learn.fit(1, cbs=Callback(after_step=look))
    assert states == [True] * 4


@pytest.mark.usefixtures('no_gc')
def test_one_batch_is_held_while_the_next_is_drawn() -> None:
    made: list[weakref.ref[Tensor]] = []
    alive = []

    class Loader:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(4):
                alive.append(sum(ref() is not None for ref in made))
                x = torch.randn(4, 1)
                made.append(weakref.ref(x))
                batch = (x, 2 * x)
                del x
                yield batch
                del batch

    learn = Learner(DataLoaders(Loader(), device='cpu'), Watched(), squares)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)
    # the last batch of an epoch stays until the next one has its first
    assert alive == [0, *[1] * 7]
    assert not any(ref() is not None for ref in made)


# Loaders


class Closing:
    "A loader that records when its iterator is closed; loaders with workers stop them at this point."

    def __init__(self) -> None:
        self.closed = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        try:
            for _ in range(4):
                yield torch.ones(4, 1), torch.ones(4, 1)
        finally:
            self.closed += 1


def test_a_stopped_epoch_closes_its_iterator() -> None:
    loader = Closing()
    learn = Learner(DataLoaders(loader, device='cpu'), Watched(), squares)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, cbs=Callback(after_batch=lambda cb: cb.learn.stop()))
    assert loader.closed == 1


@pytest.mark.parametrize('error', [OSError('disk'), KeyboardInterrupt()], ids=['error', 'ctrl-c'])
@pytest.mark.parametrize('is_closed', [False, True], ids=['fit', 'close'])
def test_the_iterator_of_a_failed_batch_is_kept_until_the_next_fit_or_close(
    error: BaseException, is_closed: bool
) -> None:
    def fail(cb: Any) -> None:
        if cb.train_iter == 2:
            raise error

    loader, seen = Closing(), []
    learn = Learner(DataLoaders(loader, device='cpu'), Watched(), squares)
    watch = Callback(after_batch=fail, cleanup=lambda cb: seen.append(loader.closed))
    with learn.no_bar(), pytest.raises(type(error)):
        learn.fit(1, cbs=watch)
    assert seen == [0] and learn.paused is not None
    if is_closed:
        learn.close()
        assert loader.closed == 1
        return
    learn.remove_cb(watch)
    with learn.no_bar():
        learn.fit(1, cbs=Callback(before_fit=lambda cb: seen.append(loader.closed)))
    assert seen == [0, 1]


def test_the_iterator_of_a_failed_batch_ends_before_the_learner_that_is_dropped() -> None:
    """A finalizer alone keeps it: in the garbage collection of a Learner, which is a cycle of references, queues of
    workers end in any order, and torch waits 5 s for each worker."""

    def fail(cb: Any) -> None:
        raise OSError('disk')

    learn = Learner(DataLoaders(Closing(), device='cpu'), Watched(), squares)
    with learn.no_bar(), pytest.raises(OSError, match='disk'):
        learn.fit(1, cbs=Callback(after_batch=fail))
    open_pass = learn.run.pause.open_pass
    assert open_pass.iterator is not None
    assert not any(open_pass.iterator in gc.get_referents(o) for o in (open_pass, vars(open_pass)))
