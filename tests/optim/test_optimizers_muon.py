"""Muon for the matrices of hidden layers and AdamW for all other parameters, in one Learner."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import Callback, Learner, OptimizerError
from learnkit.optim.hyperparams import norm_bias_params, params
from learnkit.optim.optimizers import MuonAdamW, hidden_matrices
from tests.helpers.learners import bare_learner

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, 'Muon'), reason='this torch has no Muon')


class Net(nn.Module):
    "A model from words to words, with an embedding."

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6, bias=False)
        )
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.head = nn.Linear(6, 11)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(self.body(self.embed(x))[:, None])[:, 0])


MATRICES = ['body.0.weight', 'body.3.weight']


def data(n: int = 6, bs: int = 5) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    return [(x := torch.randint(11, (bs,), generator=gen), (x + 1) % 11) for _ in range(n)]


def learner(model: nn.Module, *cbs: Any, **kwargs: Any) -> Learner:
    return bare_learner(
        (data(), data(2)),
        model,
        F.cross_entropy,
        cbs=cbs,
        **{'opt_func': MuonAdamW, 'lr': 0.01, **kwargs},
    )


def names(model: nn.Module, ps: Any) -> list[str]:
    wanted = {id(p) for p in ps}
    return [name for name, p in model.named_parameters() if id(p) in wanted]


def by_hand(
    model: Net, n_epoch: int, rates: Any = None, wd: float = 0.01, lr: float = 0.01
) -> list[Tensor]:
    "Return the weights after a plain loop that steps both optimizers."
    spared = {id(p) for p in norm_bias_params(model)}
    hidden = [model.body[0].weight, model.body[3].weight]
    rest = [p for p in model.parameters() if all(p is not q for q in hidden)]
    groups = [
        {'params': [p for p in rest if id(p) not in spared]},
        {'params': [p for p in rest if id(p) in spared], 'weight_decay': 0.0},
    ]
    opts = (
        torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), eps=1e-5, weight_decay=wd, fused=True),
        torch.optim.Muon(
            hidden, lr=lr, momentum=0.95, weight_decay=wd, adjust_lr_fn='match_rms_adamw'
        ),
    )
    for i, (x, y) in enumerate(data() * n_epoch):
        if rates is not None:
            for g in (g for o in opts for g in o.param_groups):
                g['lr'] = rates[i]
        F.cross_entropy(model(x), y).backward()
        for o in opts:
            o.step()
        for o in opts:
            o.zero_grad()
    return [p.detach() for p in model.parameters()]


def same(model: nn.Module, weights: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))


def test_it_is_the_hand_written_loop_over_both_bit_for_bit() -> None:
    learn = learner(model := Net())
    learn.fit(3)
    assert same(model, by_hand(Net(), 3)) and learn.opt.n_steps == 18
    assert names(model, learn.opt['muon'].param_groups[0]['params']) == MATRICES
    assert isinstance(learn.opt['adamw'], torch.optim.AdamW)
    assert isinstance(learn.opt['muon'], torch.optim.Muon)


def test_a_schedule_sets_the_rate_of_both() -> None:
    rates = [0.001 * (i + 1) for i in range(12)]
    schedule = Callback(
        before_batch=lambda cb: cb.training and cb.opt.set_hyper('lr', rates[cb.train_iter])
    )
    learn = learner(model := Net(), schedule)
    learn.fit(2)
    assert learn.recorder.lrs == pytest.approx(rates) and same(model, by_hand(Net(), 2, rates))


def test_hypers_are_one_set_for_both() -> None:
    learn = learner(model := Net())
    learn.create_opt()
    (h,) = learn.opt.hypers
    assert dict(h) == {'lr': 0.01, 'mom': 0.9, 'sqr_mom': 0.99, 'wd': 0.01, 'eps': 1e-5}
    learn.opt.set_hypers(lr=0.5, mom=0.7, sqr_mom=0.8, wd=0.3)
    muon, adamw = learn.opt['muon'].param_groups[0], learn.opt['adamw'].param_groups
    assert (muon['lr'], muon['momentum'], muon['weight_decay']) == (0.5, 0.7, 0.3)
    assert {(g['lr'], g['betas']) for g in adamw} == {(0.5, (0.7, 0.8))}
    decayed = [names(model, g['params']) for g in adamw if g['weight_decay'] == 0.3]
    assert decayed == [['embed.weight', 'conv.weight', 'head.weight']]


def split(m: Any) -> list[list[nn.Parameter]]:
    return [[*params(m.embed), *params(m.body)], params(m.conv), params(m.head)]


def test_groups_are_the_splitters_and_freeze_as_such() -> None:
    learn = learner(model := Net(), splitter=split, train_bn=False)
    learn.fit(1, lr=slice(1e-4, 1e-2))
    assert [names(model, ps) for ps in learn.opt.param_lists] == [
        'embed.weight body.0.weight body.0.bias body.1.weight body.1.bias body.3.weight'.split(),
        ['conv.weight', 'conv.bias'],
        ['head.weight', 'head.bias'],
    ]
    assert [h['lr'] for h in learn.opt.hypers] == pytest.approx([1e-4, 1e-3, 1e-2])
    assert learn.opt['muon'].param_groups[0]['lr'] == pytest.approx(1e-4)

    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    learn.freeze()
    learn.fit(1)
    expected = ['head.weight', 'head.bias']
    assert [n for n, p in model.named_parameters() if not torch.equal(p, before[n])] == expected


def test_which_matrices_are_hidden() -> None:
    model = Net()
    assert names(model, hidden_matrices(model)) == MATRICES
    tied = Net(tied=True)
    assert names(tied, hidden_matrices(tied)) == MATRICES
    attention = nn.ModuleList([nn.MultiheadAttention(4, 2), nn.LayerNorm((2, 2)), nn.Linear(4, 1)])
    assert names(attention, hidden_matrices(attention)) == ['0.in_proj_weight', '0.out_proj.weight']


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r'no hidden matrix.*`Adam`'):
        learner(nn.Linear(2, 2)).fit(1)
