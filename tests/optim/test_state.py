"""Optimizer states in files and in memory: restored values, refused states, and no changes after a refusal."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learnkit import SGD
from learnkit.core.errors import WeightsError
from tests.helpers.comparing import same
from tests.helpers.saving import digest, learner, net


def test_weight_decay_set_by_the_first_fit_does_not_stand_in_the_way(tmp_path: Path) -> None:
    learn = learner(tmp_path, opt_func=partial(SGD, mom=0.9))
    learn.fit(1, wd=0.1)
    learn.save('a')
    other = learner(tmp_path, opt_func=partial(SGD, mom=0.9)).load('a')
    assert len(other.opt.param_groups) == len(learn.opt.param_groups) == 2
    for it in (learn, other):
        it.fit(1, wd=0.1)
    assert same(digest(learn), digest(other))


def test_a_load_that_fails_counts_no_step_twice(tmp_path: Path) -> None:
    learn = learner(tmp_path, opt_func=torch.optim.Adam)
    learn.fit(1)
    learn.save('a')
    learn.model = net(7)
    steps = learn.time.st
    with pytest.raises(WeightsError):
        learn.load('a')
    assert learn.time.st == steps == 4


def test_rates_in_tensors_stay_tensors_and_numbers_numbers(tmp_path: Path) -> None:
    tensor_rate = partial(torch.optim.Adam, lr=torch.tensor(0.25))
    learn = learner(tmp_path, opt_func=tensor_rate)
    learn.create_opt()
    plain = learner(tmp_path, opt_func=torch.optim.Adam)
    plain.load(learn.save('t'))
    assert plain.opt.hypers[0]['lr'] == 0.25 and isinstance(plain.opt.hypers[0]['lr'], float)
    plain.opt.set_hyper('lr', 0.5)
    learn.load(plain.save('n'))
    assert isinstance(learn.opt.hypers[0]['lr'], Tensor) and learn.opt.hypers[0]['lr'] == 0.5


def test_several_optimizers_are_saved_by_name(tmp_path: Path) -> None:
    def two(params: Any, lr: float) -> Any:
        ps = list(params)
        return {'a': torch.optim.Adam(ps[:2], lr), 'b': torch.optim.SGD(ps[2:], lr, momentum=0.9)}

    learn = learner(tmp_path, opt_func=two)
    learn.fit(1)
    learn.save('a')
    other = learner(tmp_path, opt_func=two).load('a')
    for it in (learn, other):
        it.fit(1)
    assert same(digest(learn), digest(other))
    with pytest.raises(
        WeightsError, match=r"optimizer: there are \[''\], in the file \['a', 'b'\]"
    ):
        learner(tmp_path).load('a')


@pytest.mark.parametrize(
    ('opt_func', 'line'),
    [
        (partial(SGD, mom=0.9), 'optimizer SGD: group 0 has betas, eps, momentum'),
        (torch.optim.RMSprop, 'alpha'),
    ],
)
def test_another_kind_of_optimizer_is_refused(tmp_path: Path, opt_func: Any, line: str) -> None:
    learn = learner(tmp_path, opt_func=torch.optim.Adam)
    learn.fit(1)
    learn.save('a')
    other = learner(tmp_path, opt_func=opt_func)
    before = digest(other)
    with pytest.raises(WeightsError, match=line) as e:
        other.load('a')
    assert other.opt is None and same(digest(other), before) and 'with_opt=False' in str(e.value)
    other.fit(1)
    before = digest(other)
    with pytest.raises(WeightsError):
        other.load('a')
    assert same(digest(other), before)
    other.load('a', with_opt=False)


def broken_shape(state: Any) -> None:
    state['state'][0]['exp_avg'] = torch.zeros(4, 4)


def fewer_groups(state: Any) -> None:
    state['param_groups'][0]['params'].pop()


@pytest.mark.parametrize(
    ('change', 'line'),
    [
        (broken_shape, r'exp_avg of 0\.weight is \[5, 3\], in the file \[4, 4\]'),
        (fewer_groups, r'param groups of \[6\] parameters, in the file \[5\]'),
    ],
)
def test_an_optimizer_state_that_does_not_fit_changes_nothing(
    tmp_path: Path, change: Callable[[Any], None], line: str
) -> None:
    learn = learner(tmp_path, opt_func=torch.optim.Adam)
    learn.fit(1)
    state = torch.load(learn.save('a'), weights_only=True)
    change(state['opt'])
    torch.save(state, tmp_path / 'models' / 'a.pth')
    before = digest(learn)
    with pytest.raises(WeightsError, match=line):
        learn.load('a')
    assert same(digest(learn), before)
