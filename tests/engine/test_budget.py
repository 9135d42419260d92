"""Length of a fit: epochs, or a budget in any unit that ends the fit at a batch boundary with every event fired."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, TensorDataset

from learnkit import (
    Callback,
    CancelBatchException,
    DataLoaders,
    FitError,
    Time,
    TimeError,
)
from learnkit.data import TensorLoader
from learnkit.engine.events import EVENTS
from learnkit.engine.snapshot import preserve_dataloaders
from learnkit.testing import RegModel, synth_dls, synth_learner
from tests.helpers.clock import use_clock
from tests.helpers.learners import quiet_synth_learner

NEVER = set(
    'before_load after_load before_predict after_predict after_error close post_close'.split()
)


class Lengthless:
    "A loader of unknown length."

    def __init__(self, dl: Any) -> None:
        self.dl = dl

    def __iter__(self) -> Any:
        return iter(self.dl)


class Counts(Callback):
    "Count every event."

    order = 1000

    def __init__(self) -> None:
        self.n: Counter[str] = Counter()

    def run_event(self, event_name: str) -> None:
        self.n[event_name] += 1


def learner(n_train: int = 10, bs: int = 4, lengthless: bool = False, **kwargs: Any) -> Any:
    dls = synth_dls(bs=bs, n_train=n_train)
    if lengthless:
        dls.train = Lengthless(dls.train)
    return quiet_synth_learner(dls=dls, **kwargs)


@pytest.mark.parametrize('lengthless', [False, True])
@settings(max_examples=25)
@given(
    n_train=st.integers(1, 7), budget=st.integers(1, 40), unit=st.sampled_from(['ba', 'st', 'sp'])
)
def test_a_budget_ends_with_the_batch_that_fills_it(
    lengthless: bool, n_train: int, budget: int, unit: str
) -> None:
    learn = learner(n_train, lengthless=lengthless, cbs=(counts := Counts()))
    learn.fit(f'{budget}{unit}')
    n_batches = -(-budget // 4) if unit == 'sp' else budget
    n_epochs = -(-n_batches // n_train)
    now = learn.time
    assert (now.ba, now.st, now.sp, now.ep) == (n_batches, n_batches, 4 * n_batches, n_epochs)
    assert len(learn.history) == n_epochs and learn.pct_train == 1
    n = counts.n
    assert (
        n['before_batch'] - n['before_validate'] * 2
        == n['batch_checkpoint']
        == n['before_step']
        == n_batches
    )
    assert (
        n['before_epoch']
        == n['after_epoch']
        == n['epoch_checkpoint']
        == n['after_eval']
        == n_epochs
    )
    assert n['before_fit'] == n['after_fit'] == 1


@settings(max_examples=25)
@given(n_train=st.integers(1, 7), budget=st.integers(1, 200), per_sample=st.integers(1, 9))
def test_a_budget_of_tokens_ends_with_the_batch_that_fills_it(
    n_train: int, budget: int, per_sample: int
) -> None:
    token_func = lambda xb, yb: per_sample * len(xb[0])
    learn = learner(n_train, token_func=token_func)
    learn.fit(f'{budget}tok')
    n_batches = -(-budget // (4 * per_sample))
    now = learn.time
    assert now.tok == 4 * per_sample * n_batches
    assert now.ba == n_batches
    assert now.ep == (-(-n_batches // n_train))
    assert len(learn.history) == now.ep and learn.pct_train == 1


@settings(max_examples=25)
@given(
    n_train=st.integers(1, 5),
    n=st.integers(1, 4),
    per=st.integers(1, 3),
    unit=st.sampled_from(['ep', 'iter']),
)
def test_budgets_of_epochs_and_iterations_are_whole_epochs(
    n_train: int, n: int, per: int, unit: str
) -> None:
    learn = learner(n_train, cbs=(counts := Counts()))
    learn.fit(f'{n}{unit}', iteration=f'{per}ep')
    n_epochs = n * per if unit == 'iter' else n
    n_iterations = n_epochs // per  # whole iterations
    now = learn.time
    assert (now.ep, now.ba, now.sp) == (n_epochs, n_epochs * n_train, 4 * n_epochs * n_train)
    assert len(learn.history) == learn.n_epoch == n_epochs
    assert now.iter == n_iterations and counts.n['epoch_checkpoint'] == n_epochs
    assert counts.n['before_fit'] == counts.n['after_fit'] == 1


def test_every_event_fires_when_a_budget_ends_in_the_middle_of_an_epoch() -> None:
    learn = learner(cbs=(counts := Counts()))
    learn.fit('3ba', iteration=2)
    cut = {'after_iteration', 'iteration_checkpoint'}
    expected = {e for e in EVENTS if not e.startswith('after_cancel')} - NEVER - cut
    assert {e for e in EVENTS if counts.n[e]} == expected
    assert counts.n['before_iteration'] == 1  # its end is not reached


@settings(max_examples=30)
@given(
    n_train=st.integers(1, 6),
    first=st.integers(1, 20),
    total=st.integers(1, 40),
    unit=st.sampled_from(['ep', 'ba', 'st', 'sp']),
)
def test_fit_until_is_a_total(n_train: int, first: int, total: int, unit: str) -> None:
    learn = learner(n_train)
    learn.fit(f'{first}{unit}')
    before = getattr(learn.time, unit)
    learn.fit_until(Time(total, unit))
    after = getattr(learn.time, unit)
    step = 4 if unit == 'sp' else 1
    assert after == (before if total <= before else before + -(-(total - before) // step) * step)
    learn.fit_until(Time(total, unit))
    assert getattr(learn.time, unit) == after


def test_seconds_end_soon_after_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = use_clock(monkeypatch)
    learn = learner(cbs=Callback(after_step=lambda cb: clock.sleep(1.0)))
    learn.fit('7s')
    assert learn.time.sec == 7.0 and learn.n_epoch is None and learn.time.ba == 7


@pytest.mark.parametrize('budget', ['25ba', '100sp'])
def test_pct_train_is_the_share_used(budget: str) -> None:
    shares: list[float] = []
    cbs = Callback(before_backward=lambda cb: shares.append(cb.pct_train))
    learn = learner(lengthless=True, cbs=cbs)
    learn.fit(budget)
    assert shares == pytest.approx([i / 25 for i in range(25)])


def test_steps_are_steps_and_no_batches() -> None:
    def every_third(cb: Any) -> None:
        if cb.train_iter % 3:
            raise CancelBatchException

    learn = learner(cbs=Callback(before_step=every_third))
    learn.fit('4st')
    assert (learn.time.st, learn.time.ba) == (4, 10)


def test_tokens_match_input_ids() -> None:
    class Embeds(RegModel):
        def forward(self, input_ids: Any, y: Any = None) -> Any:
            return super().forward(input_ids[:, :1].float())

    batches = [{'input_ids': torch.ones(2, 5), 'y': torch.ones(2, 1)}] * 4
    learn = synth_learner(dls=batches, model=Embeds())
    learn.fit('25tok')
    assert (learn.time.tok, learn.time.ba) == (30, 3)


@pytest.mark.parametrize(
    ('budget', 'error', 'text'),
    [
        ('5 parsecs', TimeError, '5 parsecs'),
        ('0ba', TimeError, 'positive'),
        ('3iter', TimeError, 'iteration='),
        ('0.5dur', TimeError, '0.5dur'),
        ('3', TimeError, "'3' is not a time"),
        (Time('1.5h') - Time('1.5h'), TimeError, 'positive'),
        ('2.5ep', TimeError, 'whole numbers'),
    ],
)
def test_bad_budgets_are_refused_before_anything_happens(
    budget: Any, error: type[Exception], text: str
) -> None:
    learn = learner(cbs=(counts := Counts()))
    counts.n.clear()
    with pytest.raises(error, match=text):
        learn.fit(budget)
    assert learn.opt is None and not counts.n


def test_tokens_that_are_not_counted_are_refused_before_the_first_step() -> None:
    learn = learner()
    with pytest.raises(TimeError, match='token_func'):
        learn.fit('100tok')
    assert learn.time.st == 0


def test_a_fit_that_uses_nothing_of_its_budget_ends() -> None:
    def cancel(cb: Any) -> None:
        raise CancelBatchException

    learn = learner(cbs=Callback(before_step=cancel))
    with pytest.raises(FitError, match='3st'):
        learn.fit('3st')
    learn.remove_cb(learn.callback)
    learn.fit('3st')
    assert learn.time.st == 3


def test_skipped_epochs_are_not_finished() -> None:
    learn = learner()
    learn.fit(5, start_epoch=3)
    assert learn.time.ep == 2
    learn.fit_until(3)
    assert learn.time.ep == 3


class Seen(Callback):
    "Record the first input of each training batch, and its number in the epoch."

    run_valid = False

    def __init__(self) -> None:
        self.inputs: list[float] = []
        self.numbers: list[int] = []

    def after_batch(self) -> None:
        self.inputs.append(self.x.flatten()[0].item())
        self.numbers.append(self.iter)


LOADERS = {
    'tensors': lambda: TensorLoader(torch.arange(20.0).view(20, 1), torch.ones(20, 1), bs=4, shuffle=True, seed=0),
    'torch': lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(0)),
    'persistent': lambda: DataLoader(
        DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(0), num_workers=1, persistent_workers=True
    ),
    'lengthless': lambda: Lengthless(LOADERS['torch']()),
    'iterator': lambda: itertools.chain.from_iterable(itertools.repeat(LOADERS['torch']())),
}  # fmt: skip
DATA = TensorDataset(torch.arange(20.0).view(20, 1), torch.ones(20, 1))


def look_at_batch(learn: Any) -> None:
    with preserve_dataloaders(learn.dls):
        learn.dls.one_batch()


def train_in_fits(kind: str, fits: list[Any], between: Any = None) -> tuple[Seen, Any]:
    torch.manual_seed(0)
    learn = learner(cbs=(seen := Seen()), lr=1e-3)
    learn.dls = DataLoaders(LOADERS[kind](), learn.dls.valid)
    for length in fits:
        learn.fit(length)
        if between is not None:
            between(learn)
    return seen, learn


@pytest.mark.parametrize('kind', LOADERS)
def test_fits_of_batches_go_through_the_epoch(kind: str) -> None:
    "Seven fits of one batch train on the batches of a fit of seven, in a plain loop over two epochs."
    loader = LOADERS[kind]()
    infinite = kind == 'iterator'
    epochs = [list(itertools.islice(loader, 10 if infinite else None)) for _ in range(2)]
    firsts = [x.flatten()[0].item() for x, _ in itertools.chain(*epochs)]
    between = None if kind in ('iterator', 'lengthless') else look_at_batch
    seen, learn = train_in_fits(kind, ['1ba'] * 7, between)
    assert seen.inputs == firsts[:7]
    whole, _ = train_in_fits(kind, ['7ba'])
    assert whole.inputs == firsts[:7] and seen.numbers == whole.numbers
    assert learn.time.ba == 7
