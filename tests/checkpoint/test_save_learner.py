"""Trained models as weights and configuration: a file without code, and a Learner created from it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import nn

from learnkit import DataLoaders, Learner
from learnkit.core.errors import ModelError, OptionError, WeightsError
from learnkit.learner import load_learner


class Net(nn.Sequential):
    def __init__(self, hidden: int, fname: str = '') -> None:
        super().__init__(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def data(path: Path) -> DataLoaders:
    torch.manual_seed(1)
    x = torch.randn(40, 3)
    y = (x[:, 0] > 0).long()
    return DataLoaders.from_tensors((x, y), (x, y), bs=8, shuffle=False, path=path)


@pytest.fixture
def trained(tmp_path: Path) -> Learner:
    dls = data(tmp_path)
    loss_func = nn.CrossEntropyLoss()
    learn = Learner(dls, Net(8), loss_func, lr=0.01, wd=0.2, moms=(0.9, 0.8, 0.9), train_bn=False)
    learn.dls.vocab = ['no', 'yes']  # type: ignore[attr-defined]  # as fastai's have
    learn.logger = noop
    learn.fit(2, lr=0.1)
    return learn


def test_a_loaded_learner_predicts_validates_and_trains_on(
    trained: Learner, tmp_path: Path
) -> None:
    path = trained.save_learner(hidden=8)
    assert path == tmp_path / 'learner.pth'
    learn = load_learner(path, model=Net, loss_func=nn.CrossEntropyLoss())
    dl = trained.dls.valid
    assert torch.equal(learn.get_preds(dl=dl)[0], trained.get_preds()[0])
    assert learn.validate(dl=dl) == trained.validate()
    assert learn.dls.vocab == ['no', 'yes'] and learn.path == tmp_path
    assert learn.lr == 0.01
    assert learn.wd == 0.2
    assert learn.moms == (0.9, 0.8, 0.9)
    assert learn.train_bn is False

    dls = data(tmp_path)
    learn = load_learner(path, model=Net, dls=dls, loss_func=nn.CrossEntropyLoss(), wd=0.0)
    learn.logger = noop
    learn.fit(1, lr=0.1)
    trained.fit(1, lr=0.1, reset_opt=True, wd=0.0)
    assert all(
        map(torch.equal, learn.model.state_dict().values(), trained.model.state_dict().values())
    )


def test_the_file_holds_plain_values_that_load_safely(trained: Learner) -> None:
    state = torch.load(trained.save_learner('a.pth', hidden=8, fname='own'), weights_only=True)
    assert state['config']['model_config'] == {'hidden': 8, 'fname': 'own'}
    assert (state['config']['model'], state['config']['loss_func']) == ('Net', 'CrossEntropyLoss')
    with pytest.raises(OptionError, match=r"model_config\['act'\] is a type"):
        trained.save_learner('b.pth', act=nn.ReLU)
    assert not (trained.path / 'b.pth').exists()


def test_without_the_code_the_error_shows_the_call(trained: Learner) -> None:
    path = trained.save_learner(hidden=8)
    with pytest.raises(OptionError) as e:
        load_learner(path)
    assert 'of a Net' in str(e.value) and 'calls `build(hidden=8)`' in str(e.value)
    assert 'no code' in str(e.value)


def test_a_ready_model_and_one_that_does_not_fit(trained: Learner) -> None:
    path = trained.save_learner()
    model = Net(8)
    assert load_learner(path, model=model).model is model
    other = Net(9)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(WeightsError, match=r' Net, in 3 places'):
        load_learner(path, model=other)
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())
    with pytest.raises(TypeError) as e:
        load_learner(path, model=Net)
    assert 'configuration' in ''.join(e.value.__notes__)
    wrong: Any = dict
    with pytest.raises(ModelError, match='built a dict'):
        load_learner(path, model=wrong)
    with pytest.raises(OptionError, match='model='):
        load_learner(path, model='Net')  # type: ignore[arg-type]


class Activating(nn.CrossEntropyLoss):
    def activation(self, x: Any) -> Any:
        return x.softmax(-1)


def test_a_loss_that_made_the_predictions_is_missed(trained: Learner) -> None:
    trained.loss_func = Activating()
    path = trained.save_learner(hidden=8)
    with pytest.warns(UserWarning, match='had the loss Activating'):
        load_learner(path, model=Net)
    learn = load_learner(path, model=Net, loss_func=Activating())
    assert torch.equal(learn.get_preds(dl=trained.dls.valid)[0], trained.get_preds()[0])


def test_other_files_are_refused(trained: Learner, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match='without a configuration'):
        load_learner(trained.save('w'), model=Net(8))
    state = torch.load(trained.save_learner(), weights_only=True)
    torch.save({**state, 'learnkit': 99}, tmp_path / 'new.pth')
    with pytest.raises(WeightsError, match=r'format 99.*update'):
        load_learner(tmp_path / 'new.pth', model=Net(8))
    torch.save(trained.model, tmp_path / 'pickle.pth')
    with pytest.raises(WeightsError, match='would run code'):
        load_learner(tmp_path / 'pickle.pth', model=Net(8))
