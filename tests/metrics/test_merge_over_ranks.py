"""Metrics, losses, logs and predictions of several processes equal one process on all of the data."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import learnkit.metrics as M
from learnkit import (
    Callback,
    DataLoaders,
    FetchPredsCallback,
    GatherPredsCallback,
    Learner,
    MetricError,
    OptionError,
    TensorLoader,
    accuracy,
)
from tests.helpers.distributing import make_data, make_dls, make_learner, rows, same_rows
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

torchmetrics = pytest.importorskip('torchmetrics')


class Logs(Callback):
    order, run_valid = 70, False

    def after_batch(self) -> None:
        learn, y = self.learn, self.learn.yb[0]
        learn.log('mean_y', y.double().mean(), weight=len(y))
        learn.log('rate', learn.opt.hypers[-1]['lr'], weight=None)
        if learn.world.rank == learn.world.size - 1:
            learn.log('of_the_last', 2.0)


def median_margin(p: Tensor, t: Tensor) -> Tensor:
    return (p.max(1)[0] - p.gather(1, t[:, None])[:, 0]).median()


def measured(dls: DataLoaders, **options: Any) -> Learner:
    metrics = [
        accuracy,
        M.F1Score(average='macro', on='both'),
        M.RocAuc,
        M.BrierScore,
        M.Perplexity,
        torchmetrics.classification.MulticlassCalibrationError(3),
        M.AccumMetric(median_margin, flatten=False),
    ]
    learn = make_learner(dls, metrics=metrics, cbs=Logs(), **options)
    learn.recorder.train_metrics = True
    return learn


def outcome(learn: Learner) -> dict[str, Any]:
    return {
        'rows': rows(learn),
        'validated': list(learn.validate()),
        'losses': learn.recorder.smooth_loss.smooth,
        'values': [list(v) for v in learn.recorder.values],
    }


# 89 samples leave a last batch that one rank does not have
@pytest.mark.parametrize(
    ('n', 'n_train', 'options'), [(2, 95, {}), (3, 95, {}), (2, 89, {}), (2, 89, {'microbatch': 3})]
)
def test_rows_match_one_process(n: int, n_train: int, options: dict[str, Any]) -> None:
    def job(rank: int) -> dict[str, Any]:
        learn = measured(make_dls(n_train, bs=4), **options)
        with learn.distributed('ddp', timeout='20s'):
            learn.fit(3)
            times = [row['time'] for row in learn.history]
            return {**outcome(learn), 'times': times}

    alone = measured(make_dls(n_train, bs=4 * n), **options)
    alone.fit(3)
    expected, ranks = outcome(alone), run_ranks(job, n)
    for got in ranks:
        assert got == ranks[0]  # to the last bit, the seconds too
        assert same_rows(got['rows'], expected['rows'], 1e-6) and 'of_the_last' in got['rows'][0]
        assert same_rows(
            [{k: v for k, v in r.items() if 'loss' in k or k == 'mean_y'} for r in got['rows']],
            [
                {k: v for k, v in r.items() if 'loss' in k or k == 'mean_y'}
                for r in expected['rows']
            ],
        )
        for k in ('losses', 'validated'):
            assert got[k] == pytest.approx(expected[k], abs=1e-6)


class Unmergeable(M.Metric):
    def reset(self) -> None:
        self.n = 0

    def accumulate(self, learn: Any) -> None:
        self.n += 1

    @property
    def value(self) -> int:
        return self.n


def test_a_metric_that_cannot_be_merged_is_refused_before_anything() -> None:
    def job(rank: int) -> bool:
        learn = make_learner(metrics=Unmergeable)
        before = [p.clone() for p in learn.model.parameters()]
        with learn.distributed('ddp', timeout='20s'):
            with pytest.raises(MetricError, match='Unmergeable: several processes train together'):
                learn.fit(1)
        return all(torch.equal(a, b) for a, b in zip(before, learn.model.parameters(), strict=True))

    assert run_ranks(job) == [True, True]
    learn = make_learner(metrics=Unmergeable)
    learn.fit(1)  # alone it can be trained with
    assert learn.history[0]['unmergeable'] == 5


# -- predictions -----------------------------------------------------------------------------------


def loaders(kind: str, n: int) -> Any:
    data = make_data(n, seed=2)
    return {
        'tensors': lambda: TensorLoader(*data, bs=4),
        'torch': lambda: DataLoader(TensorDataset(*data), 4),
        'shuffled': lambda: DataLoader(TensorDataset(*data), 4, shuffle=True),
        'list': lambda: list(zip(*(t.split(4) for t in data), strict=True)),
    }[kind]()


def compare_preds(make: Any, ask: Any, n: int = 2) -> None:
    def job(rank: int) -> Any:
        learn = make()
        with learn.distributed('ddp', timeout='20s'):
            return ask(learn)

    expected = ask(make())
    for got in run_ranks(job, n):
        assert_same(got, expected)


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-10, 1e-10)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for k in a:
            assert_same(a[k], b[k])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == pytest.approx(b, 1e-6)


@pytest.mark.parametrize('kind', ['tensors', 'torch', 'shuffled', 'list'])
def test_predictions_of_all_come_in_the_order_of_the_data(kind: str) -> None:
    def ask(learn: Learner) -> Any:
        # with so few samples, a process has none
        got = [
            learn.get_preds(dl=loaders(kind, n), with_loss=True, with_input=True, with_decoded=True)
            for n in (37, 8, 3, 1)
        ]
        return [
            *got,
            learn.get_preds(),
            learn.get_preds(ds_idx=0),
            [list(learn.validate(dl=loaders(kind, 37)))],
        ]

    compare_preds(lambda: make_learner(make_dls(30, bs=8)), ask)


def test_predictions_inside_a_fit() -> None:
    def ask(learn: Learner) -> Any:
        learn.fit(2)
        return learn.fetch_preds.preds

    options = {'cbs': FetchPredsCallback, 'opt_func': torch.optim.SGD, 'lr': 0.0}
    compare_preds(lambda: make_learner(make_dls(64, bs=8), **options), ask)


def test_sharded_models_evaluate_in_step() -> None:
    def job(rank: int) -> Any:
        # in the last round one process has no sample
        learn = measured(make_dls(64, bs=4, n_valid=33))
        with learn.distributed('fsdp', timeout='30s'):
            return [list(learn.validate()), learn.get_preds(with_loss=True)]

    learn = measured(make_dls(64, bs=8, n_valid=33))
    for got in run_ranks(job):
        assert_same(got, [list(learn.validate()), learn.get_preds(with_loss=True)])


def test_streams_give_each_process_its_share() -> None:
    def job(rank: int) -> Any:
        learn = make_learner(make_dls(n_valid=21, bs=4))
        with learn.distributed('ddp', timeout='20s'):
            return [targs for _, targs in learn.predict_iter()]

    parts = run_ranks(job)
    assert [len(t) for t in parts[0]] == [4, 4, 2] and [len(t) for t in parts[1]] == [4, 4, 3]
    ordered = torch.cat([t for row in zip(*parts, strict=True) for t in row])
    assert torch.equal(ordered, make_data(21, seed=2)[1])


def test_sinks(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        learn = make_learner(make_dls(n_valid=21, bs=4))
        with learn.distributed('ddp', timeout='20s'):
            assert learn.get_preds(sink=tmp_path / 'folder') == tmp_path / 'folder'
            with pytest.raises(OptionError if rank == 0 else Exception, match='is there already'):
                learn.get_preds(sink=tmp_path / 'folder')
            own: list[Tensor] = []
            learn.get_preds(sink=lambda preds, targs: own.append(targs))
            with pytest.raises(OptionError, match='of one process'):
                learn.get_preds(sink=tmp_path / 'preds.npy')
            gathered = GatherPredsCallback(save_preds=tmp_path / 'each')
            learn.validate(cbs=gathered)
            return sum(map(len, own))

    assert sum(run_ranks(job)) == 21
    alone = make_learner(make_dls(n_valid=21, bs=4))
    preds, _ = alone.get_preds()
    files = [torch.load(p, weights_only=True) for p in sorted((tmp_path / 'folder').iterdir())]
    assert_same(torch.cat([f['preds'] for f in files]), preds)
    assert [len(f['preds']) for f in files] == [4, 4, 4, 4, 2, 3]
    each = [torch.load(tmp_path / 'each' / str(i), weights_only=True) for i in range(6)]
    assert_same(torch.cat(each), alone.get_preds(act=noop)[0])  # the model's outputs
    assert sorted(p.name for p in tmp_path.iterdir()) == ['each', 'folder']
