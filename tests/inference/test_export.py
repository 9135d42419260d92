"""Exported programs equal the model at any batch size, in a process that does not import the model's code."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from learnkit import DataLoaders, Learner
from learnkit.core.errors import ModelError, OptionError
from tests.helpers.fresh import output_of

SERVE = """
import sys, torch, warnings
warnings.filterwarnings('ignore', 'The given buffer is not writable')  # of torch 2.9
folder = sys.argv[1]
program = torch.export.load(f'{folder}/export.pt2').module()
inputs = torch.load(f'{folder}/x.pt')
torch.save([program(x) for x in inputs], f'{folder}/y.pt')
assert 'learnkit' not in sys.modules
"""


def learner(path: Path, model: nn.Module, *inputs: Any, **kwargs: Any) -> Learner:
    train = (*inputs, torch.zeros(6))
    dls = DataLoaders.from_tensors(train, bs=4, n_inp=len(inputs), seed=0, path=path)
    return Learner(dls, model, nn.MSELoss(), **kwargs)


def loaded(path: Path) -> Any:
    return torch.export.load(path).module()


def test_equal_to_the_model_at_any_batch_size_in_a_fresh_process(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2)
    )
    learn = learner(tmp_path, model, torch.randn(6, 3))
    model(torch.randn(50, 3))  # the norm layer learns its averages
    model[2].eval()
    modes, rng = [m.training for m in model.modules()], torch.get_rng_state()
    assert learn.export() == tmp_path / 'export.pt2'
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), rng)

    xs = [torch.randn(n, 3) for n in (1, 7, 33)]
    torch.save(xs, tmp_path / 'x.pt')
    output_of(SERVE, tmp_path)
    model.eval()
    for x, y in zip(xs, torch.load(tmp_path / 'y.pt'), strict=True):
        torch.testing.assert_close(y, model(x))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return (self.emb(ids) * mask[..., None]).sum(1)


def test_inputs_in_a_dict_go_by_name_and_an_activation_is_added_when_asked(tmp_path: Path) -> None:
    model = Masked()
    batch = {'ids': torch.randint(10, (6, 5)), 'mask': torch.ones(6, 5)}
    learn = Learner(DataLoaders.from_tensors(batch, bs=4), model, path=tmp_path)
    plain = learn.export('plain.pt2')
    soft = learn.export(tmp_path / 'sub' / 'soft.pt2', act=nn.Softmax(-1))
    for n in (1, 6):
        x = {k: v[:n] for k, v in batch.items()}
        torch.testing.assert_close(loaded(plain)(**x), model(**x))
        torch.testing.assert_close(loaded(soft)(**x), model(**x).softmax(-1))


class Distance(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).abs().sum(1)


def test_several_inputs_and_no_sample_of_the_data_in_the_file(tmp_path: Path) -> None:
    a, b = torch.full((6, 2), 7.0), torch.full((6, 2), 5.0)
    path = learner(tmp_path, Distance(), a, b).export('d.pt2')
    assert loaded(path)(a[:3], b[:3]).tolist() == [4.0, 4.0, 4.0]
    for t in torch.export.load(path).example_inputs[0]:
        assert t.tolist() == [[0.0, 0.0], [0.0, 0.0]]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_exported_gives_the_reason_and_writes_nothing(tmp_path: Path) -> None:
    learn = learner(tmp_path, Branches(), torch.randn(6, 2))
    with pytest.raises(ModelError, match=r'Branches .*data-dependent'):
        learn.export()
    assert os.listdir(tmp_path) == [] and learn.model.training


def batches() -> Iterator[Any]:
    yield torch.randn(4, 2), torch.zeros(4)


def test_a_batch_of_an_iterator_is_not_taken(tmp_path: Path) -> None:
    drawn = batches()
    learn = Learner(DataLoaders(drawn), nn.Linear(2, 1), path=tmp_path)
    with pytest.raises(OptionError, match='Pass `sample=`'):
        learn.export()
    assert len(next(drawn)) == 2
    assert loaded(learn.export(sample=torch.randn(1, 2)))(torch.zeros(5, 2)).shape == (5, 1)


# -- free axes -----------------------------------------------------------------------------------------


class Attention(nn.Module):
    "Attend over the tokens of a sequence, with a table of 32 positions."

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Embedding(32, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x, _ = self.attention(x, x, x, key_padding_mask=padding)
        out: Tensor = self.head(x.mean(1))
        return out


class OneSize(nn.Module):
    "Depend on the size of the sample."

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum((1, 2))
        return total + 1 if x.shape[1] == 8 else total


def sequence_learner(n: int, path: Path) -> Any:
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (16, n))
    data = tokens, torch.zeros(16, n, dtype=torch.bool), torch.randn(16, 1)
    dls = DataLoaders.from_tensors(data, bs=4, n_inp=2)
    return Learner(dls, Attention(), nn.MSELoss(), path=path)


@pytest.mark.parametrize(
    'dim',
    [
        'length',
        pytest.param(Dim('length', max=32), marks=pytest.mark.full),
        Dim('length', max=20),
    ],
)
def test_a_program_with_free_axes_computes_other_sizes(dim: Any, tmp_path: Path) -> None:
    learn = sequence_learner(12, tmp_path)
    path = learn.export(dynamic_shapes={'tokens': {1: dim}, 'padding': {1: dim}})
    program = torch.export.load(path).module()
    for n_samples, length in ((1, 12), (5, 20), (3, 7)):
        tokens = torch.randint(0, 11, (n_samples, length))
        padding = torch.zeros(n_samples, length, dtype=torch.bool)
        with torch.no_grad():
            expected = learn.model.eval()(tokens, padding)
        torch.testing.assert_close(program(tokens, padding), expected)


@pytest.mark.parametrize(
    ('axes', 'error', 'message'),
    [
        ({'token': {1: 'length'}}, OptionError, 'tokens'),
        ({'tokens': {2: 'length'}}, OptionError, 'below 2'),
        ({'tokens': 'length'}, OptionError, 'length'),
        ({'tokens': {1: 'length'}}, ModelError, '12'),  # the mask keeps its length
    ],
)
def test_free_axes_that_cannot_be_exported(
    axes: Any, error: Any, message: str, tmp_path: Path
) -> None:
    learn = sequence_learner(12, tmp_path)
    with pytest.raises(error, match=message):
        learn.export(dynamic_shapes=axes)
    assert not list(tmp_path.iterdir())


def test_a_model_that_fails_at_a_second_size_needs_bounds(tmp_path: Path) -> None:
    learn = sequence_learner(32, tmp_path)
    free = {name: {1: 'length'} for name in ('tokens', 'padding')}
    with pytest.raises(ModelError, match='64'):
        learn.export(dynamic_shapes=free)
    assert not list(tmp_path.iterdir())
    bound = Dim('length', max=32)
    assert learn.export(dynamic_shapes={name: {1: bound} for name in free}).exists()


def test_a_model_of_one_size_is_refused(tmp_path: Path) -> None:
    x = torch.randn(16, 8, 8)
    learn = Learner(DataLoaders.from_tensors((x, x.sum((1, 2))), bs=4), OneSize(), path=tmp_path)
    with pytest.raises(ModelError, match='8'):
        learn.export(dynamic_shapes={'x': {1: 'height', 2: 'width'}})


def test_axes_of_an_image_are_free(tmp_path: Path) -> None:
    layers = nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(4, 2))
    dls = DataLoaders.from_tensors((torch.randn(16, 1, 8, 8), torch.randn(16, 2)), bs=4)
    learn = Learner(dls, model, nn.MSELoss(), path=tmp_path)
    path = learn.export(dynamic_shapes={'input': {2: 'height', 3: 'width'}})
    x = torch.randn(3, 1, 10, 13)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(path).module()(x), model.eval()(x))
