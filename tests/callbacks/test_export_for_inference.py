"""Load weights at an event, and export programs at the end of a fit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, Learner
from learnkit.callbacks.export_for_inference import ExportForInference
from learnkit.callbacks.load_weights import LoadWeights
from learnkit.core.errors import (
    LearnkitError,
    ModelError,
    OptionError,
    UnknownEventError,
    WeightsError,
)
from learnkit.testing import synth_learner
from tests.helpers.learners import quiet_learner
from tests.helpers.ranks import run_ranks


def learner(path: Path, *cbs: Any, model: nn.Module | None = None) -> Learner:
    x, y = torch.randn(40, 1, 6, 6), torch.randint(3, (40,))
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=8)
    return quiet_learner(dls, model or net, nn.CrossEntropyLoss(), lr=0.01, path=path, cbs=[*cbs])


def loaded(path: Path) -> Any:
    with path.open('rb') as f:
        return torch.export.load(f).module()


def test_the_program_computes_what_the_model_does(tmp_path: Path) -> None:
    learn = learner(tmp_path, ExportForInference('net', act=_softmax))
    learn.fit(1)
    (path,) = learn.export_for_inference.files
    assert path == tmp_path / 'net.pt2' and list(tmp_path.iterdir()) == [path]
    program = loaded(path)
    for n in (1, 2, 7):
        x = torch.randn(n, 1, 6, 6)
        with torch.no_grad():
            assert torch.allclose(program(x), learn.model.eval()(x).softmax(1), atol=1e-6)


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(1)


def run_onnx(path: Path, *inputs: Tensor) -> Tensor:
    "Return the output of an ONNX file in its runtime."
    runtime = pytest.importorskip('onnxruntime')
    session = runtime.InferenceSession(str(path))
    names = [given.name for given in session.get_inputs()]
    arrays = [x.numpy() for x in inputs]
    return torch.tensor(session.run(None, dict(zip(names, arrays, strict=True)))[0])


def test_onnx_computes_the_same_at_any_size(tmp_path: Path) -> None:
    pytest.importorskip('onnxscript')
    layers = nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    free = {'input': {2: 'height', 3: 'width'}}
    formats = ('onnx', 'torch.export')
    cb = ExportForInference('net.onnx', formats=formats, dynamic_shapes=free)
    learn = learner(tmp_path, cb, model=nn.Sequential(*layers))
    learn.fit(1)
    assert [p.name for p in learn.export_for_inference.files] == ['net.onnx', 'net.pt2']
    for size in ((1, 1, 6, 6), (5, 1, 9, 13)):
        x = torch.randn(size)
        with torch.no_grad():
            expected = learn.model.eval()(x)
        assert torch.allclose(run_onnx(tmp_path / 'net.onnx', x), expected, atol=1e-5)


def test_a_size_that_the_model_refuses_is_an_error_before_training(tmp_path: Path) -> None:
    free = {'input': {2: 'height', 3: 'width'}}
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    learn = learner(tmp_path, ExportForInference(dynamic_shapes=free), model=model)
    with pytest.raises(ModelError):
        learn.fit(1)
    assert learn.time.ba == 0


class Named(nn.Module):
    "A model that takes the entries of a batch as keyword arguments."

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lin = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return self.lin(self.emb(ids).mean(1)) * scale[:, None]


def test_batches_of_named_entries(tmp_path: Path) -> None:
    pytest.importorskip('onnxscript')
    data = {
        'ids': torch.randint(9, (16, 5)),
        'scale': torch.rand(16),
        'labels': torch.randint(3, (16,)),
    }
    dls = DataLoaders.from_tensors(data, bs=8)
    loss_func = nn.CrossEntropyLoss()
    learn = quiet_learner(
        dls, Named(), loss_func, path=tmp_path, cbs=ExportForInference('net.onnx')
    )
    learn.fit(1)
    (path,) = learn.export_for_inference.files
    for n in (1, 5):
        ids, scale = torch.randint(9, (n, 5)), torch.rand(n)
        with torch.no_grad():
            expected = learn.model.eval()(ids, scale)
        assert torch.allclose(run_onnx(path, ids, scale), expected, atol=1e-5)


class Unsteady(nn.Module):
    "A model whose exported program differs from the model."

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.lin(x.flatten(1))
        return out if torch.compiler.is_exporting() else out + 1


def test_a_file_that_computes_something_else_is_not_kept(tmp_path: Path) -> None:
    learn = learner(tmp_path, ExportForInference(), model=Unsteady())
    with pytest.raises(ModelError, match='does not compute what the model does'):
        learn.fit(1)
    assert learn.time.ep == 1 and not list(tmp_path.iterdir())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x.flatten(1)) if x.sum() > 0 else self.lin(-x.flatten(1))


def test_a_model_that_cannot_be_exported_is_reported_before_training(tmp_path: Path) -> None:
    learn = learner(tmp_path, ExportForInference(), model=Branching())
    with pytest.raises(ModelError, match='cannot be exported'):
        learn.fit(1)
    assert learn.time.ba == 0


@pytest.mark.parametrize('wrong', [{'formats': 'onx'}, {'formats': ('onnx', 'torch')}])
def test_bad_options_are_refused(wrong: Any) -> None:
    with pytest.raises(OptionError):
        ExportForInference(**wrong)


# ------------------------------------------------------------------------------------------ loading


def test_weights_are_loaded_at_each_such_event_of_a_fit(tmp_path: Path) -> None:
    for at, epochs_kept in (('before_fit', 2), ('before_epoch', 1)):
        torch.manual_seed(0)
        learn = synth_learner(lr=0.1, path=tmp_path, cbs=LoadWeights('start', at=at))
        learn.save('start', with_opt=False)
        starts: list[float] = []
        learn.add_cb(
            Callback(before_train=lambda cb, starts=starts: starts.append(cb.learn.model.a.item()))
        )
        first = learn.model.a.item()
        with learn.no_bar(), learn.no_logging():
            learn.fit(2)
            learn.fit(1)
        assert [s == first for s in starts] == [True, epochs_kept == 1, True]
        now = learn.model.a.item()
        learn.validate()
        assert learn.model.a.item() == now != first


def test_what_cannot_be_loaded_is_reported_before_training(tmp_path: Path) -> None:
    learn = synth_learner(path=tmp_path, cbs=LoadWeights('nothing', at='after_fit'))
    with pytest.raises(WeightsError, match='there is no file'):
        learn.fit(1)
    assert learn.time.ba == 0
    with pytest.raises(UnknownEventError, match='before_fit'):
        LoadWeights('a', at='befor_fit')
    torch.save({'c': torch.ones(1)}, tmp_path / 'other.pth')
    learn = synth_learner(path=tmp_path, cbs=LoadWeights(tmp_path / 'other'))
    with pytest.raises(WeightsError):
        learn.fit(1)


# -- several processes -----------------------------------------------------------------------------


def exported(rank: int, folder: Path) -> tuple[list[str], Tensor]:
    torch.manual_seed(1)
    learn = learner(folder / str(rank), ExportForInference('net'))
    with learn.no_bar(), learn.distributed('ddp', timeout='30s'):
        learn.fit(2)
    with torch.no_grad():
        out = learn.model.eval()(torch.ones(2, 1, 6, 6))
    return list(map(str, learn.export_for_inference.files)), out


@pytest.mark.dist
def test_of_several_processes_the_first_exports(tmp_path: Path) -> None:
    (files, first), (none, second) = run_ranks(exported, 2, tmp_path)
    assert files == [str(tmp_path / '0' / 'net.pt2')] == [str(p) for p in tmp_path.rglob('*.*')]
    assert none == []
    program = loaded(Path(files[0]))
    assert torch.equal(first, second)
    assert torch.allclose(program(torch.ones(2, 1, 6, 6)), first, atol=1e-6)


def refused(rank: int, folder: Path, strategy: str) -> tuple[bool, str]:
    "Fit with an export that fails; return whether the weights are unchanged, and the error."
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    learn = learner(folder, ExportForInference('taken/net'), model=net)
    before = [p.clone() for p in net.parameters()]
    with (
        pytest.raises(LearnkitError) as e,
        learn.no_bar(),
        learn.distributed(strategy, timeout='30s'),
    ):
        learn.fit(1)
    is_same = all(map(torch.equal, before, net.parameters()))
    return is_same, f'{type(e.value).__name__}: {e.value}'


@pytest.mark.dist
@pytest.mark.parametrize(
    ('strategy', 'messages'),
    [
        ('ddp', ['OptionError: .*cannot be written', 'DistributedError: .*cannot be written']),
        ('fsdp', ['DistributedError: ExportForInference.*works on whole weights'] * 2),
    ],
)
def test_what_cannot_be_exported_is_reported_by_all_before_training(
    tmp_path: Path, strategy: str, messages: list[str]
) -> None:
    (tmp_path / 'taken').touch()
    for (same, message), expected in zip(
        run_ranks(refused, 2, tmp_path, strategy), messages, strict=True
    ):
        assert same and re.match(expected, message, re.DOTALL), message
