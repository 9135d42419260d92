"""Contexts of callbacks around parts of a batch are entered by the loop, and exited after any error."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from learnkit import Callback, CancelBatchException
from learnkit.testing import synth_learner
from tests.helpers.compiling import needs_whole_step


class Bracket(Callback):
    "Record enters, exits and the events between them."

    def __init__(self, seen: list[str], mark: str = '') -> None:
        self.seen, self.mark = seen, mark

    def forward_context(self) -> Any:
        return self._noted('forward')

    def backward_context(self) -> Any:
        return self._noted('backward')

    @contextmanager
    def _noted(self, part: str) -> Iterator[None]:
        self.seen.append(f'{self.mark}<{part}')
        try:
            yield
        finally:
            self.seen.append(f'{self.mark}{part}>')


class Noter(Callback):
    "Record the events of a batch."

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def before_pred(self) -> None:
        self.seen.append('before_pred')

    def after_pred(self) -> None:
        self.seen.append('after_pred')

    def after_loss(self) -> None:
        self.seen.append('after_loss')

    def after_backward(self) -> None:
        self.seen.append('after_backward')


def learner(*cbs: Any, n_train: int = 1, **kwargs: Any) -> Any:
    return synth_learner(n_train=n_train, n_valid=1, cbs=list(cbs), default_cbs=True, **kwargs)


def quiet_fit(learn: Any, n: int = 1) -> None:
    with learn.no_bar():
        learn.fit(n)


def test_forward_goes_from_the_model_to_the_loss_and_backward_around_backward() -> None:
    seen: list[str] = []
    quiet_fit(learner(Bracket(seen), Noter(seen)))
    train = [
        'before_pred',
        '<forward',
        'after_pred',
        'forward>',
        'after_loss',
        '<backward',
        'backward>',
        'after_backward',
    ]
    assert seen == [*train, 'before_pred', '<forward', 'after_pred', 'forward>', 'after_loss']


def test_autocast_reaches_model_and_loss_and_nothing_else() -> None:
    class Half(Callback):
        def forward_context(self) -> Any:
            return torch.autocast('cpu', torch.bfloat16)

        def after_pred(self) -> None:
            self.dtype, self.inside = self.pred.dtype, torch.is_autocast_enabled('cpu')

        def after_loss(self) -> None:
            self.outside = torch.is_autocast_enabled('cpu')

    half = Half()
    learn = learner(half, model=torch.nn.Linear(1, 1))
    quiet_fit(learn)
    assert (half.dtype, half.inside, half.outside) == (torch.bfloat16, True, False)
    assert learn.model.weight.grad is None and learn.model.weight.dtype == torch.float32


def test_several_are_entered_in_order_and_left_in_reverse() -> None:
    seen: list[str] = []
    first, second = Bracket(seen, 'a'), Bracket(seen, 'b')
    second.order = -1
    learn = learner(first, second)
    with learn.contexts('backward'):
        pass
    assert seen == ['b<backward', 'a<backward', 'abackward>', 'bbackward>']


@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'after_backward'])
@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, CancelBatchException])
def test_they_are_left_when_a_handler_raises(event: str, error: type[BaseException]) -> None:
    def fail(cb: Callback) -> None:
        raise error

    seen: list[str] = []
    learn = learner(Bracket(seen), Callback(**{event: fail}))
    with nullcontext() if error is CancelBatchException else pytest.raises(error):
        quiet_fit(learn)
    assert seen.count('<forward') == seen.count('forward>') > 0
    assert seen.count('<backward') == seen.count('backward>')


def test_run_run_train_and_run_valid_apply() -> None:
    seen: list[str] = []
    bracket = Bracket(seen)
    bracket.run_train = False
    learn = learner(bracket)
    quiet_fit(learn)
    assert seen == ['<forward', 'forward>']  # of validation

    bracket.run_train, bracket.run_valid = True, False
    seen.clear()
    quiet_fit(learn)
    assert seen == ['<forward', 'forward>', '<backward', 'backward>']

    def switch_off(cb: Callback) -> None:
        bracket.run = False

    seen.clear()
    learn.add_cb(Callback(before_fit=switch_off))
    quiet_fit(learn)
    assert seen == []


def test_each_microbatch_has_its_own() -> None:
    seen: list[str] = []
    bracket = Bracket(seen)
    bracket.run_valid = False
    quiet_fit(learner(bracket, microbatch=8))  # of batches of 16
    assert seen == ['<forward', 'forward>', '<backward', 'backward>'] * 2


def test_without_any_it_is_one_object_that_does_nothing() -> None:
    learn = learner()
    assert learn.contexts('forward') is learn.contexts('backward')


def test_an_error_in_making_one_leaves_those_before_it() -> None:
    class Broken(Callback):
        order = 5

        def forward_context(self) -> Any:
            raise OSError('no context')

    seen: list[str] = []
    learn = learner(Bracket(seen), Broken())
    with pytest.raises(OSError, match='no context'):
        quiet_fit(learn)
    assert seen == ['<forward', 'forward>']


@needs_whole_step
def test_the_compiled_step_steps_aside() -> None:
    learn = learner(Bracket([]))
    learn.compile(step=True)
    quiet_fit(learn)
    assert 'Bracket.forward_context has to be called' in learn.explain_step()
