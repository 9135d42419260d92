"""Tensor parallelism: pairs of ranks that share layers train as one rank does."""

import shutil
import warnings
from pathlib import Path
from time import monotonic

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from learnkit import (
    EMA,
    Callback,
    Checkpoint,
    DataLoaders,
    DistributedError,
    MixedPrecision,
)
from learnkit.comm.dtensor import full_tensor, local_shard
from learnkit.core.errors import ModelError, OptionError
from learnkit.distributed.callback import DistributedTraining
from learnkit.monitors import ActivationMonitor, ActivationStats
from tests.distributed.test_fsdp import CASES, trained
from tests.helpers.fsdp import (
    Even,
    Net,
    Wrong,
    divide_blocks,
    learner,
    max_difference,
    state_values,
)
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

OPTIONS = {'tensor': 2, 'parallelize': divide_blocks}


class Noisy(Even):
    "A model with dropout after each block."

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(x)


def quiet(learn):
    learn.logger = lambda *_: None
    return learn.no_bar()


def results(rank, names, strategy, options):
    "Return the results of cases by name."
    torch.distributed.init_process_group('gloo')
    return {name: trained(strategy, options=options, model=Even, **CASES[name]) for name in names}


@pytest.mark.parametrize('names', [list(CASES)[i::3] for i in range(3)], ids=lambda names: names[0])
def test_pairs_train_as_two_ranks_do(names):
    names = [name for name in names if name != 'fp16']  # refused
    expected = run_ranks(results, 2, names, 'ddp', {})[0]
    for found in run_ranks(results, 4, names, 'fsdp', OPTIONS):
        for name in names:
            pairs = zip(found[name], expected[name], strict=True)
            differences = [max_difference(a, b) for a, b in pairs if len(a)]
            # Muon works in bfloat16, which knows two or three digits
            assert max(differences) < (0.01 if name == 'muon' else 1e-5), (name, differences)


# -- as one process --------------------------------------------------------------------------------


def fit(strategy=None, **options):
    "Return what training and evaluation give: losses, logs, metrics, predictions and weights."
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(75, 5, generator=g), torch.randint(0, 2, (75, 1), generator=g)
    y = y.float()
    dls = DataLoaders.from_tensors((x[:50], y[:50]), (x[50:], y[50:]), bs=8, seed=4)
    learn = learner(Even, metrics=[lambda pred, y: (pred - y).abs().mean()])
    learn.dls = dls
    learn.loss_func = nn.BCEWithLogitsLoss()
    learn.add_cb(Callback(after_loss=lambda cb: cb.training and cb.learn.log('size', len(cb.x))))
    torch.manual_seed(3)
    with quiet(learn):
        if strategy is None:
            learn.fit(2)
            found = [learn.get_preds()[0], torch.tensor(learn.validate())]
        else:
            with learn.distributed(strategy, batch_size='global', **options):
                learn.fit(2)
                found = [learn.get_preds()[0], torch.tensor(learn.validate())]
                assert learn.world.data_size == learn.world.size // 2 and learn.time.sp == 100
    rows = [[row['train_loss'], row['valid_loss'], row['<lambda>']] for row in learn.history]
    return [torch.tensor(rows), *found, *state_values(learn)]


def fit_on_ranks(rank):
    return fit('fsdp', **OPTIONS)


@pytest.mark.parametrize('n', [2, 4])
def test_pairs_train_as_one_process_does(n):
    expected = fit()
    for found in run_ranks(fit_on_ranks, n):
        assert [t.shape for t in found] == [t.shape for t in expected]
        assert max_difference(found, expected) < 1e-6


# -- generators and checkpoints --------------------------------------------------------------------


def run(rank, folder, options, resume):
    "Train a model with dropout; return its weights, averages and losses, and this rank's next random number."
    warnings.filterwarnings('ignore', message='The checkpoint is of')
    cbs = [Checkpoint(every='2ba', folder=folder, keep_last=None), EMA(0.9)]
    learn = learner(Noisy, n=40, cbs=cbs)
    torch.manual_seed(3)
    with quiet(learn), learn.distributed('fsdp', **options):
        drawn = [torch.rand(1)]
        learn.fit(2, resume=resume)
        drawn.append(torch.rand(1))
        averages = learn.ema.state_dict()['averages'].values()
        averages = [full_tensor(t) for t in averages]
    rows = torch.tensor([[row['train_loss'], row['valid_loss']] for row in learn.history])
    return [*state_values(learn), *averages, rows], drawn


def first_checkpoints(folder, into):
    "Copy the checkpoints up to the one within the second epoch."
    for path in sorted(Path(folder).glob('0000[12]-*')):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, Path(into) / path.name)
    return into


def test_a_run_resumes_with_pairs_or_without(tmp_path):
    folders = [
        tmp_path / name for name in ('pairs', 'ranks', 'pairs again', 'as ranks', 'as pairs')
    ]
    pairs, ranks, again, as_ranks, as_pairs = folders
    for path in folders:
        path.mkdir()
    found = run_ranks(run, 4, pairs, OPTIONS, False)
    expected = found[0][0]
    assert all(max_difference(values, expected) == 0 for values, _ in found)
    drawn = torch.tensor([numbers for _, numbers in found])
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])
    assert (drawn[0] != drawn[2]).all()

    first_checkpoints(pairs, again)
    for rank, (values, numbers) in enumerate(run_ranks(run, 4, again, OPTIONS, True)):
        assert max_difference(values, expected) == 0 and numbers[1] == drawn[rank, 1]
    first_checkpoints(pairs, as_ranks)
    for values, _ in run_ranks(run, 2, as_ranks, {}, True):
        assert max_difference(values, expected) < 1e-5
    run_ranks(run, 2, ranks, {}, False)
    first_checkpoints(ranks, as_pairs)
    for values, _ in run_ranks(run, 4, as_pairs, OPTIONS, True):
        assert max_difference(values, expected) < 1e-5


# -- details ---------------------------------------------------------------------------------------


class Fails(Callback):
    def after_pred(self):
        if self.learn.world.rank == 3 and self.learn.train_iter == 2:
            raise ValueError('too bad')


def disturb(cb):
    "Give one rank of a pair another batch."
    if cb.learn.training and cb.learn.world.rank == 3:
        cb.learn.xb = (cb.learn.xb[0] + 1,)


class Tied(Even):
    def __init__(self):
        super().__init__()
        self.blocks[1].inner[0].weight = self.blocks[0].inner[0].weight


def several_things(rank, folder):
    "Run many small checks in one process group; return the failed ones."
    torch.distributed.init_process_group('gloo')
    wrong = Wrong()
    check = wrong.check
    with torch.device('meta'):
        empty = Even()
    learn, whole = learner(lambda: empty), Even().to_empty(device='cpu')
    torch.manual_seed(5)
    for m in whole.modules():
        if hasattr(m, 'reset_parameters'):
            m.reset_parameters()
    torch.manual_seed(5)
    learn.path = Path(folder)
    with quiet(learn), learn.distributed('fsdp', **OPTIONS):
        values = [full_tensor(p) for p in learn.model.parameters()]
        first, second, *_ = learn.world.gather(torch.get_rng_state())
        check('equal generators', torch.equal(first, second))
        check('initialized', max_difference(values, whole.parameters()) == 0)
        n = sum(local_shard(p).numel() for p in learn.model.blocks[0].inner.parameters())
        check('a quarter', n < 0.3 * sum(p.numel() for p in whole.blocks[0].inner.parameters()))
        learn.get_preds(sink=Path(folder, 'preds'))
        learn.save('whole')
        learn.load('whole')
        again = [full_tensor(p) for p in learn.model.parameters()]
        check('saved and loaded', max_difference(values, again) == 0)
    check('a file for each batch', len(list(Path(folder, 'preds').iterdir())) == 3)

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 5), torch.randn(32, 1))
    for name, n, index in (('by ranks', 4, rank), ('by pairs', 2, rank // 2)):
        learn = learner(Even)
        sampler = DistributedSampler(data, n, index)
        learn.dls = DataLoaders(DataLoader(data, batch_size=4, sampler=sampler))
        try:
            with quiet(learn), learn.distributed('fsdp', **OPTIONS):
                learn.fit(1)
        except OptionError as e:
            check(name, n == 4 and f'part {rank // 2} of 2' in str(e))
        else:
            check(name, n == 2 and learn.time.sp == 32)

    refused = {
        'uneven': (Net, {}, ModelError, 'blocks.0.inner.0.weight .9, 7. cannot be divided evenly'),
        'tied': (Tied, {}, ModelError, 'changed the parameters'),
        'nothing': (Even, {'parallelize': lambda model, mesh: None}, OptionError, 'no layer'),
        'three': (Even, {'tensor': 3}, OptionError, 'tensor=3: 4 processes'),
    }
    for name, (model, options, error, text) in refused.items():
        learn = learner(model)
        before = state_values(learn)
        with pytest.raises(error, match=text), learn.distributed('fsdp', **OPTIONS | options):
            pass
        check(name, max_difference(before, state_values(learn)) == 0 and learn.world.size == 1)
    learn = learner(Even, cbs=Callback(before_batch=disturb))
    with (
        pytest.raises(DistributedError, match='2 processes that share layers'),
        quiet(learn),
        learn.distributed('fsdp', **OPTIONS),
    ):
        learn.fit(1)
    for cb in (MixedPrecision('fp16'), ActivationMonitor(), ActivationStats()):
        learn = learner(Even, cbs=cb)
        with (
            pytest.raises(DistributedError, match=f'{type(cb).__name__}.* needs whole layers'),
            learn.distributed('fsdp', **OPTIONS),
        ):
            pass
    return [*wrong]


def test_what_pairs_do_and_refuse(tmp_path):
    assert run_ranks(several_things, 4, tmp_path) == [[]] * 4


def fails(rank):
    learn = learner(Even, cbs=Fails())
    kind = ValueError if rank == 3 else DistributedError
    start = monotonic()
    with pytest.raises(kind, match='too bad'), quiet(learn):
        with learn.distributed('fsdp', **OPTIONS):
            learn.fit(1)
    return monotonic() - start, learn.world.size


def test_all_ranks_hear_of_a_failure():
    for seconds, size in run_ranks(fails, 4):
        assert seconds < 60 and size == 1


def test_options_that_do_not_go_together():
    for options in ({'tensor': 2}, {**OPTIONS, 'replicas': 2}):
        with pytest.raises(OptionError, match='tensor=2'):
            DistributedTraining('fsdp', **options)
    DistributedTraining('fsdp', tensor=1, parallelize=divide_blocks)
