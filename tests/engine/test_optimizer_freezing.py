"""Freezing: trained groups, norm layers and their modes, the optimizer's state, and errors."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import (
    SGD,
    Adam,
    Callback,
    DataLoaders,
    Learner,
    ModelError,
    OptimWrapper,
)
from learnkit.optim.hyperparams import params
from learnkit.optim.optimizers import Lookahead
from tests.helpers.compiling import needs_whole_step
from tests.helpers.learners import bare_learner
from tests.helpers.optimizing import data


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)),
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)),
        nn.Linear(4, 1),
    ).double()


def parts(m: nn.Module) -> list[list[nn.Parameter]]:
    return [params(part) for part in m.children()]


def learner(*cbs: Any, model: nn.Module | None = None, **kwargs: Any) -> Learner:
    options = {'opt_func': partial(SGD, mom=0.9), 'lr': 0.05, 'splitter': parts, **kwargs}
    return bare_learner(
        (data(), data(2)),
        net() if model is None else model,
        nn.MSELoss(),
        cbs=cbs,
        recorder=None,
        **options,
    )


def trained(learn: Learner) -> list[str]:
    return [n for n, p in learn.model.named_parameters() if p.requires_grad]


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def moved(learn: Learner, **fit: Any) -> list[str]:
    "Return the names of the parameters that a fit changes."
    before = copies(learn.model)
    learn.fit(1, **fit)
    return [n for n, p in learn.model.named_parameters() if not torch.equal(p, before[n])]


ALL = '0.0.weight 0.1.weight 0.1.bias 1.0.weight 1.1.weight 1.1.bias 2.weight 2.bias'.split()
NORMS_0, NORMS_1, MIDDLE, HEAD = ALL[1:3], ALL[4:6], ALL[3:6], ALL[6:]


@pytest.mark.parametrize('existing', [False, True], ids=['no optimizer', 'an optimizer'])
@pytest.mark.parametrize(
    ('train_bn', 'n', 'expected'),
    [
        (True, -1, [*NORMS_0, *NORMS_1, *HEAD]),
        (False, -1, HEAD),
        (False, 1, [*MIDDLE, *HEAD]),
        (False, -7, ALL),
    ],
)
def test_groups_from_n_on_are_trained(
    existing: bool, train_bn: bool, n: int, expected: list[str]
) -> None:
    learn = learner(train_bn=train_bn, wd=0.1)
    if existing:
        learn.fit(1)
    learn.freeze_to(n)
    assert trained(learn) == expected == moved(learn)
    assert [len(ps) for ps in learn.opt.param_lists] == [3, 3, 2]
    learn.unfreeze()
    assert trained(learn) == ALL == moved(learn) and learn.opt.frozen_idx == 0


def test_freeze_trains_the_last_group_by_the_learner_or_its_optimizer() -> None:
    for act in (lambda learn: learn.freeze(), lambda learn: learn.opt.freeze()):
        learn = learner(train_bn=False)
        learn.create_opt()
        act(learn)
        assert trained(learn) == HEAD and learn.opt.frozen_idx == 2
        learn.opt.unfreeze()
        assert trained(learn) == ALL


def test_training_of_the_head_is_a_plain_loop_over_the_head() -> None:
    learn = learner(train_bn=False)
    learn.freeze()
    learn.fit(2)
    other = net()
    other[:2].requires_grad_(False)
    opt = torch.optim.SGD(other[2].parameters(), lr=0.05, momentum=0.9)
    for x, y in data() * 2:
        F.mse_loss(other(x), y).backward()
        opt.step()
        opt.zero_grad()
    for p, q in zip(learn.model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_frozen_groups_keep_their_momenta() -> None:
    learn = learner(train_bn=False)
    learn.fit(1)
    before = deepcopy(learn.opt.state_dict()['state'])
    learn.freeze()
    learn.fit(1)
    now = learn.opt.state_dict()['state']
    same = [torch.equal(now[i]['momentum_buffer'], before[i]['momentum_buffer']) for i in before]
    assert same == [True] * 6 + [False] * 2


def test_freezing_between_backward_and_step_leaves_the_group_alone() -> None:
    learn = learner(train_bn=False)
    before = copies(learn.model)
    learn.fit(1, cbs=Callback(after_backward=lambda cb: cb.learn.freeze()))
    assert [n for n, p in learn.model.named_parameters() if not torch.equal(p, before[n])] == HEAD


@pytest.mark.parametrize(
    'splitter', [parts, lambda m: [[p for p in ps if p.requires_grad] for ps in parts(m)]]
)
def test_a_new_optimizer_has_the_frozen_groups_too(splitter: Any) -> None:
    learn = learner(train_bn=False, splitter=splitter)
    learn.freeze()
    assert moved(learn, reset_opt=True) == HEAD
    assert [len(ps) for ps in learn.opt.param_lists] == [3, 3, 2] and learn.opt.frozen_idx == 2
    learn.unfreeze()
    assert trained(learn) == ALL == moved(learn)


def test_what_was_frozen_by_hand_stays_so_with_the_default_splitter() -> None:
    model = net()
    model[0].requires_grad_(False)
    learn = bare_learner(data(), model, nn.MSELoss(), recorder=None)
    learn.unfreeze()
    assert trained(learn) == [*MIDDLE, *HEAD] == moved(learn)


def test_an_optimizer_that_was_assigned_can_be_frozen() -> None:
    learn = learner(train_bn=False)
    learn.opt = torch.optim.SGD([{'params': ps} for ps in parts(learn.model)], lr=0.05)
    learn.freeze()
    assert isinstance(learn.opt, OptimWrapper) and trained(learn) == HEAD == moved(learn)


def test_groups_of_several_optimizers_are_counted_in_their_order() -> None:
    def two(groups: Any, lr: float) -> Any:
        return {'body': torch.optim.SGD(groups[:2], lr=lr), 'head': Adam(groups[2:], lr=lr).opt}

    learn = learner(train_bn=False, opt_func=two)
    learn.freeze()
    assert trained(learn) == HEAD == moved(learn)


@pytest.mark.parametrize('opt_func', [Adam, lambda p, lr: Lookahead(SGD(p, lr, mom=0.9), k=2)])
def test_every_optimizer_trains_after_unfreezing(opt_func: Any) -> None:
    learn = learner(opt_func=opt_func)
    learn.freeze()
    learn.fit(1)
    learn.unfreeze()
    assert moved(learn, lr=slice(1e-3, 1e-2)) == ALL


# What is refused, or warned of


def test_a_fit_with_everything_frozen_names_unfreeze() -> None:
    for reset in (False, True):
        learn = learner(train_bn=False)
        learn.freeze_to(3)
        before = copies(learn.model)
        with pytest.raises(ModelError, match=r'Sequential .*learn\.unfreeze\(\)'):
            learn.fit(1, reset_opt=reset)
        assert all(torch.equal(p, before[n]) for n, p in learn.model.named_parameters())
        learn.unfreeze()
        assert moved(learn) == ALL


def test_freezing_one_group_freezes_nothing_and_warns() -> None:
    learn = learner(splitter=params)
    with pytest.warns(UserWarning, match='one param group.*splitter'):
        learn.freeze()
    assert trained(learn) == ALL


# A compiled step


@needs_whole_step
def test_a_compiled_step_notices_freezing() -> None:
    def run(compiled: bool) -> tuple[list[Tensor], Learner]:
        torch.manual_seed(0)
        x = torch.randn(80, 3)
        dls = DataLoaders.from_tensors((x, x.sum(1, keepdim=True)), bs=8)
        learn = bare_learner(
            dls,
            net().float(),
            F.mse_loss,
            opt_func=partial(torch.optim.SGD, momentum=0.9),
            lr=0.05,
            splitter=parts,
            train_bn=False,
            recorder=None,
        )
        if compiled:
            learn.compile(step=True, backend='eager')
        for act in (learn.freeze, learn.unfreeze, partial(learn.freeze_to, 1)):
            torch.manual_seed(1)
            learn.fit(1)
            before = copies(learn.model)
            act()
            learn.fit(1)
            names = [n for n, p in learn.model.named_parameters() if not torch.equal(p, before[n])]
            assert names == trained(learn)
        return [p.detach() for p in learn.model.parameters()], learn

    plain, _ = run(False)
    ours, learn = run(True)
    assert learn.explain_step().startswith('The compiled step runs')
    for p, q in zip(plain, ours, strict=True):
        assert torch.allclose(p, q, atol=1e-6)
