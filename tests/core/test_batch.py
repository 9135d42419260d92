"""Batches of every structure: split, move, measure, join and cut them, and pass them to models."""

from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from learnkit import DataLoaders, Learner
from learnkit.core.batch import (
    BatchForm,
    apply_model,
    are_equal,
    concat,
    describe,
    find_bs,
    microbatches,
    split_batch,
    to_detach,
    to_device,
    unpack_output,
)
from learnkit.core.errors import BatchError
from tests.helpers.rows import Rows

META = torch.device('meta')  # a second device that every machine has


class Pair(NamedTuple):
    a: Any
    b: Any


class Moving:
    "An object with a method `to`."

    def __init__(self, device: str = 'cpu'):
        self.device = device

    def to(self, device: torch.device) -> 'Moving':
        return Moving(str(device))


# split_batch


@pytest.mark.parametrize(
    ('batch', 'n_inp', 'xb', 'yb'),
    [
        ((1, 2), None, (1,), (2,)),
        ((1, 2), 2, (1, 2), ()),
        ([1, 2, 3], None, (1, 2), (3,)),
        ([1, 2, 3], 1, (1,), (2, 3)),
        (Pair(1, 2), None, (1,), (2,)),
        ('text', None, ('text',), ()),
        (({'a': 1}, 2), None, ({'a': 1},), (2,)),
    ],
)
def test_split_follows_position(batch: Any, n_inp: int | None, xb: Any, yb: Any) -> None:
    got = split_batch(batch, n_inp)
    assert got == (xb, yb)
    assert [type(o) for o in got] == [tuple, tuple]


@pytest.mark.parametrize('name', ['labels', 'label', 'targets', 'target', 'y'])
def test_split_finds_named_targets(name: str) -> None:
    y = torch.zeros(2)
    for kind in (dict, OrderedDict, UserDict):
        batch = kind({'x': 1, name: y, 'other': None})
        (x,), (found,) = split_batch(batch)
        assert x is batch and found is y


def test_split_without_named_targets_and_with_two() -> None:
    assert split_batch({'x': 1, 'labels': None}, 2) == (({'x': 1, 'labels': None},), ())
    assert split_batch({'label': 1, 'y': 2})[1] == (1, 2)


@pytest.mark.parametrize(
    ('batch', 'n_inp'),
    [
        ((), None),
        ([], None),
        ({}, None),
        ((1, 2), 3),
        ((1, 2), 0),
        ((1, 2), -1),
        (torch.zeros(2), 2),
    ],
)
def test_split_refuses(batch: Any, n_inp: int | None) -> None:
    with pytest.raises(BatchError, match=r'empty batch|n_inp=-?\d'):
        split_batch(batch, n_inp)


# to_device, to_detach


def nested() -> Any:
    return {
        't': torch.zeros(2),
        'list': [torch.zeros(1), 'text', 3],
        'pair': Pair(torch.zeros(3), None),
        'dd': defaultdict(int, a=torch.zeros(6)),
        'od': OrderedDict(b=torch.zeros(7)),
        'ud': UserDict(c=torch.zeros(8)),
        'tuple': (torch.zeros(9), (1, 2)),
    }


def test_moves_every_tensor_and_keeps_every_type() -> None:
    batch = nested()
    moved = to_device(batch, META)
    assert [type(v) for v in moved.values()] == [type(v) for v in batch.values()]
    tensors = [
        moved['t'],
        moved['list'][0],
        moved['pair'].a,
        moved['dd']['a'],
        moved['od']['b'],
        moved['ud']['c'],
        moved['tuple'][0],
    ]
    assert {t.device for t in tensors} == {META}
    assert [len(t) for t in tensors] == [2, 1, 3, 6, 7, 8, 9]
    assert moved['list'][1:] == ['text', 3] and moved['pair'].b is None
    assert moved['dd']['new'] == 0  # the factory is still there
    # the loader's own stay
    assert batch['t'].device.type == 'cpu' and batch['ud']['c'].device.type == 'cpu'


@pytest.mark.parametrize(
    'batch',
    [(torch.zeros(2), torch.zeros(2)), nested(), (nn.Parameter(torch.zeros(1)), torch.zeros(1))],
)
@pytest.mark.parametrize('device', [torch.device('cpu'), 'cpu'])
def test_what_is_there_already_is_the_same_object(batch: Any, device: Any) -> None:
    assert to_device(batch, device) is batch


def test_what_moves_itself_is_asked_to() -> None:
    x, thing = to_device([torch.zeros(1), Moving()], META)
    assert x.device == META and isinstance(thing, Moving) and thing.device == 'meta'
    packed = to_device(pack_sequence([torch.zeros(3), torch.zeros(2)]), 'cpu')
    assert packed.batch_sizes.tolist() == [2, 2, 1]


def test_detaches_everything() -> None:
    w = torch.ones(2, requires_grad=True)
    out = to_detach({'a': [w * 2, 'text'], 'b': Pair(w * 3, None)})
    assert not out['a'][0].requires_grad and not out['b'].a.requires_grad and out['a'][1] == 'text'
    assert out['b'].a.tolist() == [3, 3]
    assert to_detach(torch.zeros(1, device='meta'), cpu=False).device == META


# find_bs


@pytest.mark.parametrize(
    ('batch', 'bs'),
    [
        ({'scale': torch.tensor(1.0), 'x': torch.zeros(7, 2)}, 7),
        ([['a', 'b'], torch.zeros(5)], 5),
        ((np.zeros((4, 2)), 'text'), 4),
        (Pair(None, {'x': torch.zeros(2)}), 2),
    ],
)
def test_batch_size(batch: Any, bs: int) -> None:
    assert find_bs(batch) == bs


@pytest.mark.parametrize('batch', [(), {}, (torch.tensor(1.0),), ('text',), None, {'x': []}])
def test_batch_without_a_size(batch: Any) -> None:
    with pytest.raises(BatchError, match='no size'):
        find_bs(batch)


# concat


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 2**31))
def test_concat_undoes_split(sizes: list[int], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(sum(sizes), 3, generator=g), torch.randn(sum(sizes), generator=g)
    parts = [
        {'x': a, 'more': (b, [a * 2])} for a, b in zip(x.split(sizes), y.split(sizes), strict=True)
    ]
    joined = concat(parts)
    assert torch.equal(joined['x'], x) and torch.equal(joined['more'][0], y)
    assert torch.equal(joined['more'][1][0], x * 2)


def test_concat_lists_what_is_ragged() -> None:
    out = concat([torch.zeros(2, 3), torch.ones(1, 5), torch.tensor(2.0)])
    assert [tuple(t.shape) for t in out] == [(3,), (3,), (5,), ()]


@pytest.mark.parametrize(
    ('items', 'joined'),
    [
        ([['a', 'b'], ['c']], ['a', 'b', 'c']),
        ([1, 2], [1, 2]),
        ([None, None], [None, None]),
        ([[{'n': 1}], [{'n': 2}, {'n': 3}]], [{'n': 1}, {'n': 2}, {'n': 3}]),
        ([1, 'a'], [1, 'a']),
        ([('a', 'b'), ('c', 'd')], (['a', 'c'], ['b', 'd'])),
    ],
)
def test_concat_of_what_is_not_a_tensor(items: list[Any], joined: Any) -> None:
    assert concat(items) == joined


def test_concat_keeps_types_and_takes_one_entry_a_sample() -> None:
    out = concat([Pair(torch.zeros(1), 'a'), Pair(torch.zeros(2), 'b')])
    assert isinstance(out, Pair) and out.a.shape == (3,) and out.b == ['a', 'b']
    # lists of unequal length: one entry a sample
    masks = concat([[torch.zeros(2)], [torch.zeros(3), torch.zeros(1)]])
    assert [len(m) for m in masks] == [2, 3, 1]


@pytest.mark.parametrize('items', [[], [{'a': 1}, {'b': 1}], [(1, 2), (1, 2, 3)]])
def test_concat_refuses(items: list[Any]) -> None:
    with pytest.raises(BatchError, match=r'nothing to join|different structure'):
        concat(items)


# microbatches


@given(st.integers(1, 12), st.integers(1, 14))
def test_pieces_put_together_are_the_batch(n: int, size: int) -> None:
    x, y = torch.randn(n, 2), torch.arange(n)
    pieces = microbatches((x, {'n': y}), (y,), size)
    assert [len(p) for (p, _), _ in pieces] == [min(size, n - i) for i in range(0, n, size)]
    assert torch.equal(torch.cat([p for (p, _), _ in pieces]), x)
    assert all(torch.equal(d['n'], q) for (_, d), (q,) in pieces)
    assert torch.equal(torch.cat([q for _, (q,) in pieces]), y)


def test_what_has_another_length_goes_whole() -> None:
    x, w, texts, config = torch.zeros(3, 2), torch.zeros(5), ['a', 'b', 'c'], {'k': 1}
    pieces = microbatches(
        (x, w, texts, config, torch.tensor(2.0)), (('p', 'q', 'r'), np.arange(3), None), 2
    )
    (x0, w0, t0, c0, s0), (y0, a0, none) = pieces[0]
    assert len(x0) == 2
    assert t0 == ['a', 'b']
    assert y0 == ('p', 'q')
    assert a0.tolist() == [0, 1]
    assert s0.item() == 2
    assert none is None
    assert w0 is w and c0 is config
    (x1, _, t1, _, _), (y1, a1, _) = pieces[1]
    assert (len(x1), t1, y1, a1.tolist()) == (1, ['c'], ('r',), [2])


def test_nested_inputs_are_cut_but_the_tuple_of_inputs_is_not() -> None:
    # as many inputs as samples
    pieces = microbatches(({'x': torch.arange(2)}, {'x': torch.arange(2) * 10}), (), 1)
    assert [(a['x'].tolist(), b['x'].tolist()) for (a, b), _ in pieces] == [([0], [0]), ([1], [10])]


# apply_model


class ByName(nn.Module):
    def forward(self, ids: Any, mask: Any = None, labels: Any = None) -> Any:
        return ids, mask, labels


class AnyName(nn.Module):
    def forward(self, **kwargs: Any) -> Any:
        return kwargs


class Whole(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


class Wrapper(nn.Module):
    "A wrapper like the wrappers of data-parallel training."

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Pickier(nn.Module):
    def forward(self, first: Any, **kwargs: Any) -> Any:
        return first, kwargs


def test_model_gets_its_inputs_by_position() -> None:
    assert apply_model(lambda *a: a, (1, 2)) == (1, 2)
    x = torch.zeros(1)
    assert apply_model(nn.Identity(), (x,)) is x
    # two inputs: one of them a dict
    assert apply_model(lambda *a: a, ({'a': 1}, 2)) == ({'a': 1}, 2)


def test_model_gets_the_names_it_knows() -> None:
    batch = {'ids': 1, 'labels': 2, 'unknown': 3}
    assert apply_model(ByName(), (batch,)) == (1, None, 2)
    assert apply_model(ByName(), (UserDict(batch),)) == (1, None, 2)
    assert apply_model(AnyName(), (batch,)) == batch
    assert apply_model(Wrapper(ByName()), (batch,)) == (1, None, 2)
    assert apply_model(Wrapper(Wrapper(ByName())), (batch,)) == (1, None, 2)


def test_model_that_knows_none_of_the_names_gets_the_batch() -> None:
    batch = {'ids': 1}
    assert apply_model(Whole(), (batch,)) is batch
    assert apply_model(Wrapper(Whole()), (batch,)) is batch
    assert apply_model(Pickier(), (batch,)) == (batch, {})
    assert apply_model(dict, (batch,)) == batch  # written in C: no signature


# unpack_output


def test_outputs_that_are_predictions() -> None:
    for out in (
        torch.zeros(2),
        (torch.zeros(1), 2),
        [1],
        Pair(1, 2),
        {'boxes': 1},
        'text',
        None,
        torch.distributions.Categorical(logits=torch.zeros(3)),
    ):
        pred, loss = unpack_output(out)
        assert pred is out and loss is None


def test_outputs_with_a_loss_or_logits() -> None:
    assert unpack_output({'loss': 1, 'logits': 2, 'h': 3}) == (2, 1)
    assert unpack_output({'logits': 2}) == (2, None)
    out = {'loss': 1, 'h': 3}
    assert unpack_output(out) == ({'h': 3}, 1)
    assert out['loss'] == 1  # the model's own output is left as it was


def test_hugging_face_batch_and_outputs() -> None:
    transformers = pytest.importorskip('transformers')
    ids, labels = torch.randint(0, 20, (4, 6)), torch.tensor([0, 1, 2, 0])
    batch = transformers.BatchEncoding({'input_ids': ids, 'labels': labels})
    moved = to_device(batch, 'meta')
    assert isinstance(moved, transformers.BatchEncoding) and moved['input_ids'].device == META
    assert batch['input_ids'] is ids
    xb, yb = split_batch(batch)
    assert xb[0] is batch and yb[0] is labels and find_bs(xb) == 4
    [((piece,), _), _] = microbatches(xb, yb, 3)
    assert torch.equal(piece['input_ids'], ids[:3])

    outputs = transformers.modeling_outputs
    hidden, loss = unpack_output(outputs.BaseModelOutput(last_hidden_state=ids))
    assert hidden.last_hidden_state is ids and loss is None
    joined = concat([to_detach(hidden), to_detach(hidden)])
    assert joined.last_hidden_state.shape == (8, 6)
    out = outputs.MaskedLMOutput(loss=torch.tensor(2.0), hidden_states=(ids,))
    rest, loss = unpack_output(out)
    assert loss == 2 and rest['hidden_states'][0] is ids and 'loss' not in rest and out.loss == 2


# describe


@pytest.mark.parametrize(
    ('batch', 'text'),
    [
        (
            (torch.zeros(8, 1, 28, 28), torch.zeros(8, dtype=torch.int64)),
            '(Tensor[8, 1, 28, 28] float32, Tensor[8] int64)',
        ),
        (
            {'input_ids': torch.zeros(8, 12, dtype=torch.int64), 'n': 3},
            "{'input_ids': Tensor[8, 12] int64, 'n': int}",
        ),
        (['a'] * 64, '[64 x str]'),
        ([torch.zeros(1)] * 9, '[' + 'Tensor[1] float32, ' * 8 + '...]'),
    ],
)
def test_describe(batch: Any, text: str) -> None:
    assert describe(batch) == text


@pytest.mark.parametrize(
    ('a', 'b', 'expected'),
    [
        (Pair(1, [torch.eye(2)]), Pair(1, [torch.eye(2)]), True),
        (Pair(1, 2), (1, 2), False),
        ({'a': torch.ones(2)}, {'a': torch.zeros(2)}, False),
        (np.array(np.nan), np.array(np.nan), True),
        (np.array(1.0), 1.0, False),
        (torch.tensor([torch.nan, 1]), torch.tensor([torch.nan, 1]), True),
        ([1], [1, 2], False),
        ({1, 2}, {3}, True),  # of sets and other objects, only the types are compared
    ],
)
def test_equal_batches(a: Any, b: Any, expected: bool) -> None:
    assert are_equal(a, b, others=True) is expected


# mappings of rows


def make_rows(n: int = 5) -> Rows:
    return Rows(x=torch.arange(2.0 * n).reshape(n, 2), y=torch.arange(1.0 * n)[:, None])


def test_a_mapping_of_rows_is_handled_as_a_dict() -> None:
    rows = make_rows()
    assert split_batch(rows) == ((rows,), (rows['y'],))
    assert BatchForm(targets=('x',)).split(rows) == ((rows,), (rows['x'],))
    assert find_bs(rows) == 5
    assert describe(rows) == "{'x': Tensor[5, 2] float32, 'y': Tensor[5, 1] float32}"
    assert to_device(rows, META)['x'].device == to_device(rows, META)['y'].device == META
    assert are_equal(rows, make_rows()) and not are_equal(rows, make_rows(4))
    graph = Rows(x=torch.ones(2, requires_grad=True))
    detached = to_detach(graph)
    assert type(detached) is Rows and not detached['x'].requires_grad and graph['x'].requires_grad
    assert unpack_output(rows) == (rows, None)
    assert unpack_output(Rows(loss=rows['y'], logits=rows['x']))[0] is rows['x']


def test_a_mapping_of_rows_is_cut_and_joined() -> None:
    rows = make_rows()
    parts = microbatches((rows,), (rows['y'],), 3)
    assert [len(xb[0]) for xb, _ in parts] == [3, 2]
    joined = concat([xb[0] for xb, _ in parts])
    assert type(joined) is dict and are_equal(joined, dict(rows.items()))


def test_training_on_a_mapping_of_rows_equals_dicts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            return out

    def train(batches: list[Any], **options: Any) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        dls = DataLoaders(batches, batches, device='cpu')
        learn = Learner(dls, Model(), nn.MSELoss(), lr=1e-3, **options)
        with learn.no_bar(), learn.no_logging():
            learn.fit(2)
        return learn.model.layer.weight.flatten().tolist(), learn.get_preds()

    rows = [make_rows(), make_rows(4)]
    expected = train([dict(batch.items()) for batch in rows])
    assert are_equal(train(rows), expected)
    weights = train(rows, microbatch=3)[0]
    assert weights == pytest.approx(expected[0], rel=1e-5)
