"""Streamed predictions: the numbers and events of get_preds, and an unchanged Learner between batches."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import (
    Callback,
    CancelBatchException,
    DataLoaders,
    FitError,
    Learner,
    TensorLoader,
    mae,
)
from learnkit.callbacks.predictions import MCDropoutCallback
from learnkit.core.errors import CancelFitException, CancelValidException

N = 14


class Logits(nn.CrossEntropyLoss):
    def activation(self, out: Tensor) -> Tensor:
        return out.softmax(-1)

    def decodes(self, out: Tensor) -> Tensor:
        return out.argmax(-1)


def make(cbs: Any = None, valid: Any = None, shuffle: bool = False) -> Learner:
    torch.manual_seed(2)
    x, y = torch.randn(N, 3), torch.randint(4, (N,))
    valid = TensorLoader(x, y, bs=4, shuffle=shuffle, seed=1) if valid is None else valid
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    dls = DataLoaders(TensorLoader(x, y, bs=7, shuffle=True, seed=0), valid)
    learn = Learner(dls, model, Logits(), lr=0.1, cbs=cbs, metrics=mae)
    learn.metrics = []
    learn.remove_cb(learn.progress)
    learn.logger = print
    return learn


def state(learn: Learner) -> list[Any]:
    "Return everything that a prediction must not change."
    names = (
        'epoch n_epoch train_iter pct_train iter n_iter phase dl_name training fitting create_mbar'
    ).split()
    opt = None if learn.opt is None else learn.opt.state_dict()
    return [
        {n: getattr(learn, n) for n in names} | {'run': copy(learn.run)},
        [m.training for m in learn.model.modules()],
        list(learn.cbs),
        {k: v.tolist() for k, v in learn.model.state_dict().items()},
        str(opt),
        learn.history[:],
        learn.logger,
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
        torch.is_grad_enabled(),
        [
            g.get_state().tolist()
            for dl in learn.dls
            if (g := getattr(dl, 'generator', None)) is not None
        ],
        learn.loss_func.reduction,
        learn.dl,
        learn.xb,
        learn.pred if 'pred' in vars(learn) else None,
    ]


def joined(stream: Any) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*stream, strict=True)]


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'with_input': True, 'with_decoded': True, 'with_loss': True},
        {'act': torch.neg},
        {'ds_idx': 0},
        {'dl': 'valid'},
    ],
)
def test_joined_they_are_what_get_preds_gives(options: Any) -> None:
    learn = make(shuffle=True)
    expected = learn.get_preds(reorder=False, **options)
    got = joined(learn.predict_iter(**options))
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))
    # no generator has moved on
    assert all(map(torch.equal, joined(learn.predict_iter(**options)), expected))


def test_random_numbers_continue_from_batch_to_batch() -> None:
    learn = make()
    torch.manual_seed(4)
    expected = learn.get_preds(cbs=MCDropoutCallback())[0]
    torch.manual_seed(4)
    got = []
    for preds, _ in learn.predict_iter(cbs=MCDropoutCallback()):
        got.append(preds)
        torch.rand(5), learn.model.train()
    assert torch.equal(torch.cat(got), expected)


def test_it_fires_the_events_of_get_preds() -> None:
    events_seen: list[Any] = []

    class EventCounter(Callback):
        def run_event(self, event_name: str) -> None:
            events_seen.append(
                (
                    event_name,
                    self.phase,
                    self.training,
                    self.fitting,
                    self.learn.run.levels,
                    self.learn.run.depth,
                )
            )

    learn = make(EventCounter())
    events_seen.clear()
    learn.get_preds()
    expected = events_seen[:]
    events_seen.clear()
    for _ in learn.predict_iter():
        pass
    assert events_seen == expected and [e for e, *_ in events_seen].count('cleanup') == 1


def is_free(lock: Any) -> bool:
    "Return True if another thread can take the lock."
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(blocking=False))
        if got[0]:
            lock.release()

    thread = Thread(target=take)
    thread.start(), thread.join()
    return got[0]


def test_between_batches_the_learner_is_as_it_was() -> None:
    learn = make()
    with learn.no_logging():
        learn.fit(1)
    learn.model[0].eval()
    before, n = state(learn), 0
    for _ in learn.predict_iter(with_loss=True):
        now, n = state(learn), n + 1
        assert now[2][: len(before[2])] == before[2]
        assert now[:2] + now[3:] == before[:2] + before[3:]
        assert is_free(learn.lock)
    assert n == 4 and state(learn) == before and is_free(learn.lock)


def test_what_the_consumer_draws_and_sets_stays() -> None:
    learn = make()
    torch.manual_seed(9)
    expected = torch.rand(4)
    torch.manual_seed(9)
    got = []
    for _ in learn.predict_iter():
        got.append(torch.rand(1))
        learn.model.eval()
    assert torch.equal(torch.cat(got), expected) and not learn.model.training


class Ends(Callback):
    "Records how a run ended."

    def __init__(self) -> None:
        self.events_seen: list[str] = []

    def after_cancel_validate(self) -> None:
        self.events_seen.append('after_cancel_validate')

    def after_validate(self) -> None:
        self.events_seen.append('after_validate')

    def after_predict(self) -> None:
        self.events_seen.append('after_predict')

    def after_fit(self) -> None:
        self.events_seen.append('after_fit')

    def after_error(self) -> None:
        self.events_seen.append('after_error')

    def cleanup(self) -> None:
        self.events_seen.append('cleanup')


EARLY = ['after_cancel_validate', 'after_validate', 'after_predict', 'after_fit', 'cleanup']


def leave_loop(stream: Any) -> None:
    for _ in stream:
        break


def close(stream: Any) -> None:
    next(stream), stream.close(), stream.close()
    assert list(stream) == []


def leave_with_block(stream: Any) -> None:
    with stream:
        next(stream)


def raise_in_loop(stream: Any) -> None:
    with suppress(KeyError):
        for _ in stream:
            raise KeyError('mine')


@pytest.mark.parametrize('leave', [leave_loop, close, leave_with_block, raise_in_loop])
def test_left_early_it_ends_like_a_cancelled_validation(leave: Any) -> None:
    ends = Ends()
    learn = make(ends)
    before = state(learn)
    leave(learn.predict_iter(with_loss=True))
    gc.collect()
    assert ends.events_seen == EARLY and state(learn) == before
    with learn.no_logging():
        learn.fit(1)
    assert len(learn.history) == 1


def test_never_begun_it_does_nothing() -> None:
    ends = Ends()
    learn = make(ends)
    stream = learn.predict_iter()
    stream.close()
    assert ends.events_seen == [] and list(stream) == []


def run_action(learn: Learner, what: str) -> None:
    with learn.no_logging():
        {
            'fit': partial(learn.fit, 1),
            'validate': learn.validate,
            'preds': learn.get_preds,
            'inner': partial(learn.get_preds, inner=True),
            'close': learn.close,
            'stream': lambda: next(learn.predict_iter()),
        }[what]()


@pytest.mark.parametrize('what', ['fit', 'validate', 'preds', 'inner', 'stream', 'close'])
def test_a_learner_that_continues_ends_the_stream_first_with_an_error(what: str) -> None:
    ends = Ends()
    learn = make(ends)
    stream = learn.predict_iter()
    next(stream)
    run_action(learn, what)
    assert ends.events_seen[:5] == EARLY
    with pytest.raises(FitError, match='sink'):
        next(stream)
    assert learn.run.depth == 0 and learn.logger is print


def test_a_fit_after_it_was_ended_is_the_fit_without_it() -> None:
    def trained(with_stream: bool) -> list[Any]:
        learn = make()
        torch.manual_seed(0)
        stream = learn.predict_iter() if with_stream else iter([0])
        next(stream)
        with learn.no_logging():
            learn.fit(2)
        rows = [{k: v for k, v in row.items() if k != 'time'} for row in learn.history]
        return [
            {k: v.tolist() for k, v in learn.model.state_dict().items()},
            rows,
            torch.get_rng_state().tolist(),
        ]

    assert trained(True) == trained(False)


def test_two_streams_at_once_are_kept_apart() -> None:
    learn = make()
    with pytest.raises(FitError, match='started something else'):
        for _ in zip(learn.predict_iter(), learn.predict_iter(ds_idx=0), strict=True):
            pass
    assert learn.run.depth == 0


def test_inside_a_fit_it_is_used_up_or_ended_at_the_next_event() -> None:
    kept: list[Any] = []

    def half(cb: Any) -> None:
        kept.append(cb.learn.predict_iter(inner=True))
        next(kept[-1])
        got = joined(cb.learn.predict_iter(ds_idx=0, inner=True))
        assert got[0].shape == (N, 4)

    def trained(cbs: Any) -> Any:
        learn, ends = make(), Ends()
        with learn.no_logging():
            learn.fit(2, cbs=[ends, *cbs])
        return [v.tolist() for v in learn.model.state_dict().values()], ends.events_seen

    weights, events_seen = trained([Callback(after_epoch=half)])
    assert weights == trained([])[0]
    assert events_seen.count('cleanup') == 1
    assert events_seen.count('after_cancel_validate') == 2
    for stream in kept:
        with pytest.raises(FitError):
            next(stream)


def test_inner_ones_leave_out_the_events_of_fit_and_epoch() -> None:
    events_seen: list[str] = []

    class EventCounter(Callback):
        def run_event(self, event_name: str) -> None:
            events_seen.append(event_name)

    learn = make(EventCounter())
    events_seen.clear()
    learn.get_preds(inner=True)
    expected = events_seen[:]
    events_seen.clear()
    for _ in learn.predict_iter(inner=True):
        pass
    assert events_seen == expected
    assert 'before_predict' in events_seen
    assert 'before_fit' not in events_seen


def test_an_error_in_the_model_comes_out_and_ends_it() -> None:
    ends = Ends()
    learn = make(ends)

    def fail(cb: Any) -> None:
        if cb.iter == 1:
            raise OSError('gone')

    before, stream = state(learn), learn.predict_iter(cbs=Callback(before_pred=fail))
    next(stream)
    with pytest.raises(OSError, match='gone'):
        next(stream)
    assert ends.events_seen == ['after_error', 'cleanup'] and state(learn) == before
    assert list(stream) == [] and len(list(learn.predict_iter())) == 4


def test_cancelled_batches_are_left_out_and_cancelled_levels_end_it() -> None:
    def at(i: int, ex: Any, event: str = 'before_pred') -> Callback:
        def cancel(cb: Any) -> None:
            if cb.iter == i:
                raise ex

        return Callback(**{event: cancel})

    learn = make()
    sizes = lambda cbs: [len(p) for p, _ in learn.predict_iter(cbs=cbs)]
    assert sizes(at(0, CancelBatchException)) == [4, 4, 2]
    assert sizes(at(2, CancelValidException)) == [4, 4] == sizes(at(2, CancelFitException))
    assert sizes(at(0, CancelFitException, 'before_fit')) == []


def test_each_batch_may_be_asked_for_by_another_thread() -> None:
    learn, got = make(), []
    stream = learn.predict_iter()
    for _ in range(4):
        thread = Thread(target=lambda: got.append(next(stream)[0]))
        thread.start(), thread.join()
    assert list(stream) == []
    assert torch.equal(torch.cat(got), learn.get_preds()[0])
    assert learn.run.depth == 0


def test_no_gradient_is_kept_and_the_consumer_may_compute_some() -> None:
    learn = make()
    for preds, _ in learn.predict_iter(cpu=False):
        assert not preds.requires_grad and torch.is_grad_enabled()
        learn.model(torch.randn(4, 3)).sum().backward()


def test_any_iterable_and_a_loader_with_workers() -> None:
    x, y = torch.randn(10, 3), torch.randint(4, (10,))
    learn = make()

    def batches() -> Iterator[Any]:
        yield from ((x[i : i + 5], y[i : i + 5]) for i in (0, 5))

    for dl in (batches(), DataLoader(TensorDataset(x, y), 5, num_workers=1)):
        with torch.no_grad():
            expected = learn.model.eval()(x).softmax(-1)
        assert torch.allclose(joined(learn.predict_iter(dl))[0], expected, atol=1e-6)


def test_losses_match_the_samples() -> None:
    learn = make()
    stream = learn.predict_iter(with_input=True, with_loss=True, act=lambda o: o)
    x, logits, _y, losses = joined(stream)
    _, y = learn.dls.valid.tensors
    assert torch.allclose(losses, F.cross_entropy(logits, y, reduction='none'), atol=1e-6)
    assert len(x) == N
