"""Callbacks without `state_dict`, as written for fastai: their changed attributes are restored on resume."""

from __future__ import annotations

import gc
import random
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastcore.foundation import L
from torch import Tensor

from learnkit import Callback, Checkpoint, TrackerCallback
from learnkit.engine.callback_state import (
    collect_attributes,
    lost_attributes,
    note_attributes,
    put_attributes,
)
from learnkit.testing import synth_learner
from tests.helpers.resuming import Keep, check_every_place, through_a_file, train_without_stop


class Mode(Enum):
    "States of a callback."

    FIRST = 1
    LATER = 2


class Remembers(Callback):
    "Stores state in many ways, with a random generator; creates some of its attributes when a fit begins."

    def __init__(self) -> None:
        self.rng, self.np_rng = random.Random(3), np.random.default_rng(3)
        self.gen, self.mode, self.fresh = torch.Generator().manual_seed(3), Mode.FIRST, True

    def before_fit(self) -> None:
        self.seen = L()
        self.by_class = defaultdict(list)
        self.kinds = Counter()
        self.last = deque(maxlen=3)
        self.ids, self.total, self.where = set[Any](), np.float32(0), Path('nowhere')
        self.sums, self.mean, self.pairs = np.zeros(2), torch.zeros(1), {(0, 'a'): 1}
        self.order_of = OrderedDict[str, int]()

    def before_epoch(self) -> None:
        self.fresh = False  # as it was made, until the next epoch begins

    def after_train(self) -> None:
        self.fresh = True

    def after_batch(self) -> None:
        if not self.training:
            return
        n, loss = self.train_iter, self.loss.item()
        self.seen.append(loss)
        self.by_class[n % 2].append((n, loss))
        self.kinds[f'{n % 3}'] += 1
        self.last.append(
            self.rng.random() + self.np_rng.random() + float(torch.rand(1, generator=self.gen))
        )
        self.ids.add((n % 4, None))
        self.total += np.float32(loss)
        self.where, self.mode = Path('runs') / str(n), Mode.LATER
        self.sums[n % 2] += loss
        self.mean = self.mean + self.loss
        self.pairs[n, 'b'] = n
        self.order_of[str(-n)] = n


def make() -> Any:
    torch.manual_seed(0)
    return synth_learner(n_train=3, cbs=Remembers())


def test_whatever_is_data_survives() -> None:
    check_every_place(make)
    ends = []
    for resume in (False, True):
        learn = make()
        learn.add_cb(Keep())
        state = (
            through_a_file(train_without_stop(make, lambda learn, _: learn.fit(2))[1][2])
            if resume
            else False
        )
        torch.manual_seed(0)
        learn.fit(2, resume=state)
        ends.append(learn.remembers)
    left_out = 'learn', 'rng', 'np_rng', 'gen', '_as_added', '_set_by_base'
    a, b = ({k: v for k, v in vars(cb).items() if k not in left_out} for cb in ends)
    assert a.keys() == b.keys()
    assert {k: type(v) for k, v in a.items()} == {k: type(v) for k, v in b.items()}
    assert (
        b['last'].maxlen == 3 and b['by_class'].default_factory is list and b['mode'] is Mode.LATER
    )
    assert len(b['seen']) == 6
    assert b['where'] == Path('runs/6')
    assert b['kinds'] == {'0': 2, '1': 2, '2': 2}
    assert a['pairs'] == b['pairs'] and a['ids'] == b['ids'] and a['last'] == b['last']


def test_a_handler_of_the_resumed_epoch_does_not_change_what_was_saved() -> None:
    _, kept = train_without_stop(make, lambda learn, _: learn.fit(2))
    learn, seen = make(), []
    learn.add_cb(Keep())
    learn.add_cb(Callback(before_draw=lambda cb: seen.append(cb.learn.remembers.fresh)))
    state = kept[2]['callbacks']['remembers']['__attributes__']
    assert state['fresh'] is False  # in the middle of an epoch
    learn.fit(
        2,
        resume={
            **kept[2],
            'callbacks': {
                **kept[2]['callbacks'],
                'remembers': {'__attributes__': {**state, 'fresh': True}},
            },
        },
    )
    assert seen[0] is True  # `before_epoch`, which came again, has set it to False


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

        def after_step(self) -> None:
            self.n = getattr(self, 'n', 0) + len(self.params)

    def holding() -> Any:
        return synth_learner(n_train=3, cbs=Holds())

    _, kept = train_without_stop(holding, lambda learn, _: learn.fit(1))
    learn = holding()
    learn.add_cb(Keep())
    learn.fit(1, resume=kept[1])
    assert learn.holds.first is learn.model.a and learn.holds.params[0] is learn.model.a
    assert kept[1]['callbacks']['holds'] == {'__attributes__': {'n': 4}}


def test_what_would_not_load_is_left_out_and_named(tmp_path: Path) -> None:
    cb = Callback()
    note_attributes(cb)
    with (tmp_path / 'a').open('w') as file:
        cb.it, cb.file, cb.empty, cb.words = iter([1]), file, b'', np.array(['a'])  # type: ignore[attr-defined]
        cb.fine, cb.f, cb.mode = {1.5: {2}}, len, Mode.FIRST  # type: ignore[attr-defined]
        assert [*lost_attributes(cb)] == ['it', 'empty', 'words']
        state = through_a_file({'state': collect_attributes(cb)})['state']
    other = Callback()
    other.mode = Mode.LATER  # type: ignore[attr-defined]
    put_attributes(other, state)
    assert vars(other) == {'fine': {1.5: {2}}, 'mode': Mode.FIRST}


def test_a_tensor_of_the_loop_is_data() -> None:
    class Keeps(Callback):
        def after_loss(self) -> None:
            self.kept, self.graph = self.loss, self.loss_grad

    learn = synth_learner(cbs=Keeps())
    learn.add_cb(Keep())
    learn.fit(1)
    state = learn.keep.kept[0]['callbacks']['keeps']['__attributes__']
    assert list(state) == ['kept'] and isinstance(state['kept'], Tensor)


class Hidden(Callback):
    "Takes rates from an iterator, whose position cannot be saved."

    def before_fit(self) -> None:
        self.rates = iter(range(1, 100))

    def before_batch(self) -> None:
        if self.training:
            self.opt.set_hyper('lr', 0.001 * next(self.rates))


def test_a_failed_check_names_what_is_lost() -> None:
    found = synth_learner(cbs=Hidden()).check_resume(4)
    assert not found
    assert found.hints == [
        'Hidden keeps `rates` (range_iterator), which no checkpoint holds: give it `state_dict` and '
        '`load_state_dict`.'
    ]
    assert repr(found).endswith(found.hints[0])
    assert synth_learner(cbs=[Remembers()]).check_resume(4).hints == []


@pytest.mark.parametrize(
    'value',
    [
        np.float64(1.5),
        np.int8(3),
        np.arange(3),
        np.array(2.0),
        {3: [1]},
        {None: 1},
        (1, [2]),
        L(1, 2),
        {1, 2},
        frozenset([1]),
        deque([1], 2),
        Path('a/b'),
        Counter('aab'),
        OrderedDict(b=1, a=2),
        defaultdict(int, x=1),
        True,
        b'a',
        1 + 2j,
        None,
    ],
)
def test_values_are_restored(value: Any) -> None:
    cb = Callback()
    note_attributes(cb)
    cb.value = value  # type: ignore[attr-defined]
    state = through_a_file({'state': collect_attributes(cb)})['state']
    other = Callback()
    put_attributes(other, state)
    back = vars(other)['value']
    assert type(back) is type(value) and repr(back) == repr(value)


def of(cb: type[Callback]) -> Any:
    torch.manual_seed(0)
    return synth_learner(n_train=3, cbs=cb)


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
    kept = check_every_place(lambda: of(CountsBest), lambda learn, r: learn.fit(2, resume=r))
    state = kept[-1]['callbacks']['counts_best']
    added = {name: state['__attributes__'][name] for name in ('scale', 'values', 'items')}
    assert added == {'scale': 1.0, 'values': [1.0, 2.0], 'items': 2}
    options = {'monitor', 'comp', 'min_delta', 'reset_on_fit'}
    assert not options & state['__attributes__'].keys() and 'best' in state['__state__']


def test_a_checkpoint_warns_of_what_it_cannot_hold(tmp_path: Path) -> None:
    class Streams(Callback):
        def __init__(self) -> None:
            self.by_default, self.log = iter([1]), (tmp_path / 'log').open('a')

        def before_fit(self) -> None:
            self.rates = iter([1])

        def cleanup(self) -> None:
            self.log.close()

    learn = of(Streams)
    learn.add_cb(Checkpoint('1ba', tmp_path))
    with pytest.warns(UserWarning, match='Streams has set `rates`') as caught:
        learn.fit(1)
    assert len(caught) == 1


class Odd(Callback):
    "Stores values that cannot be saved, and a view of the weights."

    def before_fit(self) -> None:
        self.cycle: list[Any] = []
        self.cycle.append(self.cycle)
        self.deep: Any = []
        for _ in range(3000):
            self.deep = [self.deep]
        self.big_endian = np.arange(3, dtype='>f8')
        self.look, self.marked, self.seen = self.learn.model.a.data, {'__kind__': 'x'}, 0

    def after_batch(self) -> None:
        self.seen += 1


def test_what_no_file_holds_does_not_end_the_training() -> None:
    gc.collect()  # else a Learner of another test may be closed at the depth of a recursion
    make = lambda: of(Odd)
    check_every_place(make, lambda learn, r: learn.fit(2, resume=r), lambda kept: kept[2::5])
    learn = of(Odd)
    learn.fit(1)
    assert collect_attributes(learn.odd) == {
        'marked': {'__kind__': 'dict', 'of': [('__kind__', 'x')]},
        'seen': learn.odd.seen,
    }
