"""Callbacks without `state_dict`, as written for fastai: their attributes are restored on resume."""

import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fastcore.foundation import L

from learnkit import Callback, Periodic, PeriodicData, TrackerCallback
from learnkit.engine.callback_state import (
    collect_attributes,
    lost_attributes,
    note_attributes,
    put_attributes,
)
from learnkit.testing import synth_learner
from tests.helpers.resuming import Keep, check_every_place, through_a_file, train_without_stop


class Remembers(Callback):
    "Stores state in many ways, with random generators; creates some of its attributes when a fit begins."

    def __init__(self) -> None:
        self.rng, self.np_rng = random.Random(3), np.random.default_rng(3)
        self.gen = torch.Generator().manual_seed(3)

    def before_fit(self) -> None:
        self.seen, self.last, self.ids = L(), deque(maxlen=3), set[Any]()
        self.total, self.sums, self.mean = np.float32(0), np.zeros(2), torch.zeros(1)
        self.by_class: dict[int, Any] = {0: [], 1: []}

    def after_batch(self) -> None:
        if not self.training:
            return
        n, loss = self.train_iter, self.loss.item()
        self.seen.append(loss)
        self.by_class[n % 2].append((n, loss))
        self.last.append(
            self.rng.random() + self.np_rng.random() + float(torch.rand(1, generator=self.gen))
        )
        self.ids.add((n % 4, None))
        self.total += np.float32(loss)
        self.sums[n % 2] += loss
        self.mean = self.mean + self.loss
        # the next step depends on the state
        self.opt.set_hyper('lr', 0.01 + 0.001 * (len(self.seen) + len(self.ids) + sum(self.last)))


NAMES = ('callback', 'periodic', 'periodic_data')


def make() -> Any:
    torch.manual_seed(0)
    return synth_learner(n_train=3, cbs=Remembers())


def test_whatever_is_data_survives() -> None:
    check_every_place(make)
    assert synth_learner(cbs=[Remembers()]).check_resume(4)


@pytest.mark.parametrize(
    'value',
    [
        np.arange(3),
        {3: [1], None: 'a'},
        (1, [2]),
        L(1, 2),
        {1, 2},
        deque([1], 2),
        defaultdict(list, x=[1]),
        Path('a/b'),
        b'a',
        np.float32(0.1),
        np.float64(0.1),
        np.int8(3),
        np.bool_(True),
        np.str_('a'),
        [np.complex64(1j)],
    ],
)
def test_values_are_restored(value: Any) -> None:
    cb, other = Callback(), Callback()
    cb.value = value  # type: ignore[attr-defined]
    put_attributes(other, through_a_file({'state': collect_attributes(cb)})['state'])
    back = vars(other)['value']
    assert type(back) is type(value) and repr(back) == repr(value)


@pytest.mark.parametrize('form', [Callback, partial(Periodic, '100ba'), PeriodicData])
def test_functions_keep_the_attributes_that_they_set(form: Any) -> None:
    def count(cb: Any) -> None:
        if cb.training:
            cb.n = vars(cb).get('n', 0) + 1
            cb.opt.set_hyper('lr', 0.01 * cb.n)  # the next step depends on the attribute

    def make() -> Any:
        torch.manual_seed(0)
        return synth_learner(n_train=3, cbs=form(after_step=count))

    kept = check_every_place(make)
    last = next(iter(kept[-1]['callbacks'][key] for key in kept[-1]['callbacks'] if key in NAMES))
    assert last['__attributes__'] == {'n': 6}


def test_options_are_those_of_the_checkpoint() -> None:
    class Scaled(Callback):
        def __init__(self, by: float = 1.0) -> None:
            self.by, self.n = by, 0

        def after_batch(self) -> None:
            self.n += 1

    def with_option(by: float) -> Any:
        return synth_learner(n_train=3, cbs=Scaled(by))

    _, kept = train_without_stop(lambda: with_option(1.0), lambda learn, _: learn.fit(1))
    assert kept[1]['callbacks']['scaled'] == {'__attributes__': {'by': 1.0, 'n': 2}}
    learn = with_option(5.0)
    learn.add_cb(Keep())
    learn.fit(1, resume=kept[1])
    # a validation batch of two comes
    assert (learn.scaled.by, learn.scaled.n) == (1.0, 5)


def test_parts_of_the_model_stay_its_own() -> None:
    class Holds(Callback):
        def before_fit(self) -> None:
            self.params, self.first = list(self.model.parameters()), self.model.a
            self.view = self.model.a.data

        def after_step(self) -> None:
            self.n = getattr(self, 'n', 0) + len(self.params)

    def holding() -> Any:
        return synth_learner(n_train=3, cbs=Holds())

    _, kept = train_without_stop(holding, lambda learn, _: learn.fit(1))
    assert kept[1]['callbacks']['holds'] == {'__attributes__': {'n': 4}}
    learn = holding()
    learn.fit(1, resume=kept[1])
    assert learn.holds.first is learn.model.a and learn.holds.params[0] is learn.model.a
    assert learn.holds.view.data_ptr() == learn.model.a.data_ptr()


def test_what_would_not_load_is_left_out_and_named(tmp_path: Path) -> None:
    cb = Callback()
    note_attributes(cb)
    cycle: list[Any] = []
    cycle.append(cycle)
    with (tmp_path / 'a').open('w') as file:
        cb.it, cb.file, cb.words, cb.cycle = iter([1]), file, np.array(['a']), cycle  # type: ignore[attr-defined]
        cb.fine, cb.f = {1.5: {2}}, len  # type: ignore[attr-defined]
        assert [*lost_attributes(cb)] == ['it', 'words', 'cycle']
        assert [*collect_attributes(cb)] == ['fine']


class CountsBest(TrackerCallback):
    "A tracker with attributes and without `state_dict`, as users write them."

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__('train_loss')
        self.scale = scale
        self.values: list[float] = []

    def before_fit(self) -> None:
        super().before_fit()
        self.items = 0

    def after_epoch(self) -> None:
        super().after_epoch()
        self.items += 1
        self.values.append(self.scale * self.items)


def test_a_subclass_of_a_callback_with_a_state_keeps_what_it_adds() -> None:
    def of() -> Any:
        torch.manual_seed(0)
        return synth_learner(n_train=3, cbs=CountsBest)

    kept = check_every_place(of, lambda learn, r: learn.fit(2, resume=r))
    state = kept[-1]['callbacks']['counts_best']
    added = {name: state['__attributes__'][name] for name in ('scale', 'values', 'items')}
    assert added == {'scale': 1.0, 'values': [1.0, 2.0], 'items': 2}
    options = {'monitor', 'comp', 'min_delta', 'reset_on_fit'}
    assert not options & state['__attributes__'].keys() and 'best' in state['__state__']


def test_a_tensor_of_a_subclass_comes_back_as_a_plain_one() -> None:
    class Category(torch.Tensor):
        "As fastai's `TensorCategory`, which its MixUp keeps."

    cb, new = Callback(), Callback()
    cb.yb1 = (torch.tensor([1, 2]).as_subclass(Category),)
    assert not lost_attributes(cb)
    put_attributes(new, through_a_file(collect_attributes(cb)))
    assert type(new.yb1[0]) is torch.Tensor and new.yb1[0].tolist() == [1, 2]


def test_values_of_more_classes_come_back_as_they_were() -> None:
    class Mode(Enum):
        WARM, HOT = 1, 2

    Point = namedtuple('Point', 'x y')

    class Keeps(Callback):
        def __init__(self) -> None:
            self.mode, self.point, self.warm = Mode.WARM, Point(0, 0), True

    cb, new = Keeps(), Keeps()
    for one in (cb, new):
        synth_learner(cbs=one)
    cb.mode, cb.point = Mode.HOT, Point(1, [2.0])
    cb.space = SimpleNamespace(best=0.5, names=['a'])
    cb.order_of = OrderedDict(a=1, b=2)
    cb.order_of.move_to_end('a')
    cb.counts, cb.frozen, cb.raw, cb.steps = (
        Counter('aab'),
        frozenset({1}),
        bytearray(b'x'),
        range(3),
    )
    cb.numbers = {3, 1, 2}
    del cb.warm
    put_attributes(new, collect_attributes(cb))
    names = 'mode point space order_of counts frozen raw steps numbers'.split()
    assert [getattr(new, name) for name in names] == [getattr(cb, name) for name in names]
    assert [type(vars(new)[name]) for name in names] == [type(vars(cb)[name]) for name in names]
    assert list(new.order_of) == ['b', 'a'] and list(new.numbers) == list(cb.numbers)
    assert 'warm' not in vars(new)
