"""Composer and ksuit callbacks in fits by budgets, with evaluations within epochs, and with loggers."""

from functools import partial
from typing import Any

import pytest
import torch

from learnkit import Callback, DataLoaders, Evaluator, GradientAccumulation
from learnkit.interop import from_composer, from_ksuit
from learnkit.testing import synth_learner
from tests.helpers.learners import quiet_synth_learner

learner = partial(quiet_synth_learner, n_train=4, n_valid=1)


class Ends:
    "Records the end of training from the state."

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def fit_start(self, state: Any, logger: Any) -> None:
        self.seen.append(state.max_duration)

    def fit_end(self, state: Any, logger: Any) -> None:
        self.seen.append(state.max_duration)


@pytest.mark.parametrize(
    ('length', 'end'), [('6ba', '6ba'), ('80sp', '80sp'), (2, '2ep'), ('1h', '3600sec')]
)
def test_composer_knows_when_a_budget_ends(length: Any, end: str) -> None:
    cb = Ends()
    learn = learner(from_composer(cb))
    if length == '1h':
        learn.add_cb(Callback(after_epoch=lambda c: c.learn.stop()))
    learn.fit(length)
    if length == '1h':
        assert cb.seen[0].unit == 'sec' and cb.seen[0].value == pytest.approx(3600, abs=5)
    else:
        assert cb.seen[0] == end
    assert cb.seen[0] == cb.seen[1]


def test_composer_metrics_match_the_latest_evaluation() -> None:
    x = torch.randn(64, 1)
    batches = [(b, 2 * b) for b in x.split(16)]
    seen: list[Any] = []

    class Look:
        def eval_end(self, state: Any, logger: Any) -> None:
            seen.append((state.dataloader_label, dict(state.eval_metrics[state.dataloader_label])))

    learn = learner(
        from_composer(Look()),
        eval_every='3ba',
        dls=DataLoaders(batches, {'day': batches[:1], 'night': Evaluator(batches[1:2], '2ba')}),
    )
    learn.fit(1)
    rows = [
        (name, row[f'{name}/loss'])
        for row in learn.recorder.evaluations
        for name in ('day', 'night')
        if f'{name}/loss' in row
    ]
    assert [(name, m['loss']) for name, m in seen] == rows and len(rows) == 4


@pytest.mark.parametrize(
    ('length', 'end'),
    [
        ('6ba', {'update': 6}),
        ('6st', {'update': 6}),
        ('96sp', {'sample': 96}),
        (2, {'epoch': 2, 'update': 8, 'sample': 128}),
        ('1h', {}),
    ],
)
def test_ksuit_knows_when_a_budget_ends(length: Any, end: dict[str, int]) -> None:
    seen: list[Any] = []

    class Ends:
        def after_update(self, update_counter: Any) -> None:
            seen.append(dict(update_counter.end_iteration))

    learn = learner(from_ksuit(Ends()))
    if length == '1h':
        learn.add_cb(Callback(after_epoch=lambda c: c.learn.stop()))
    learn.fit(length)
    assert seen and all(e == end for e in seen)


@pytest.mark.parametrize(
    ('n_train', 'length'), [(8, 1), (8, 2), (7, 2), (8, '6ba'), (8, '13ba'), (7, '9ba'), (8, '3st')]
)
def test_ksuit_counts_accumulated_batches_as_one_update(n_train: int, length: Any) -> None:
    class Look:
        def after_update(self, update_counter: Any, effective_batch_size: int) -> None:
            assert effective_batch_size == update_counter.effective_batch_size == 64
            self.per, self.end = update_counter.updates_per_epoch, update_counter.end_iteration

    look = Look()
    cbs = [from_ksuit(look), GradientAccumulation(64)]
    learn = synth_learner(n_train=n_train, n_valid=1, cbs=cbs)
    with learn.no_bar():
        learn.fit(length)
    assert (look.per, look.end.update) == (2, learn.time.st)
    if isinstance(length, int):
        assert look.end.sample == learn.time.sp
