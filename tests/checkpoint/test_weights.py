"""Errors for missing files, files without weights, and a Learner that was loaded without data."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.ao.quantization import PerChannelMinMaxObserver

from learnkit import Checkpoint, DataLoaders, Learner
from learnkit.checkpoint.weights import compare_weights, load_weights
from learnkit.core.errors import EmptyLoaderError, OptionError
from learnkit.core.file_tensor import FileTensor
from learnkit.learner import load_learner

X, Y = torch.randn(8, 4), torch.arange(8) % 3


def learner(path: Path) -> Learner:
    dls = DataLoaders.from_tensors((X, Y), (X, Y), bs=4, device='cpu')
    return Learner(dls, nn.Sequential(nn.Linear(4, 3)), nn.CrossEntropyLoss(), path=path)


@pytest.mark.parametrize('name', ['m.pth', 'm.onnx'])
def test_programs_have_their_own_suffix(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r'`\.pt2`.*`learn\.save_learner'):
        learner(tmp_path).export(name)
    assert not list(tmp_path.iterdir())


def test_weights_with_another_suffix_are_found(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    torch.save({k: v + 1 for k, v in learn.model.state_dict().items()}, tmp_path / 'w.pt')
    expected = learn.model[0].weight + 1
    assert torch.equal(learn.load(tmp_path / 'w.pt').model[0].weight, expected)


def test_a_learner_without_data(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    path = learn.save_learner()
    with pytest.raises(OptionError, match=r'model=build\)` calls `build\(\)`'):
        load_learner(path)
    loaded = load_learner(path, model=learn.model, loss_func=nn.CrossEntropyLoss(), cpu=True)
    assert loaded.dls.device == torch.device('cpu') and repr(loaded.dls) == 'No data'
    assert loaded.get_preds(dl=[(X,)])[0].shape == (8, 3)
    for do in (
        lambda: loaded.fit(1),
        lambda: loaded.lr_find(show_plot=False),
        lambda: loaded.dls.one_batch(),
    ):
        with pytest.raises(EmptyLoaderError, match=r'without data: pass them, .*dls=dls'):
            do()
    loaded.dls = learn.dls
    loaded.fit(1)


def test_tied_weights_that_are_in_a_file_are_read_once() -> None:
    reads: list[torch.Tensor] = []

    def read() -> torch.Tensor:
        reads.append(torch.full((3, 3), 2.0))
        return reads[-1]

    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    stored = FileTensor.make(torch.empty(3, 3), read)
    load_weights(model, {'0.weight': stored, '1.weight': stored})
    assert len(reads) == 1 and model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, torch.full((3, 3), 2.0))


class Observed(nn.Module):
    "A layer whose inputs are observed; the observer's buffers get their shape in the first pass."

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.observer = PerChannelMinMaxObserver(ch_axis=1)
        self.layer = nn.Linear(4, 3)
        self.register_buffer('scale', torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.observer(x) * self.scale)


def test_buffers_that_get_their_shape_in_training_are_loaded(tmp_path: Path) -> None:
    dls = DataLoaders.from_tensors((X, Y), (X, Y), bs=4, shuffle=False, device='cpu')

    def train(n_epoch: int, folder: str, resume: bool = False) -> Learner:
        checkpoint = Checkpoint('1ep', tmp_path / folder, background=False)
        learn = Learner(dls, Observed(), nn.CrossEntropyLoss(), lr=0.1, path=tmp_path)
        with learn.no_bar(), learn.no_logging():
            learn.fit(n_epoch, cbs=checkpoint, resume=resume)
        return learn

    straight = train(3, 'straight').model.state_dict()
    train(1, 'resumed')
    learn = train(2, 'resumed', resume=True)
    assert learn.model.observer.min_val.shape == (4,)
    resumed = train(3, 'resumed', resume=True).model.state_dict()
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    path = learn.save('observed')
    fresh = Learner(dls, Observed(), nn.CrossEntropyLoss(), path=tmp_path)
    assert torch.equal(fresh.load(path).model.observer.max_val, learn.model.observer.max_val)


def test_other_shapes_of_other_tensors_are_refused() -> None:
    weights = {**Observed().state_dict(), 'scale': torch.ones(5), 'layer.bias': torch.ones(2)}
    weights['observer.min_val'] = torch.ones(7)
    assert compare_weights(Observed(), weights) == [
        'shape: scale is [4], in the file [5]',
        'shape: layer.bias is [3], in the file [2]',
    ]
