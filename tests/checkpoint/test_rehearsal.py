"""The first checkpoint names what has changed since the fit's start and no checkpoint holds, and nothing else."""

import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

from learnkit import EMA, Adam, Callback, Checkpoint, DataLoaders, GradientClip, Learner
from learnkit.checkpoint.fingerprint import UNREADABLE, Fingerprints
from learnkit.checkpoint.rehearsal import find_lost, take_inventory
from learnkit.distributed.shards import shard
from learnkit.testing import synth_learner
from tests.faults.run_helpers import quiet

X = torch.randn(12, 1, generator=torch.Generator().manual_seed(0))


class Rows(Dataset[Any]):
    cache: dict[int, Tensor] | None = None

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        if self.cache is not None:
            self.cache[i] = X[i] + random.random()
        return X[i], 2 * X[i]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.config, self.calls, self.drawn = {'depth': 1}, 0, torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Counts(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.drawn += 1
        return self.net(x)


class Saves(Counts):
    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class KeepsMask(Model):
    "Keeps its output, and a mask, which could be a running average as well."

    def forward(self, x: Tensor) -> Tensor:
        self.out = self.net(x)
        self.mask = torch.ones(1)
        return self.out


class Hooked(Model):
    "Keeps what a forward pass adds to a list that is made then, and emptied again or not."

    keeps = False

    def forward(self, x: Tensor) -> Tensor:
        self.activations = [float(x.sum())] if self.keeps else []
        return self.net(x)


class Keeping(Hooked):
    keeps = True


class OwnEMA(Callback):
    def before_fit(self) -> None:
        self.average = copy.deepcopy(self.model)

    def after_batch(self) -> None:
        with torch.no_grad():
            self.average.net.weight.lerp_(self.model.net.weight, 0.1)


class Noise:
    "A collate function with a generator of its own, which is restored, and a count, which is not."

    def __init__(self, counts: bool) -> None:
        self.rng, self.counts, self.n = random.Random(1), counts, [0]

    def __call__(self, rows: Any) -> Any:
        self.n[0] += self.counts
        x, y = torch.utils.data.default_collate(rows)
        return x + self.rng.random(), y


def named(
    folder: Path,
    *cbs: Any,
    model: Callable[[], nn.Module] = Model,
    loss: Any = nn.functional.mse_loss,
    rows: Dataset[Any] | None = None,
    opt_func: Any = Adam,
    every: str = '2ba',
    **options: Any,
) -> list[str]:
    "Return the names in the warnings of a fit with a checkpoint in its first and its second epoch."
    loader: Any = DataLoader(Rows() if rows is None else rows, batch_size=4, **options)
    learn = quiet(
        Learner(DataLoaders(loader, loader), model(), loss, opt_func, cbs=cbs, path=folder)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.fit(2, cbs=Checkpoint(every))
    return [line.split(':')[0].strip() for w in caught for line in str(w.message).splitlines()[1:]]


class OnLearner(Callback):
    n_made = 0

    def after_batch(self) -> None:
        self.learn.n_seen = vars(self.learn).get('n_seen', 0) + 1
        type(self).n_made += 1
        self.learn.mask = torch.zeros(self.learn.iter)  # of this batch alone


class CountingSGD(torch.optim.SGD):
    n = 0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        return super().step(closure)


class OwnOrder(Sampler[int]):
    "Keeps the order of a pass, and counts its passes in a list or as a number."

    def __init__(self, passes: list[int] | None = None) -> None:
        self.passes, self.n_passes, self.rng = passes, 0, random.Random(2)

    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Iterator[int]:
        self.n_passes += 1
        if self.passes is not None:
            self.passes.append(1)
        return iter(self.rng.sample(range(len(X)), len(X)))


class Scheduling(Callback):
    def before_fit(self) -> None:
        self.torch = torch.optim.lr_scheduler.ExponentialLR(self.opt.optimizers[''], 0.9)

    def after_batch(self) -> None:
        self.torch.step()


def counting_function() -> Callback:
    steps = itertools.count()

    class Counting(Callback):
        def __init__(self) -> None:
            self.count = lambda: next(steps)

        def after_batch(self) -> None:
            self.count()

    return Counting()


def cached(changes: bool = False) -> Rows:
    "Return samples with a cache; with `changes`, an entry is there already."
    rows = Rows()
    rows.cache = {0: X[0]} if changes else {}
    return rows


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.ones(12), 12, generator=torch.Generator())


def raise_weight(cb: Callback) -> None:
    cb.dls.train.sampler.weights[0] += 1


def counting_loss() -> Callable[[Tensor, Tensor], Tensor]:
    steps = iter(range(1000))
    return lambda pred, y: ((pred - y) ** 2).mean() * (1 + 1 / (1 + next(steps)))


def test_ordinary_programs_are_told_nothing(tmp_path: Path) -> None:
    assert named(tmp_path, EMA(), GradientClip(1.0), shuffle=True, collate_fn=Noise(False)) == []
    assert named(tmp_path, model=lambda: nn.Sequential(nn.LazyLinear(1), nn.Dropout())) == []
    assert named(tmp_path, sampler=weighted(), loss=nn.SmoothL1Loss()) == []
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        quiet(synth_learner(path=tmp_path, cbs=Checkpoint('2ba'))).fit_one_cycle(2)


def test_what_would_be_lost_is_named_once(tmp_path: Path) -> None:
    assert named(tmp_path, model=Counts) == ['model.calls', 'model.drawn']
    assert named(tmp_path, model=Saves) == []
    assert named(tmp_path, OwnEMA()) == ['OwnEMA.average']
    assert named(tmp_path, rows=cached()) == []  # entries were added
    assert named(tmp_path, rows=cached(changes=True)) == ['training loader.dataset.cache']
    assert named(tmp_path, collate_fn=Noise(True)) == ['training loader.collate_fn.n']
    raises = Callback(before_batch=raise_weight, run_valid=False)
    assert named(tmp_path, raises, sampler=weighted()) == ['sampler.weights']
    assert named(tmp_path, loss=counting_loss()) == ['loss_func']
    assert named(tmp_path, OnLearner()) == ['learn.n_seen', 'OnLearner.n_made']
    assert named(tmp_path, opt_func=CountingSGD) == ['CountingSGD.n']
    assert named(tmp_path, Scheduling(), opt_func=torch.optim.SGD) == ['Scheduling.torch']
    assert named(tmp_path, counting_function()) == ['Counting.count']


def test_a_sampler_that_keeps_more_than_numbers_is_named_and_not_drawn_again(
    tmp_path: Path,
) -> None:
    assert named(tmp_path, sampler=OwnOrder()) == named(tmp_path, sampler=[1, 0, 2]) == []
    passes: list[int] = []
    assert named(tmp_path, sampler=OwnOrder(passes)) == ['sampler.passes']
    assert len(passes) == 4  # two epochs, of training and validation
    assert named(tmp_path, model=lambda: nn.utils.spectral_norm(nn.Linear(1, 1))) == []


def test_check_resume_crosses_two_ends_of_an_epoch_and_names_the_same() -> None:
    learn = quiet(synth_learner(n_train=3, cbs=OnLearner()))
    found = learn.check_resume()
    assert found.n_batches == 8 and not found.differences and not found
    assert [line.split(':')[0] for line in found.lost] == ['learn.n_seen', 'OnLearner.n_made']
    assert quiet(synth_learner(n_train=3)).check_resume()


def test_the_option_leaves_it_out(tmp_path: Path) -> None:
    learn = quiet(synth_learner(model=Counts(), path=tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit(1, cbs=Checkpoint('2ba', rehearse=False))
    assert learn.model.calls > 0


def test_fingerprints_see_changes_in_place() -> None:
    values = [[1, 2], {'a': torch.zeros(2)}, {3}, Noise(True), nn.Linear(1, 1), iter([1, 2])]
    for value in values:
        assert Fingerprints().mark(value) == Fingerprints().mark(value)
    before = [Fingerprints().mark(value) for value in values]
    values[0].append(3)  # type: ignore[attr-defined]
    values[1]['a'] += 1  # type: ignore[index]
    values[2].add(4)  # type: ignore[attr-defined]
    values[3].n[0] = 9  # type: ignore[attr-defined]
    values[4].weight.data += 1  # type: ignore[attr-defined]
    next(values[5])  # type: ignore[call-overload]
    changed = [Fingerprints().mark(value) != old for value, old in zip(values, before, strict=True)]
    # `.data` has a version of its own, and an iterator cannot be read
    assert changed == [True] * 4 + [False, False] and before[-1] == UNREADABLE


def test_a_tensor_that_each_forward_pass_sets_is_named_as_perhaps_harmless() -> None:
    learn = quiet(synth_learner(model=KeepsMask()))
    (line,) = learn.check_resume(n_batches=2).lost
    assert line.startswith('model.mask: harmless if each forward pass computes it again')


def test_a_run_resumed_after_the_last_batch_of_an_epoch_notes_the_next_epoch(
    tmp_path: Path,
) -> None:
    "The loss function that `before_epoch` sets from the second epoch on is the same as in the run."

    def swap(cb: Callback) -> None:
        if cb.epoch:
            cb.learn.loss_func = nn.functional.l1_loss

    def make() -> Learner:
        loader = DataLoader(Rows(), batch_size=4)
        cbs = [Checkpoint('1ba', keep_last=None), Callback(before_epoch=swap)]
        dls = DataLoaders(loader, loader)
        return quiet(Learner(dls, Model(), nn.functional.mse_loss, cbs=cbs, path=tmp_path))

    make().fit(2)
    (last,) = tmp_path.glob('checkpoints/*-ep0-ba3.ckpt')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        make().fit(2, resume=last)


def test_an_output_that_evaluation_has_computed_without_a_graph_is_not_named(
    tmp_path: Path,
) -> None:
    class KeepsOutput(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.out = self.net(x)
            return self.out

    assert named(tmp_path, model=KeepsOutput, every='1ep') == []


def test_a_sampler_within_a_shard_is_listed_once() -> None:
    "The index sampler of a shard's loader contains the user's sampler, whose passes are counted."
    passes: list[int] = []
    learn = quiet(synth_learner())
    for sampler in (OwnOrder(), OwnOrder(passes)):
        learn.dls.train = shard(DataLoader(Rows(), 2, sampler=sampler), 0, 2)
        before = take_inventory(learn)
        list(learn.dls.train)
        lines = find_lost(before, take_inventory(learn))
        names = [line.split(':')[0] for line in lines]
        assert names == (['sampler.passes'] if sampler.passes else [])


def test_long_containers_are_compared_by_identity_and_length() -> None:
    "An index of a million samples does not slow down a fit's start: its entries are not read."
    rows: list[Any] = [iter([])] * 100_001  # iterators cannot be read
    nested = {'train': {'rows': rows}}
    for container in (rows, nested, tuple(rows), dict.fromkeys(range(100_001), rows[0])):
        mark = Fingerprints().mark(container)
        assert Fingerprints().mark(container) == mark != UNREADABLE
    before = [Fingerprints().mark(rows), Fingerprints().mark(nested)]
    rows.append(rows[0])
    after = [Fingerprints().mark(rows), Fingerprints().mark(nested)]
    assert before[0] != after[0] and before[1] != after[1]


def test_a_new_list_without_entries_is_not_named(tmp_path: Path) -> None:
    assert named(tmp_path / 'a', model=Hooked) == []
    assert named(tmp_path / 'b', model=Keeping) == ['model.activations']


def test_repr_of_an_attribute_of_the_loader_is_not_called() -> None:
    class Rows:
        "Rows of which `repr` reads one, as of a data set of Ray."

        def __init__(self) -> None:
            self.rows = [(torch.ones(2, 1), torch.ones(2, 1))] * 3

        def __repr__(self) -> str:
            return f'{self.rows.pop()}'

    rows = Rows()
    Fingerprints().mark(rows)
    assert len(rows.rows) == 3
