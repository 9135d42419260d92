"""Strategy 'fsdp': the same training as with replicas, with a shard of the weights on every rank."""

import warnings
from operator import is_

import pytest
import torch
from torch import nn

from learnkit import (
    EMA,
    SAM,
    Callback,
    GradientAccumulation,
    GradientClip,
    GuardNonFinite,
    MixedPrecision,
    OptimizerMonitor,
)
from learnkit.callbacks import Checkpoint
from learnkit.callbacks.training import ChannelsLast, GradientValueClip
from learnkit.checkpoint.compare import learn_state
from learnkit.checkpoint.digest import digest
from learnkit.comm.dtensor import is_dtensor
from learnkit.core.errors import DistributedError, ModelError, OptionError
from learnkit.distributed.fsdp import check_can_be_sharded, find_units
from learnkit.optim.optimizers import Adam, Lookahead, MuonAdamW
from tests.helpers.fsdp import (
    Block,
    Net,
    WithStatistics,
    Wrong,
    learner,
    max_difference,
    state_values,
)
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


def trained(strategy, epochs=1, options=(), model=Net, **kwargs):
    "Train; return the weights, the history, the averages and the optimizer's state."
    learn = learner(model, **{k: v() if k == 'cbs' else v for k, v in kwargs.items()})
    torch.manual_seed(3)
    with (
        warnings.catch_warnings(),
        learn.no_bar(),
        learn.no_logging(),
        learn.distributed(strategy, **dict(options)),
    ):
        # in the case that rolls back
        warnings.filterwarnings('ignore', 'The loss is nan', UserWarning)
        learn.fit(epochs)
    ema = [
        average
        for cb in learn.cbs
        if isinstance(cb, EMA)
        for average in cb.state_dict()['averages'].values()
    ]
    kept = [v for s in learn.opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    history = [
        v
        for row in learn.history
        for k, v in row.items()
        if isinstance(v, float) and 'time' not in k
    ]
    return state_values(learn), torch.tensor(history), ema, kept


def by_size(pred, y):
    return ((pred - y) ** 2 * y.abs()).sum() / y.abs().sum()


CASES = {
    'default': {},
    'weighted, clip': {
        'loss_func': by_size,
        'weight_func': lambda xb, yb: yb[0].abs().sum(),
        'cbs': lambda: GradientClip(0.1),
    },
    'value clip': {'cbs': lambda: GradientValueClip(0.01)},
    'ema': {'cbs': lambda: EMA(0.9)},
    'sam': {'cbs': lambda: SAM(0.1)},
    'skip': {'cbs': lambda: [GuardNonFinite('skip'), NaNs(), EMA(0.9)]},
    'monitor': {'cbs': lambda: OptimizerMonitor(every='1ba')},
    'microbatch, accumulate': {'microbatch': 3, 'cbs': lambda: GradientAccumulation(20)},
    'fp16': {
        'cbs': lambda: [MixedPrecision('fp16', init_scale=2.0**17), GradientClip(0.1)],
        'epochs': 2,
    },
    'lookahead': {'opt_func': lambda p, lr: Lookahead(Adam(p, lr), k=2)},
    'muon': {'opt_func': MuonAdamW},
    'groups': {
        'splitter': lambda m: [
            list(m.stem.parameters()),
            [*m.blocks.parameters(), *m.head.parameters()],
        ],
        'lr': [0.001, 0.01],
        'wd': 0.1,
    },
}


class NaNs(Callback):
    "Make one batch not finite."

    run_valid = False

    def before_batch(self):
        if self.learn.train_iter == 1:
            self.learn.xb = (self.learn.xb[0] * torch.nan,)


def as_with_replicas(rank, names):
    "Return the largest difference of the two strategies' results."
    torch.distributed.init_process_group('gloo')
    found = {}
    for name in names:
        a, b = (trained(strategy, **CASES[name]) for strategy in ('ddp', 'fsdp'))
        found[name] = (
            [max_difference(x, y) for x, y in zip(a, b, strict=True) if len(x)],
            max_difference(a[0], state_values(learner())),
        )
    return found


@pytest.mark.parametrize('names', [list(CASES)[i::3] for i in range(3)], ids=lambda names: names[0])
def test_fsdp_trains_as_ddp_does(names):
    for found in run_ranks(as_with_replicas, 2, names):
        for name, (differences, moved) in found.items():
            # Muon works in bfloat16, which knows two or three digits
            assert max(differences) < (0.01 if name == 'muon' else 1e-5), (name, differences)
            assert moved > 1e-3, name


# -- what is cut -----------------------------------------------------------------------------------


def test_repeated_blocks_are_cut_on_their_own():
    model = Net()
    assert find_units(model, None) == list(model.blocks)
    assert find_units(model, nn.LayerNorm) == [b.norm for b in model.blocks][::-1]
    assert find_units(model, lambda m: m is model.head) == [model.head]
    assert find_units(nn.Sequential(nn.Linear(1, 1), nn.Conv1d(1, 1, 1)), None) == []
    both = find_units(model, (Block, nn.Sequential))
    assert both.index(model.blocks[0].inner) < both.index(model.blocks[0])  # inner ones first
    with pytest.raises(OptionError, match='no such submodule'):
        find_units(model, nn.Conv2d)


class Tied(Net):
    "A model whose first block shares a weight with another layer."

    def __init__(self):
        super().__init__()
        self.tied = nn.Linear(7, 9)
        self.tied.weight = self.blocks[0].inner[0].weight

    def forward(self, x):
        return super().forward(x) + self.tied(self.stem(x)).mean(1, keepdim=True)


def test_a_block_that_shares_weights_is_not_cut_on_its_own():
    model = Tied()
    assert find_units(model, None) == [model.blocks[1]]
    assert find_units(model, Block) == [model.blocks[1]]


# -- the model and the Learner around it -----------------------------------------------------------


def several_things(rank):
    "Run many small checks in one process group; return the failed ones."
    torch.distributed.init_process_group('gloo')
    wrong = Wrong()
    check = wrong.check
    for model in (Tied, WithStatistics):  # BatchNorm sees each process's own batches, in both
        a, b = (trained(strategy, model=model, n=40) for strategy in ('ddp', 'fsdp'))
        check(f'{model.__name__}: {max_difference(a[0], b[0])}', max_difference(a[0], b[0]) < 1e-5)
    # the last ones: 3 and 4 samples
    pieces = [trained(strategy, microbatch=3, n=39) for strategy in ('ddp', 'fsdp')]
    check('pieces', max_difference(pieces[0][0], pieces[1][0]) < 1e-5)
    half = trained('fsdp', options={'policy': 'bf16'})
    whole = trained('ddp')
    check('bf16', 0 < max_difference(half[0], whole[0]) < 0.1)
    learn = learner(cbs=EMA(0.9), splitter=CASES['groups']['splitter'])
    own, params = learn.model, list(learn.model.parameters())
    n_whole = sum(p.numel() for p in params)
    # of a process alone
    with warnings.catch_warnings(action='ignore'), learn.no_bar(), learn.no_logging():
        learn.fit(1)  # an optimizer that is there already
    average = learn.ema.state_dict()['averages']
    with learn.no_bar(), learn.no_logging(), learn.distributed('fsdp'):
        check('sharded', learn.model is not own and all(map(is_dtensor, learn.model.parameters())))
        n = sum(p.to_local().numel() for p in learn.model.parameters())
        check('half of it', n < 0.6 * n_whole)
        check('no whole copy', not sum(p.numel() for p in params))
        check(
            'averages go along',
            max_difference(
                average.values(),
                [a.full_tensor() for a in learn.ema.state_dict()['averages'].values()],
            )
            == 0,
        )
        learn.freeze()
        stem = learn.model.stem.weight.full_tensor()
        learn.fit(1)
        frozen = learn.model.stem.weight.full_tensor()
        learn.unfreeze()
        learn.lr_find(num_it=12, show_plot=False)
        now = learn.model.stem.weight.full_tensor()
        check('frozen', torch.equal(frozen, stem) and torch.equal(frozen, now))
        learn.fit(1)
        check('thawed', not torch.equal(frozen, learn.model.stem.weight.full_tensor()))
        evaluated, sums = learn.validate(), digest(learn_state(learn)['optimizer'])
        check('all have the same', len(set(learn.world.gather(sums))) == 1)
        learn.check_replicas()
        try:
            learn.export()
        except ModelError as e:
            check('export', 'is sharded' in str(e))
        else:
            wrong.append('export')
    check('the same objects', learn.model is own and all(map(is_, own.parameters(), params)))
    check('the same weights', abs(learn.validate()[0] - evaluated[0]) < 1e-6)
    check(
        'plain states',
        all(type(v) is torch.Tensor for s in learn.opt.state.values() for v in s.values()),
    )
    check(
        'the optimizer has them',
        {id(p) for p in learn.opt.parameters()} == {id(p) for p in own.parameters()},
    )
    check('modes', all(m.training == own.training for m in own.modules()))
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)

    for name, odd in {
        'ChannelsLast': {'cbs': ChannelsLast()},
        'microbatch': {'microbatch': 'auto'},
    }.items():
        learn = learner(**odd)
        before = state_values(learn)
        try:
            with learn.no_bar(), learn.no_logging(), learn.distributed('fsdp'):
                learn.fit(1)
        except DistributedError as e:
            check(f'{name} by name', name in str(e))
        else:
            wrong.append(f'{name} not refused')
        check('nothing trained', max_difference(before, state_values(learn)) == 0)
    return [*wrong]


def test_the_learner_has_its_own_model_back():
    assert run_ranks(several_things, 2) == [[], []]


def fails(rank):
    learn = learner(cbs=[Fails(), EMA()])
    shapes = [p.shape for p in learn.model.parameters()]
    try:
        with learn.no_bar(), learn.no_logging(), learn.distributed('fsdp', timeout='20s'):
            learn.fit(1)
    except (ValueError, DistributedError) as e:
        error = f'{type(e).__name__}: {e}'
    with pytest.raises(ModelError, match='Net is on the meta device'):
        learn.fit(1)
    assert [p.shape for p in learn.model.parameters()] == shapes
    learn.remove_cb(Fails)
    with (
        learn.no_bar(),
        learn.no_logging(),
        pytest.warns(UserWarning, match='the model gets new ones'),
        learn.distributed('fsdp'),
    ):
        learn.fit(1)
    return error[:60], learn.world.size


class Fails(Callback):
    def after_pred(self):
        if self.learn.world.rank == 1 and self.learn.train_iter == 2:
            raise ValueError('too bad')


def test_the_shards_of_a_failed_rank_are_lost():
    (first, size), (second, _) = run_ranks(fails, 2)
    assert first.startswith('DistributedError: Process 1 of 2 failed in Fails')
    assert second == 'ValueError: too bad'
    assert size == 1


def test_a_wrapped_model_is_refused():
    with pytest.raises(ModelError, match='not DataParallel'):
        check_can_be_sharded(learner(lambda: nn.DataParallel(nn.Linear(5, 1))))


def test_fits_with_a_rehearsed_checkpoint(tmp_path):
    def job(rank):
        learn = learner(n=32, path=tmp_path, cbs=Checkpoint('1ba'))
        with learn.no_bar(), learn.no_logging(), learn.distributed('fsdp'):
            learn.fit(1)
            learn.fit(1)
        return float(learn.final_record[0])

    losses = run_ranks(job)
    assert losses[0] == losses[1]
