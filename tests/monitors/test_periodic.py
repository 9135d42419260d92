"""Passes over other data at an interval, tracking between them, and observers that change no number."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import Callback, DataLoaders, Learner
from learnkit.core.errors import EmptyLoaderError, LoaderError, TimeError
from learnkit.monitors.periodic import PeriodicData
from tests.helpers.learners import quiet_learner


def data(workers: int = 0) -> DataLoaders:
    x, y = torch.randn(44, 1, 4, 4), torch.randint(3, (44,))
    if not workers:
        valid = {'valid': (x[24:34], y[24:34]), 'test': (x[34:], y[34:])}
        return DataLoaders.from_tensors((x[:24], y[:24]), valid, bs=4, seed=0)
    options: Any = {'batch_size': 4, 'num_workers': workers, 'persistent_workers': True}
    sets = [TensorDataset(x[a:b], y[a:b]) for a, b in ((0, 24), (24, 34), (34, 44))]
    return DataLoaders(
        DataLoader(sets[0], shuffle=True, **options),
        {'valid': DataLoader(sets[1], **options), 'test': DataLoader(sets[2], **options)},
    )


def learner(*cbs: Any, workers: int = 0, path: Any = '.', **kwargs: Any) -> Learner:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(48, 3),
    )
    dls = data(workers)
    return quiet_learner(
        dls, model, nn.CrossEntropyLoss(), lr=0.05, path=path, cbs=[*cbs], **kwargs
    )


def test_results_match_get_preds_with_an_uneven_last_batch() -> None:
    learn = learner(PeriodicData('1ep', 'test'))  # 10 samples, by 4
    learn.fit(2)
    preds, targs = learn.get_preds(dl='test', act=noop)
    results = learn.periodic_data.results
    assert torch.equal(results['preds'], preds)
    assert torch.equal(results['targs'], targs)
    assert len(preds) == 10


class Errors(PeriodicData):
    "Computes nested results of several kinds."

    calls: list[tuple[int, Any]] = []

    def on_batch(self, batch: Any) -> Any:
        assert not torch.is_grad_enabled() and not self.model.training and not self.training
        assert batch[0] is self.xb[0] and self.phase == 'valid'
        losses = nn.functional.cross_entropy(self.model(self.x), self.y, reduction='none')
        return {
            'losses': losses,
            'mean': losses.mean(),
            'of': (self.y, [self.x.flatten(1)]),
            'names': ['a'] * len(losses),
        }

    def process_results(self, results: Any) -> float:
        loss = results['losses'].mean().item()
        self.learn.log('own', loss)
        self.calls.append((self.learn.time.ba, results))
        return loss


def test_nested_results_at_every_interval_and_what_they_are_logged_as() -> None:
    for dl, column in ((None, 'valid_own'), ('test', 'test/own'), (data()['test'], 'errors/own')):
        learn = learner(cb := Errors('4ba', dl))
        cb.calls = []
        learn.fit(2)
        assert [ba for ba, _ in cb.calls] == [4, 8, 12]
        results = cb.calls[-1][1]
        assert [
            results['losses'].shape,
            results['mean'].shape,
            results['of'][1][0].shape,
            len(results['names']),
        ] == [(10,), (3,), (10, 16), 10]
        assert results['losses'][:4].mean() == pytest.approx(results['mean'][0].item(), rel=1e-6)
        rows = [row[column] for row in learn.history]
        each = [r['losses'].mean().item() for _, r in cb.calls]
        assert rows == pytest.approx([each[0], (each[1] + each[2]) / 2])
        assert cb.results == each[-1]


def test_as_functions_and_in_other_units() -> None:
    seen: list[int] = []

    def count(learn: Any, xb: Any, yb: Any) -> Any:
        return {'n': torch.tensor(len(xb[0]))}

    process_results = lambda learn, r: seen.append(int(r['n'].sum()))
    cb = PeriodicData('8sp', 'valid', on_batch=count, process_results=process_results)
    learn = learner(cb)
    learn.fit(1)
    assert seen == [10, 10, 10]
    learn = learner(
        PeriodicData('2st', on_batch=lambda learn, xb, yb: None, process_results=lambda learn, r: r)
    )
    learn.fit(1)
    assert learn.periodic_data.results is None


@pytest.mark.parametrize(
    ('workers', 'dl'),
    [(0, 'train'), (0, 'test'), (1, 'train'), pytest.param(1, 'test', marks=pytest.mark.full)],
)
def test_nothing_of_the_training_is_disturbed(workers: int, dl: str) -> None:
    def weights(*cbs: Callback) -> list[Tensor]:
        learn = learner(*cbs, workers=workers)
        learn.fit(2)
        for loader in learn.dls:
            loader._iterator = None  # workers that the garbage collector has to end take 5 s
        return [*learn.model.state_dict().values()]

    class Draws(PeriodicData):
        def on_batch(self, batch: Any) -> Any:
            return torch.rand(1) + random.random() + np.random.rand()

    assert all(map(torch.equal, weights(), weights(Draws('1ba', dl), PeriodicData('2ba', dl))))


@pytest.mark.parametrize(
    ('make', 'error'),
    [
        (lambda: PeriodicData('0ba'), TimeError),
        (lambda: PeriodicData('5 parsecs'), TimeError),
        (lambda: PeriodicData(dl=3), LoaderError),
        (lambda: PeriodicData(dl=[]), EmptyLoaderError),
    ],
)
def test_bad_options_are_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_an_unknown_loader_is_reported_before_training() -> None:
    learn = learner(PeriodicData(dl='tset'))
    with pytest.raises(LoaderError):
        learn.fit(1)
    assert learn.time.ba == 0
