"""Weights in the safetensors format: restored values, refused files, and no changes after a refusal."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as library
import torch
from torch import Tensor, nn

from learnkit import DataLoaders, Learner
from learnkit.checkpoint.compare import learn_digest
from learnkit.core.errors import OptionError, WeightsError
from tests.helpers.comparing import same
from tests.helpers.learners import quiet_learner


class Tied(nn.Module):
    "A model whose embedding and output layer share a weight."

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(4, 3), nn.Linear(3, 4)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x @ self.embed.weight.t()[:3, :3])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


def learner(path: Path, model: nn.Module | None = None, **kwargs: Any) -> Learner:
    x, y = torch.randn(8, 3), torch.randn(8, 4)
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=4, device='cpu')
    loss_func = nn.MSELoss()
    return quiet_learner(
        dls, net() if model is None else model, loss_func, path=path, lr=0.01, **kwargs
    )


def refused(learn: Learner, path: Path, match: str) -> None:
    before = learn_digest(learn)
    with pytest.raises(WeightsError, match=match) as e:
        learn.load(path)
    assert str(path) in str(e.value) and 'Nothing was loaded' in str(e.value)
    assert learn_digest(learn) == before


# -------------------------------------------------------------------------------------- round trips


def test_weights_and_buffers_are_restored_and_nothing_else_is_in_the_file(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    learn.fit(1)
    path = learn.save('a.safetensors')
    assert path == tmp_path / 'models' / 'a.safetensors'
    (tmp_path / 'other').touch()
    assert path.stat().st_mode == (tmp_path / 'other').stat().st_mode, 'readable by other users'
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    tensors = library.load_file(path)
    assert set(tensors) == set(learn.model.state_dict())
    other = learner(tmp_path)
    params = list(other.model.parameters())
    assert other.load('a.safetensors') is other
    assert same(other.model, learn.model)
    assert not other.opt.state_dict()['state']
    assert all(a is b for a, b in zip(params, other.model.parameters(), strict=True))
    before = path.read_bytes()
    assert learn.save('a.safetensors').read_bytes() == before
    other.fit(1)  # the file's own memory is not trained on
    assert path.read_bytes() == before


def test_the_library_reads_ours_and_we_read_the_librarys(tmp_path: Path) -> None:
    for model, other in ((net(), net()), (Tied(), Tied())):
        path = learner(tmp_path, model).save(tmp_path / 'ours.safetensors')
        assert library.load_model(other, path) == (set(), []) and same(model, other)
        with library.safe_open(path, framework='pt') as f:
            assert f.metadata()['format'] == 'pt'
        library.save_model(model, tmp_path / 'theirs.safetensors')
        for p in other.parameters():
            p.data.zero_()
        learner(tmp_path, other).load(tmp_path / 'theirs.safetensors')
        assert same(model, other)


@pytest.mark.parametrize(
    ('metadata', 'kept'),
    [({'format': 'pt', 'out.weight': 'embed.weight'}, 'embed.weight'), (None, 'out.weight')],
)
def test_tied_weights_are_kept_once_and_load_under_each_name(
    tmp_path: Path, metadata: Any, kept: str
) -> None:
    model = Tied()
    path = learner(tmp_path, model).save('t.safetensors')
    assert list(library.load_file(path)) == ['embed.weight', 'out.bias']
    untied = learner(tmp_path, Tied(tied=False)).load(path).model
    assert same(untied, model) and untied.out.weight is not untied.embed.weight

    library.save_file({kept: model.embed.weight + 1, 'out.bias': model.out.bias}, path, metadata)
    expected = model.embed.weight.detach() + 1
    learner(tmp_path, model).load(path)
    assert torch.equal(model.out.weight, expected) and model.out.weight is model.embed.weight


# ---------------------------------------------------------------------------------- what is refused


def test_what_the_format_has_no_place_for_writes_nothing(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    learn.create_opt()
    with pytest.raises(OptionError, match=r'state of an optimizer.*`\.pth`'):
        learn.save('a.safetensors', with_opt=True)
    model = net()
    model.register_buffer('x', torch.eye(2).to_sparse())
    with pytest.raises(OptionError, match=r'safetensors cannot store it: .*`\.pth`'):
        learner(tmp_path, model).save('a.safetensors')
    assert not [p for p in tmp_path.rglob('*') if p.is_file()]


@pytest.mark.parametrize('cut', [0, 4, 8, 30, -1])
def test_a_truncated_file(tmp_path: Path, cut: int) -> None:
    learn = learner(tmp_path)
    path = learn.save('a.safetensors')
    path.write_bytes(path.read_bytes()[:cut])
    refused(learn, path, 'cannot be read as safetensors: ')
