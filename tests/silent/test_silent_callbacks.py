"""What callbacks see and change: outputs of models, gradients before a step, rates, evaluation weights."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import Callback, CancelEpochException, DataLoaders, Learner
from learnkit.callbacks import LRFinder
from learnkit.data import Evaluator
from tests.helpers.learners import quiet_learner

X = torch.linspace(-2, 2, 48 * 3, dtype=torch.float64).sin().view(48, 3)
Y = X.sum(1, keepdim=True)


def learner(model: nn.Module | None = None, **options: Any) -> Learner:
    torch.manual_seed(0)
    dls = DataLoaders.from_tensors((X, Y), (X, Y), bs=16, shuffle=False, device='cpu')
    options = {'loss_func': nn.MSELoss(), 'opt_func': torch.optim.SGD, 'lr': 0.1, **options}
    return quiet_learner(dls, model or nn.Linear(3, 1).double(), **options)


def train_by_hand(loss_of: Any = F.mse_loss) -> tuple[Tensor, float]:
    "Return the weights after one epoch of a plain loop, and the mean loss of the validation set."
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(X.split(16), Y.split(16), strict=True):
        opt.zero_grad()
        loss_of(model(x), y).backward()
        opt.step()
    return model.weight.detach(), F.mse_loss(model(X), Y).item()


# -- outputs of models -----------------------------------------------------------------------------


@dataclass
class Output(OrderedDict[str, Tensor]):
    "An output as transformers has it: fields, keys and indices."

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __post_init__(self) -> None:
        self.update({k: v for k, v in vars(self).items() if v is not None})

    def __getitem__(self, i: Any) -> Tensor:
        return super().__getitem__(i) if isinstance(i, str) else list(self.values())[i]


class WithOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 1).double()

    def forward(self, x: Tensor) -> Output:
        return Output(logits=self.lin(x))


def test_pred_is_what_the_model_returned() -> None:
    def drop(cb: Callback) -> None:
        assert cb.pred[0] is cb.pred['logits']
        cb.learn.pred = cb.pred.logits

    torch.manual_seed(0)
    learn = learner(WithOutput(), cbs=Callback(after_pred=drop))
    learn.fit(1)
    weight, loss = train_by_hand()
    torch.testing.assert_close(learn.model.lin.weight.detach(), weight, rtol=0, atol=1e-12)
    assert learn.validate()[0] == pytest.approx(loss, abs=1e-12)
    preds, _ = learn.get_preds()
    torch.testing.assert_close(preds, learn.model.lin(X).detach(), rtol=0, atol=1e-12)


# -- searches --------------------------------------------------------------------------------------

SEARCHES = {
    'lr_find': lambda learn: learn.lr_find(num_it=12, show_plot=False, stop_div=False),
    'LRFinder': lambda learn: learn.fit(4, cbs=LRFinder(num_it=12, stop_div=False)),
    'find_batch_size': lambda learn: learn.find_batch_size(max_size=32),
}


@pytest.mark.parametrize('search', SEARCHES)
def test_a_search_evaluates_nothing(search: str) -> None:
    def count(cb: Callback) -> None:
        phases.append(cb.phase)

    phases: list[str] = []
    torch.manual_seed(0)
    train = DataLoaders.from_tensors((X, Y), bs=16, shuffle=False, device='cpu').train
    dls = DataLoaders(train, {'often': Evaluator(train, '1ba')}, device='cpu')
    cbs = Callback(before_batch=count)
    learn = Learner(dls, nn.Linear(3, 1).double(), nn.MSELoss(), cbs=cbs)
    with learn.no_bar():
        SEARCHES[search](learn)
    assert set(phases) == {'train'}


# -- cancelled levels ------------------------------------------------------------------------------


def test_a_cancelled_epoch_that_trained_has_a_row() -> None:
    def cancel(cb: Callback) -> None:
        if cb.training and cb.iter == 1:
            raise CancelEpochException

    learn = learner(cbs=Callback(after_batch=cancel, order=60))
    learn.fit(2)
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in [(X[:16], Y[:16]), (X[16:32], Y[16:32])] * 2:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    expected = [sum(losses[:2]) / 2, sum(losses[2:]) / 2]
    assert [r['train_loss'] for r in learn.history] == pytest.approx(expected, rel=1e-6)
    assert [r['valid_loss'] for r in learn.history] == [None, None]
