"""Parts of callbacks in a compiled step: the example of the documentation, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learnkit import Callback, GradientClip
from learnkit.callbacks.nan_guard import GuardNonFinite
from learnkit.core.errors import CallbackError
from tests.helpers.compiling import compiled, distance, fit_both, learner, needs_whole_step

pytestmark = needs_whole_step

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'lifecycle.md'


def documented_callback() -> Any:
    "Return the class of the example in the documentation."
    text = PAGE.read_text('utf-8').partition('## Callbacks in a compiled step')[2]
    found = re.search(r'```python\n(.*?)```', text, re.DOTALL)
    assert found
    names: dict[str, Any] = {}
    exec(found[1], names)
    return names['Centralize']


def test_the_documented_callback_compiles() -> None:
    cls = documented_callback()
    plain, learn, backend = fit_both(lambda: learner(cbs=cls()))
    assert backend.calls == 19 and backend.graphs == 1
    assert distance(plain, learn) < 1e-6
    assert float(learn.centralize.removed) == pytest.approx(float(plain.centralize.removed))
    assert distance(learn, fit_both(learner)[0]) > 1e-4


def look_ahead(params: list[Tensor], state: dict[str, Any]) -> None:
    "Move slow weights towards the weights, and these onto them, if a move is due."
    for slow, p in zip(state['slow'], state['weights'], strict=True):
        slow.lerp_(p, state['share'] * state['is_due'])
        p.lerp_(slow, state['is_due'])


class Lookahead(Callback):
    "Average the weights of every third step (Zhang et al., 2019), as a reader of the page would write it."

    def __init__(self, share: float = 0.5, every: int = 3) -> None:
        self.share, self.every = share, every
        self.n_steps = 0
        self.slow: list[Tensor] = []

    def before_fit(self) -> None:
        self.weights = [p for p in self.learn.model.parameters() if p.requires_grad]
        self.slow = self.slow or [p.detach().clone() for p in self.weights]

    def read_state(self) -> dict[str, Any]:
        is_due = float((self.n_steps + 1) % self.every == 0)
        return {'share': self.share, 'is_due': is_due, 'slow': self.slow, 'weights': self.weights}

    @torch.no_grad()
    def after_step(self) -> None:
        look_ahead(self.weights, self.read_state())
        self.count({})

    def count(self, found: dict[str, Any]) -> None:
        self.n_steps += 1

    def compiled_step(self) -> dict[str, Any]:
        return {'state': self.read_state, 'after_step': look_ahead, 'finish': self.count}


def train_by_hand(learn: Any, n_epoch: int) -> None:
    "Train with the same average in a loop of torch."
    opt = torch.optim.SGD(learn.model.parameters(), 0.01, momentum=0.9)
    slow = [p.detach().clone() for p in learn.model.parameters()]
    n = 0
    for _ in range(n_epoch):
        for x, y in learn.dls.train:
            torch.nn.functional.mse_loss(learn.model(x), y).backward()
            opt.step()
            opt.zero_grad()
            n += 1
            for s, p in zip(slow, learn.model.parameters(), strict=True):
                if n % 3 == 0:
                    s += 0.5 * (p.detach() - s)
                    p.data.copy_(s)


def test_an_average_of_a_reader_compiles() -> None:
    plain, learn, backend = fit_both(lambda: learner(cbs=Lookahead()))
    by_hand = learner()
    torch.manual_seed(1)
    train_by_hand(by_hand, 2)
    assert backend.calls == 19 and backend.graphs == 1
    assert learn.explain_step().startswith('The compiled step runs')
    assert distance(plain, learn) < 1e-6 and distance(plain, by_hand) < 1e-6
    assert learn.lookahead.n_steps == plain.lookahead.n_steps == 20
    assert torch.allclose(
        torch.cat([*map(torch.ravel, learn.lookahead.slow)]),
        torch.cat([*map(torch.ravel, plain.lookahead.slow)]),
    )


class Checked(Callback):
    "Refuses the steps of some batches, whose number grows from step to step."

    def __init__(self) -> None:
        self.refused: list[int] = []

    def after_step(self) -> None:
        if self.learn.train_iter % 5 == 4:
            self.refused.append(self.learn.train_iter)

    def compiled_step(self) -> dict[str, Any]:
        return {'state': self.read_state, 'before_step': accept_by_number, 'undo': True}

    def read_state(self) -> dict[str, Any]:
        return {'i': self.learn.train_iter % 5}


def accept_by_number(grads: list[Tensor], state: dict[str, Any]) -> list[Tensor]:
    state['accept'] = state['i'] < 4
    return grads


@pytest.mark.parametrize('opt_func', [torch.optim.AdamW])
def test_a_refused_step_is_undone_and_taken_by_the_ordinary_one(opt_func: Any) -> None:
    plain, learn, backend = fit_both(lambda: learner(opt_func=opt_func, cbs=Checked()))
    assert learn.checked.refused == plain.checked.refused == [4, 9, 14, 19]
    assert backend.calls == 19 and distance(plain, learn) < 1e-6
    assert learn.opt.n_steps == plain.opt.n_steps == 20


class Later(Checked):
    "Has no state for the first steps."

    def read_state(self) -> dict[str, Any] | None:  # type: ignore[override]
        return None if self.learn.train_iter < 7 else {'i': 0}


def test_a_part_may_ask_for_the_ordinary_step() -> None:
    learn, backend = compiled(learner(cbs=Later()))
    assert backend.calls == 0
    learn.fit(1)
    # the state is read again before each step
    assert backend.calls == 3 and learn.later.refused == [4]


class Weaker(GradientClip):
    def before_step(self) -> None:
        self.max_norm *= 0.9
        super().before_step()


def test_a_handler_of_a_subclass_is_called() -> None:
    plain, learn, backend = fit_both(lambda: learner(cbs=Weaker(1.0)))
    assert 'Weaker.before_step has to be called' in learn.explain_step()
    assert backend.calls == 19 and distance(plain, learn) < 1e-6
    assert learn.weaker.max_norm == plain.weaker.max_norm == pytest.approx(0.9**20)


class Wrong(Checked):
    def compiled_step(self) -> dict[str, Any]:
        return {'after_backward': accept_by_number}


def test_an_unknown_key_is_an_error() -> None:
    learn, _ = compiled(learner(cbs=Wrong()))
    with pytest.raises(CallbackError, match=r"Wrong.*'after_backward'.*before_step"):
        learn.fit(1)


def test_a_part_that_is_off_leaves_the_step() -> None:
    plain, learn, backend = fit_both(lambda: learner(cbs=GradientClip(1e-3)), 1)
    for one in (plain, learn):
        one.gradient_clip.run = False
        one.fit(1)
    assert distance(plain, learn) < 1e-6 and backend.graphs == 2


def test_another_shape_is_compiled_when_it_comes_again() -> None:
    plain, learn, backend = fit_both(lambda: learner(n=84), 4)
    # all but the first batch, and the first smaller one
    assert learn.opt.n_steps == 44 and backend.calls == 42 and backend.graphs == 2
    assert distance(plain, learn) < 1e-6
    found = learn.explain_step()
    assert '(8, 8)' in found and '(4, 8)' in found and 'compiled 2 times' in found


class LateCheck(Checked):
    "Refuses no step, and acts in forward as well."

    def after_loss(self) -> None: ...

    def compiled_step(self) -> dict[str, Any]:
        return {'before_step': accept_all, 'undo': True}


def accept_all(grads: list[Tensor], state: dict[str, Any]) -> list[Tensor]:
    state['accept'] = torch.tensor(True)
    return grads


def test_a_check_of_the_step_is_left_out_of_compiled_passes() -> None:
    make = lambda: learner(opt_func=torch.optim.RMSprop, cbs=LateCheck())
    plain, learn, backend = fit_both(make)
    assert backend.calls == 19 and distance(plain, learn) < 1e-6
    assert learn.late_check.refused == plain.late_check.refused == [4, 9, 14, 19]


def test_a_first_batch_without_a_step_prevents_nothing() -> None:
    def spoil(cb: Any) -> None:
        if cb.train_iter == 0:
            cb.learn.xb = (cb.learn.x * float('nan'),)

    make = lambda: learner(
        opt_func=torch.optim.AdamW, cbs=[GuardNonFinite('skip'), Callback(before_batch=spoil)]
    )
    with pytest.warns(UserWarning, match='batch 0 of epoch 0'):
        plain, learn, backend = fit_both(make)
    assert learn.opt.n_steps == plain.opt.n_steps == 19 and backend.calls == 18
    assert distance(plain, learn) < 1e-6
