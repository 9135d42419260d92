"""Errors in callbacks, model, loss, data and optimizer, after which a fit continues in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from learnkit import Callback, DataLoaders, Learner
from learnkit.callbacks import Replay
from learnkit.core.errors import FitError
from tests.checkpoint.test_pause import end_of
from tests.faults.fault_helpers import BS, make_learner, make_model, trigger

TRAINING = [
    'before_draw',
    'after_draw',
    'before_batch',
    'before_pred',
    'after_pred',
    'after_loss',
    'before_backward',
    'after_cancel_backward',
    'after_backward',
    'before_step',
    'after_cancel_step',
    'after_step',
    'after_cancel_batch',
    'after_batch',
    'batch_checkpoint',
]
BEGIN = ['before_fit', 'before_iteration', 'before_epoch', 'before_train']
END = [
    'after_cancel_train',
    'after_train',
    'before_eval',
    'before_validate',
    'after_cancel_validate',
    'after_validate',
    'after_eval',
    'after_cancel_epoch',
    'after_epoch',
    'epoch_checkpoint',
    'after_iteration',
    'iteration_checkpoint',
    'after_fit',
    'after_cancel_fit',
]
EVALUATION = ['before_draw', 'before_batch', 'after_loss', 'after_batch']
PARTS = ['model', 'model in an evaluation', 'loss', 'data set', 'sampler', 'optimizer']

KINDS = [*BEGIN, *TRAINING, *END, *(f'{e} in an evaluation' for e in EVALUATION), *PARTS]
# behind the forward pass and before the step; exact with `Replay`
IN_STEP = TRAINING[TRAINING.index('after_pred') : TRAINING.index('before_step') + 1]
IN_STEP += ['model', 'loss']
# with a line that says what is left out, or seen again
SAID = ['after_cancel_step', 'after_step', 'after_cancel_train', 'after_cancel_validate']
SAID += ['data set', 'sampler']
REFUSED = ['optimizer', 'after_cancel_fit']  # within a step, and a fit that has been cancelled
IN_ORDINARY = ['before_fit', 'before_epoch', 'before_batch', 'loss', 'after_step', 'after_batch']
IN_ORDINARY += ['before_eval', 'after_epoch', 'data set', 'optimizer']


class Bug(Exception):
    "Error that a test raises."


class Plan:
    "Raises an error at the n-th call, once."

    def __init__(self, nth: int) -> None:
        self.left = nth

    def fail(self, *_: Any) -> None:
        if self.left:
            self.left -= 1
            if not self.left:
                raise Bug('a bug')


def of_training(plan: Plan, training: bool = True) -> Callable[[Any], None]:
    return lambda cb: plan.fail() if cb.training == training else None


class Failing(nn.Module):
    def __init__(self, plan: Plan, training: bool) -> None:
        super().__init__()
        self.inner = make_model()
        self.__dict__['plan'] = plan
        self.__dict__['fails_in_training'] = training

    def forward(self, x: Tensor) -> Any:
        pred = self.inner(x)
        if self.training == self.fails_in_training:
            self.plan.fail()
        return pred


class Samples(Dataset[Any]):
    def __init__(self, plan: Plan) -> None:
        self.x = torch.randn(3 * BS, 3, generator=torch.Generator().manual_seed(7))
        self._plan = plan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        self._plan.fail()
        return self.x[i] + torch.randn(3), self.x[i].sum(0, keepdim=True)


class Order(torch.utils.data.RandomSampler):
    def __init__(self, data: Any, plan: Plan) -> None:
        super().__init__(data)
        self._plan = plan

    def __iter__(self) -> Any:
        self._plan.fail()
        return super().__iter__()


class FailingAdam(torch.optim.Adam):
    plan: Plan

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.plan.fail()
        return result


def loaders(samples: Plan, order: Plan) -> DataLoaders:
    data = Samples(samples)
    train = DataLoader(data, BS, sampler=Order(data, order))
    valid = [(x.unsqueeze(0), x.sum().view(1, 1)) for x in data.x[:2]]
    return DataLoaders(train, valid, device='cpu')


def make(kind: str, fails: bool, order: float = 0) -> Learner:
    "Return a Learner in which one part fails once; if not `fails`, one that is otherwise the same."
    never = Plan(0)
    nth = {'after_fit': 1, 'before_fit': 1, 'after_cancel_fit': 1, 'data set': 18, 'sampler': 3}
    plan = Plan(nth.get(kind, 2) if fails else 0)
    event, _, where = kind.partition(' in ')
    in_training = not where
    options: dict[str, Any] = {}
    if event == 'model':
        options['model'] = Failing(plan, in_training)
    if kind in REFUSED:
        options['opt_func'] = lambda params, lr: FailingAdam(params, lr)
        FailingAdam.plan = plan
    if kind == 'loss':
        inner = nn.MSELoss()

        def loss(pred: Tensor, y: Tensor) -> Tensor:
            if pred.requires_grad:
                plan.fail()
            return inner(pred, y)

        options['loss_func'] = loss
    dls = loaders(plan if kind == 'data set' else never, plan if kind == 'sampler' else never)
    learn = make_learner(trigger_again(event), dls=dls, **options)
    learn.remove_cb(learn.progress)
    if event in (*TRAINING, *EVALUATION):
        learn.add_cb(Callback(order=order, **{event: of_training(plan, in_training)}))
    elif kind not in PARTS:
        learn.add_cb(Callback(order=order, **{event: plan.fail}))
    torch.default_generator.manual_seed(5)
    return learn


def trigger_again(event: str) -> list[Callback]:
    "Return the callback that causes an `after_cancel_` event, each time."
    found = trigger(event)
    if not found:
        return []
    planned: Any = found[0]

    def cancel(_: Any) -> None:
        raise type(planned.do)('planned')

    return [Callback(order=-5, **{planned.at: cancel})]


def fit(learn: Learner) -> None:
    learn.fit(3, iteration=1)


def try_again(kind: str, with_replay: bool, capsys: Any, order: float = 0) -> str:
    "Fail, continue and compare; return the outcome."
    expected = make(kind, fails=False, order=order)
    fit(expected)
    learn = make(kind, fails=True, order=order)
    if with_replay:
        expected.add_cb(Replay())  # for the comparison of callbacks only
        learn.add_cb(Replay())
    torch.default_generator.manual_seed(5)
    with pytest.raises(Bug, match='a bug'):
        fit(learn)
    learn.validate()
    torch.rand(3)
    capsys.readouterr()
    if learn.paused is None:
        with pytest.raises(FitError, match='cannot continue'):
            learn.resume()
        return 'refused'
    learn.logger = lambda row: None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.resume()
    out = capsys.readouterr().out
    is_said = 'not exact' in out or bool(caught)
    is_equal = end_of(learn) == end_of(expected)
    assert learn.paused is None
    return {
        (True, True): 'exact, said',
        (True, False): 'exact',
        (False, True): 'said',
        (False, False): 'SILENT',
    }[is_equal, is_said]


def is_right(kind: str, with_replay: bool, outcome: str) -> bool:
    "Return True if the fit was as exact as it can be, and said what was not."
    if kind in REFUSED:
        return outcome == 'refused'
    if kind in SAID or (kind == 'after_cancel_backward' and with_replay):
        return outcome in ('exact, said', 'said')
    return outcome == ('said' if kind in IN_STEP and not with_replay else 'exact')


@pytest.mark.parametrize('kind', IN_ORDINARY)
def test_an_error(kind: str, capsys: Any) -> None:
    outcome = try_again(kind, False, capsys)
    assert is_right(kind, False, outcome), outcome


def test_a_batch_is_repeated_with_replay(capsys: Any) -> None:
    assert try_again('before_step', True, capsys) == 'exact'


@pytest.mark.full
@pytest.mark.parametrize('with_replay', [False, True])
@pytest.mark.parametrize('order', [-100, 0, 100])
@pytest.mark.parametrize('kind', KINDS)
def test_every_error(kind: str, order: float, with_replay: bool, capsys: Any) -> None:
    outcome = try_again(kind, with_replay, capsys, order)
    assert is_right(kind, with_replay, outcome), outcome
