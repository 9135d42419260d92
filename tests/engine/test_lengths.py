"""Loaders whose `len()` is wrong, changes, or raises an error."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learnkit import SGD, BatchError, Callback, DataLoaders, Learner
from learnkit.callbacks.progress import Bar
from learnkit.engine.lengths import Lengths, find_length
from learnkit.testing import synth_dls
from tests.helpers.learners import quiet_learner

N_EPOCH = 4


class Loader:
    "A loader of fixed batches that claims another length."

    def __init__(self, said: Any, given: int | list[int]) -> None:
        self.said = said  # a length, or an error
        self.given = [given] * 99 if isinstance(given, int) else given  # of each pass
        self.n_passes = 0

    def __len__(self) -> int:
        if isinstance(self.said, Exception):
            raise self.said
        return int(self.said)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = self.given[self.n_passes]
        self.n_passes += 1
        gen = torch.Generator().manual_seed(0)
        for _ in range(n):
            x = torch.randn(4, 3, generator=gen)
            yield x, x.sum(1, keepdim=True)


def make_learner(train: Any, valid: Any = None, *cbs: Any) -> Learner:
    torch.manual_seed(0)
    return quiet_learner(
        DataLoaders(train, valid), nn.Linear(3, 1), nn.MSELoss(), SGD, cbs=list(cbs)
    )


class Notes(Callback):
    "Note the share of the fit and the number of batches before each training batch."

    def before_fit(self) -> None:
        self.shares: list[float] = []
        self.lengths: list[Any] = []

    def before_batch(self) -> None:
        if self.training:
            self.shares.append(self.learn.pct_train)
            self.lengths.append(self.learn.n_iter)


def cosine(share: float) -> float:
    "Return the rate of `fit_one_cycle(lr_max=1)`."
    if share < 0.25:
        return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * share / 0.25)) / 2
    return 1e-5 + (1 - 1e-5) * (1 + math.cos(math.pi * (share - 0.25) / 0.75)) / 2


def test_schedules_use_the_real_length_from_the_second_epoch_on() -> None:
    learn = make_learner(Loader(10, 20), Loader(2, 5), notes := Notes())
    with learn.no_bar(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.fit_one_cycle(N_EPOCH, 1.0)
    first = [min(i / 10, 1) / N_EPOCH for i in range(20)]
    later = [(epoch + i / 20) / N_EPOCH for epoch in range(1, N_EPOCH) for i in range(20)]
    assert notes.lengths == [10] * 20 + [20] * 60
    assert notes.shares == pytest.approx(first + later, abs=1e-12)
    assert min(np.diff(notes.shares)) > -1e-15 and 1 - 1e-12 < learn.pct_train <= 1
    assert learn.recorder.lrs == pytest.approx([cosine(share) for share in notes.shares], abs=1e-9)
    messages = [str(w.message) for w in caught]
    assert len(messages) == 2
    assert 'The train loader (Loader) returned 20 batches, and its length is 10' in messages[0]
    assert 'The valid loader (Loader) returned 5 batches, and its length is 2' in messages[1]


def test_a_loader_that_ends_early_is_warned_of_once() -> None:
    learn = make_learner(Loader(20, 10), Loader(5, 2), notes := Notes())
    with learn.no_bar(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.fit(3)
    assert notes.lengths == [20] * 10 + [10] * 20
    expected = [i / 60 for i in range(10)] + [1 / 3 + i / 30 for i in range(20)]
    assert notes.shares == pytest.approx(expected, abs=1e-12)
    messages = [str(w.message) for w in caught]
    assert len(messages) == 2
    assert 'The train loader (Loader) ended after 10 of its 20 batches' in messages[0]
    assert 'The valid loader (Loader) ended after 2 of its 5 batches' in messages[1]


@pytest.mark.filterwarnings('ignore:The train loader:UserWarning')
def test_the_next_fit_knows_the_length() -> None:
    learn = make_learner(Loader(10, 20), None, notes := Notes())
    with learn.no_bar():
        learn.fit(1)
        learn.fit(1)
    assert notes.shares == pytest.approx([i / 20 for i in range(20)], abs=1e-12)
    learn.dls.train.said = 30  # another `len()` is new information
    assert learn.parts.lengths.find(learn.dls.train) == 30


def test_a_loader_that_ends_early_once_is_warned_of_once() -> None:
    learn = make_learner(Loader(10, [10, 4, 10, 10]), None, notes := Notes())
    with learn.no_bar(), pytest.warns(UserWarning, match='ended after 4 of its 10') as caught:
        learn.fit(4)
    assert len(caught) == 1
    assert [notes.lengths[i] for i in (0, 10, 14, 24)] == [10, 10, 4, 10]
    assert min(np.diff(notes.shares)) > -1e-15 and learn.pct_train <= 1


def test_a_fit_that_is_stopped_learns_no_length() -> None:
    stop = Callback(after_batch=lambda cb: cb.iter == 4 and cb.learn.stop())
    learn = make_learner(Loader(10, 10), None, stop)
    with learn.no_bar():
        learn.fit(2)
    assert learn.parts.lengths.find(learn.dls.train) == 10


def test_a_loader_that_is_not_the_learner_s_is_not_kept() -> None:
    learn = make_learner(Loader(3, 3))
    with learn.no_bar(), pytest.warns(UserWarning, match='returned 5 batches, and its length is 2'):
        learn.validate(dl=(other := Loader(2, 5)))
    assert learn.parts.lengths.find(other) == 2


RESUMED = [('batch_checkpoint', n) for n in (3, 15, 20, 33, 60, 79)]
RESUMED += [('epoch_checkpoint', n) for n in (20, 40)]


@pytest.mark.parametrize(('event', 'after'), RESUMED)
def test_a_resumed_fit_continues_exactly(event: str, after: int) -> None:
    states: list[Any] = []

    def take(cb: Callback) -> None:
        if cb.learn.train_iter == after:
            states.append(cb.learn.checkpoint_state())

    straight = make_learner(Loader(10, 20), Loader(2, 5), Callback(**{event: take}))
    resumed = make_learner(Loader(10, 20), Loader(2, 5))
    with straight.no_bar(), resumed.no_bar(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        straight.fit_one_cycle(N_EPOCH, 0.1)
        resumed.fit_one_cycle(N_EPOCH, 0.1, resume=states[0])
    assert resumed.recorder.lrs == straight.recorder.lrs
    assert resumed.pct_train == straight.pct_train
    for p, q in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert straight.history[-1]['valid_loss'] == resumed.history[-1]['valid_loss']


def test_a_longer_fit_continues_from_the_finished_share() -> None:
    states: list[Any] = []
    take = Callback(batch_checkpoint=lambda cb: states.append(cb.learn.checkpoint_state()))
    short = make_learner(Loader(10, 20), None, take)
    longer = make_learner(Loader(10, 20), None, notes := Notes())
    with short.no_bar(), longer.no_bar(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        short.fit(1)
        longer.fit(2, resume=states[14])  # after 15 batches of an epoch of 10
    assert notes.shares[:5] == pytest.approx([0.5] * 5)


def test_the_bar_counts_without_a_share_after_the_length() -> None:
    assert '10/10 100%' in Bar('train', 10, 10).text()
    text = Bar('train', 10, 11).text()
    assert '11 batches' in text and '%' not in text and '<progress' not in Bar('t', 10, 11).html()


# -- a length that raises an error -----------------------------------------------------------------

ERRORS = [
    RuntimeError('Please call `iter(combined_loader)` first.'),
    ValueError('The length is unknown.'),
    TypeError('no len'),
    KeyError('n'),
]


@pytest.mark.parametrize('error', ERRORS, ids=lambda error: type(error).__name__)
def test_a_length_that_raises_is_unknown(error: Exception) -> None:
    learn = make_learner(Loader(error, 6), Loader(error, 3), notes := Notes())
    with learn.no_bar():
        learn.fit(2)
        assert notes.lengths == [None] * 12
        assert learn.pct_train == 0.5  # the start of the last epoch
        learn.validate()
        learn.get_preds()
    assert 'unknown length' in repr(learn.dls)


def test_a_schedule_names_the_loader_and_the_way_out() -> None:
    learn = make_learner(Loader(ERRORS[0], 6))
    with learn.no_bar(), pytest.warns(UserWarning, match=r'\(Loader\) has no length.*n_iter='):
        learn.fit_one_cycle(2)
    learn = make_learner(Loader(ERRORS[0], 6), None, notes := Notes())
    learn.dls.n_iter = 6
    with learn.no_bar():
        learn.fit_one_cycle(2)
    assert notes.shares == pytest.approx([i / 12 for i in range(12)], abs=1e-12)


class Combined(Loader):
    "A loader that has a length after its first pass has begun."

    def __init__(self, n: int) -> None:
        super().__init__(ERRORS[0], n)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.said = self.given[0]
        return super().__iter__()


def test_a_batch_with_its_number_is_refused_with_the_way_out() -> None:
    "Lightning's CombinedLoader gives the number of the batch, and of its loader, too."

    class Numbered(Combined):
        def __iter__(self) -> Iterator[Any]:
            return ((list(batch), i, 0) for i, batch in enumerate(super().__iter__()))

    class Alone:
        def __iter__(self) -> Iterator[Any]:
            return (batch for batch, _, _ in Numbered(6))

    with pytest.raises(BatchError, match=r'train loader \(Numbered\).*`\(batch for batch, _, _'):
        make_learner(Numbered(6)).fit(1)
    learn = make_learner(Alone())
    with learn.no_bar():
        learn.fit(2)
    assert learn.time.ba == 12


@pytest.mark.parametrize('after', [4, 8, 14])
def test_a_length_that_is_known_later_does_not_prevent_a_resume(after: int) -> None:
    states: list[Any] = []

    def take(cb: Callback) -> None:
        if cb.learn.train_iter == after:
            states.append(cb.learn.checkpoint_state())

    straight = make_learner(Combined(6), None, Callback(batch_checkpoint=take))
    resumed = make_learner(Combined(6))
    with straight.no_bar(), resumed.no_bar():
        straight.fit(3)
        resumed.fit(3, resume=states[0])
    for p, q in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_loader_without_a_length_has_no_correction() -> None:
    lengths = Lengths()
    loader = iter([1, 2])
    lengths.correct(loader, 2)
    assert lengths.find(loader) is None and lengths.correction(loader) is None
    train = synth_dls().train
    lengths.correct(train, 3)
    assert lengths.find(train) == lengths.correction(train) == 3
    lengths.correct(train, None)
    assert lengths.correction(train) is None


def test_the_length_of_a_loader_is_not_taken_from_one_that_is_gone() -> None:
    lengths = Lengths()
    for _ in range(50):  # a new loader often gets the memory of the last one
        loader = Wrong()
        assert lengths.find(loader) == 3
        lengths.correct(loader, 5)
        assert lengths.find(loader) == 5
        del loader


class Wrong:
    def __len__(self) -> int:
        return 3


def test_the_length_of_a_learners_loader_is_that_of_its_last_pass() -> None:
    learn = make_learner(Loader(said=3, given=5))
    assert find_length(learn, learn.dls.train) == 3
    with pytest.warns(UserWarning, match='returned 5 batches'):
        learn.fit(1)
    assert find_length(learn, learn.dls.train) == 5
    assert find_length(learn, iter([])) is None
