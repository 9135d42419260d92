"""The event, the callback and the quantity of one difference that was planted in one of two runs."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from learnkit import Callback, Checkpoint, DataLoaders, FixedStopper, GradientClip, Learner
from learnkit.core.errors import CancelBatchException, CheckpointError, OptionError
from learnkit.debug.difference import Difference, _sum_rows, first_difference
from learnkit.optim import Adam
from tests.faults.fault_helpers import others_in_full
from tests.helpers.learners import quiet_learner

N, BS, EPOCHS = 48, 8, 3


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    "Rows with a transform."

    def __init__(self, scale: float) -> None:
        self.x = torch.randn(N, 4)
        self.scale = scale

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = self.x[i]
        return x * self.scale, x.sum(0, keepdim=True)


def make(
    path: Path, *cbs: Any, seed: int = 0, order: int = 0, scale: float = 1.0, eps: float = 1e-5
) -> Learner:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(order)
    dl = DataLoader(Noisy(scale), BS, shuffle=True, generator=generator)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    return quiet_learner(
        DataLoaders(dl),
        model,
        nn.MSELoss(),
        opt_func=lambda params, lr: Adam(params, lr=lr, eps=eps),
        lr=0.01,
        path=path,
        cbs=[Checkpoint('5ba', keep_last=None), *cbs],
    )


class Plant(Callback):
    "Call a function at one batch."

    order = 5

    def __init__(self, event: str, ba: int, f: Callable[[Any], Any]) -> None:
        self._ba, self._f = ba, f
        setattr(self, event, self._run)

    def _run(self) -> None:
        # in `after_batch` the batch is counted already
        if self.learn.train_iter - ('after_batch' in vars(self)) == self._ba:
            self._f(self.learn)


@torch.no_grad()
def change_weight(learn: Learner) -> None:
    next(learn.model.parameters()).mul_(1.01)


def change_x(learn: Learner) -> None:
    learn.xb = (learn.xb[0] * 1.01,)


KINDS = 'order transform generator weight rate xb clip eps'.split()
Expected = tuple[int, str, str, str]


def plant(kind: str, ba: int) -> tuple[dict[str, Any], Callable[[], list[Any]], Expected]:
    "Return options and callbacks of a run with a planted difference, and what has to be found."
    none: Callable[[], list[Any]] = list
    if kind == 'order':
        return {'order': ba}, none, (0, 'after_draw', '', 'order of samples')
    if kind == 'transform':
        return {'scale': 1 + ba / 100}, none, (0, 'after_draw', '', 'batch')
    if kind == 'eps':
        return {'eps': ba * 1e-4}, none, (0, 'before_epoch', '', 'hyper eps')  # the first event
    if kind == 'clip':
        expected = (0, 'before_step', 'GradientClip', 'gradient of')
        return {}, lambda: [GradientClip(0.01 * ba)], expected
    events: dict[str, tuple[str, Callable[[Any], Any], str]] = {
        'generator': ('after_batch', lambda learn: torch.rand(1), 'random numbers'),
        'weight': ('after_step', change_weight, 'weight 0.weight'),
        'rate': ('before_batch', lambda learn: learn.opt.set_hypers(lr=0.02), 'hyper lr'),
        'xb': ('before_batch', change_x, 'xb'),
    }
    event, f, what = events[kind]
    return {}, lambda: [Plant(event, ba, f)], (ba, event, 'Plant', what)


def compare(kind: str, ba: int, seed: int, path: Path) -> tuple[Difference | None, Expected]:
    options, cbs, expected = plant(kind, ba)
    sides: list[tuple[Path, dict[str, Any], Callable[[], list[Any]]]] = [
        (path / 'a', {}, list),
        (path / 'b', options, cbs),
    ]
    for folder, own, more in sides:
        learn = make(folder, *more(), seed=seed, **own)
        with learn.no_bar():
            learn.fit(EPOCHS)
    a, b = (make(folder, *more(), seed=seed, **own) for folder, own, more in sides)
    return first_difference(a, b), expected


def is_found(found: Difference | None, expected: Expected) -> bool:
    if found is None:
        return False
    ba, event, callback, what = expected
    where = (found.batch, found.event, found.callback) == (ba, event, callback)
    return where and found.what.startswith(what)


@pytest.mark.parametrize('kind', KINDS)
def test_a_planted_difference_is_named(kind: str, tmp_path: Path) -> None:
    found, expected = compare(kind, 8, 0, tmp_path)
    assert is_found(found, expected), f'{found!r}, expected {expected}'


@pytest.mark.parametrize('atol', [0.0, 1e-6])
def test_the_rows_that_differ_are_named(atol: float, tmp_path: Path) -> None:
    def change_rows(learn: Learner) -> None:
        learn.xb = (learn.xb[0].clone(),)
        learn.xb[0][[2, 5]] += 1
        drawn.append(learn.parts.positions.indices(learn))

    drawn: list[Any] = []
    plants: dict[str, list[Any]] = {'a': [], 'b': [Plant('before_batch', 8, change_rows)]}
    for name, cbs in plants.items():
        with make(tmp_path / name, *cbs).no_bar() as learn:
            learn.fit(EPOCHS)
    indices = [drawn[0][i] for i in (2, 5)]
    learners = [make(tmp_path / name, *cbs) for name, cbs in plants.items()]
    found = first_difference(*learners, atol=atol)
    assert found is not None and (found.batch, found.what) == (8, 'xb')
    assert (found.rows, found.indices) == ([2, 5], indices)
    assert f'in row 2, 5 of the batch (index {indices[0]}, {indices[1]})' in str(found)


def test_a_wrong_row_of_the_data_is_named(tmp_path: Path) -> None:
    def make_with(name: str, wrong: bool) -> Learner:
        learn = make(tmp_path / name)
        learn.dls.train.dataset.x[33] *= 2 if wrong else 1
        return learn

    for name in 'ab':
        with make_with(name, name == 'b').no_bar() as learn:
            learn.fit(1)
    found = first_difference(make_with('a', False), make_with('b', True))
    assert found is not None and (found.event, found.what) == ('after_draw', 'batch')
    assert len(found.rows) == 1 and found.indices == [33]


def test_only_a_few_of_many_rows_are_named() -> None:
    text = str(Difference(7, 'before_batch', 'Noise', 'xb', ['xb'], rows=[*range(20)]))
    assert text.endswith('in row 0, 1, 2, 3, 4, 5, 6, 7 and 12 more of the batch')


def test_sums_of_rows_differ_for_rows_that_differ() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool):
        t = torch.tensor([[0, 1], [1, 0], [0, 1], [0, 0]]).to(dtype)
        a, b, c, d = _sum_rows(t)
        assert a == c and len({a, b, d}) == 3
    assert _sum_rows(torch.tensor(1.0)) == _sum_rows(torch.zeros(3, 0)) == []


@pytest.mark.parametrize('wrong', [[{'epoch': 0}], 3, None])
def test_what_is_no_learner_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match='two Learners'):
        first_difference(wrong, make(tmp_path))
    with pytest.raises(OptionError, match=r'make\(.* returned'):
        first_difference(tmp_path / 'a', tmp_path / 'b', make=lambda folder: wrong)


@pytest.mark.full
def test_forty_pairs(tmp_path: Path) -> None:
    wrong = []
    for kind in KINDS:
        for seed in range(5):
            result = compare(kind, 2 + 3 * seed, seed, tmp_path / f'{kind}{seed}')
            if not is_found(*result):
                wrong.append((kind, seed, *result))
    print(f'first_difference: {40 - len(wrong)} of 40 named')
    assert len(wrong) <= 2, wrong


def test_equal_runs_folders_and_a_tolerance(tmp_path: Path) -> None:
    for name, scale in (('a', 1.0), ('b', 1.0), ('c', 1 + 1e-6)):
        with make(tmp_path / name, scale=scale).no_bar() as learn:
            learn.fit(1)
    a, b, c = (tmp_path / name for name in 'abc')
    assert first_difference(a, b, make=make) is None
    scaled = make(c, scale=1 + 1e-6)
    found = first_difference(make(a), scaled)
    assert found is not None and found.what == 'batch'
    assert first_difference(make(a), make(c, scale=1 + 1e-6), atol=1e-2) is None
    with pytest.raises(OptionError, match='is a folder'):
        first_difference(a, b)
    with pytest.raises(OptionError, match='same Learner'):
        first_difference(scaled, scaled)
    with make(tmp_path / 'd').no_bar() as silent, silent.removed_cbs(silent.recorder):
        silent.fit(1)
    with pytest.raises(CheckpointError, match='recorded loss'):
        first_difference(make(a), make(tmp_path / 'd'))


def test_the_first_larger_difference(tmp_path: Path) -> None:
    def shift(learn: Learner) -> None:
        learn.xb = (learn.xb[0] + 1,)

    for name, cbs in (('a', []), ('b', [Plant('before_batch', 4, shift)])):
        with make(tmp_path / name, *cbs, scale=1 + 1e-7 * bool(cbs)).no_bar() as learn:
            learn.fit(1)
    b = make(tmp_path / 'b', Plant('before_batch', 4, shift), scale=1 + 1e-7)
    found = first_difference(make(tmp_path / 'a'), b, atol=1e-3)
    assert found is not None
    assert (found.batch, found.callback, found.what) == (4, 'Plant', 'xb')


# -- differences that no recorded loss shows -------------------------------------------------------


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    "Validation rows, of which one may be shifted."

    def __init__(self, shift: float) -> None:
        self.x = torch.linspace(-1, 1, 64).reshape(16, 4)
        self.x[5] += shift

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.x[i].sum(0, keepdim=True)


def make_normed(
    path: Path,
    *cbs: Any,
    shift: float = 0.0,
    metrics: Any = None,
    every: str = '5ba',
    **options: Any,
) -> Learner:
    torch.manual_seed(0)
    x = torch.randn(N, 4)
    dl = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BS, shuffle=True)
    layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return quiet_learner(
        DataLoaders(dl, DataLoader(Shifted(shift), BS)),
        nn.Sequential(*layers),
        nn.MSELoss(),
        opt_func=Adam,
        lr=0.01,
        path=path,
        metrics=metrics,
        cbs=[Checkpoint(every, keep_last=None), *cbs],
        **options,
    )


@torch.no_grad()
def change_bias(learn: Learner) -> None:
    learn.model[3].bias.add_(0.01)


def change_variance(learn: Learner) -> None:
    learn.model[1].running_var.mul_(1.5)


def change_state(learn: Learner) -> None:
    learn.opt.state[next(learn.model.parameters())]['exp_avg_sq'].mul_(2)


class ChangeValidation(Callback):
    "Scale the inputs of the second evaluation."

    order = 5

    def before_batch(self) -> None:
        if not self.training and self.learn.epoch == 1:
            self.learn.xb = (self.learn.xb[0] * 1.01,)


def skip_batch(learn: Learner) -> None:
    raise CancelBatchException


LAST = 3 * N // BS - 1
SILENT: dict[str, tuple[dict[str, Any], Callable[[], list[Any]], Expected, str]] = {
    # options, callbacks, what has to be found, and in which record it is seen
    'buffer': (
        {},
        lambda: [Plant('after_step', 8, change_variance)],
        (8, 'after_step', 'Plant', 'buffer 1.running_var'),
        'valid_loss after batch 12',
    ),
    'buffer without evaluation': (
        {'eval_every': None},
        lambda: [Plant('after_step', 8, change_variance)],
        (8, 'after_step', 'Plant', 'buffer 1.running_var'),
        'checkpoints after batch 10',
    ),
    'final weights': (
        {},
        lambda: [Plant('after_batch', LAST, change_bias)],
        (LAST, 'after_batch', 'Plant', 'weight 3.bias'),
        'valid_loss after batch 18',
    ),
    'final weights without evaluation': (
        {'eval_every': None},
        lambda: [Plant('after_batch', LAST, change_bias)],
        (LAST, 'after_batch', 'Plant', 'weight 3.bias'),
        'checkpoints after batch 18',
    ),
    'final optimizer': (
        {},
        lambda: [Plant('after_batch', LAST, change_state)],
        (LAST, 'after_batch', 'Plant', 'optimizer state of 0.weight'),
        'checkpoints after batch 18',
    ),
    'final generator': (
        {},
        lambda: [Plant('after_batch', LAST, lambda learn: torch.rand(1))],
        (LAST, 'after_batch', 'Plant', 'random numbers'),
        'checkpoints after batch 18',
    ),
    'validation in a callback': (
        {},
        lambda: [ChangeValidation()],
        (12, 'before_batch', 'ChangeValidation', 'xb'),
        'valid_loss after batch 12',
    ),
    'validation data': (
        {'shift': 0.01},
        list,
        (6, 'after_draw', '', 'batch'),
        'valid_loss after batch 6',
    ),
    'metric': (
        {'metrics': lambda pred, y: 2 * pred.mean()},
        list,
        (6, 'after_eval', '', '<lambda>'),
        '<lambda> after batch 6',
    ),
}


@pytest.mark.parametrize(
    ('name', 'every'),
    others_in_full(
        itertools.product(SILENT, ['5ba', '1ep']),
        # what the checkpoints show is shown by those within an epoch
        lambda name, every: every == ('5ba' if 'checkpoints' in SILENT[name][-1] else '1ep'),
    ),
)
def test_a_difference_without_another_loss(name: str, every: str, tmp_path: Path) -> None:
    options, cbs, expected, seen = SILENT[name]
    shared = {'every': every}
    if 'eval_every' in options:
        shared |= options
    if name == 'metric':
        shared['metrics'] = lambda pred, y: pred.mean()
    sides: list[tuple[Path, dict[str, Any], Callable[[], list[Any]]]] = [
        (tmp_path / 'a', shared, list),
        (tmp_path / 'b', shared | options, cbs),
    ]
    for folder, own, more in sides:
        with make_normed(folder, *more(), **own).no_bar() as learn:
            learn.fit(3)
    a, b = (make_normed(folder, *more(), **own) for folder, own, more in sides)
    found = first_difference(a, b)
    assert is_found(found, expected), f'{found!r}, expected {expected}'
    assert found is not None and found.first_loss is None
    if 'checkpoints' not in seen or every == '5ba':
        assert seen in str(found)


def test_a_skipped_batch(tmp_path: Path) -> None:
    sides: list[tuple[str, list[Any]]] = [
        ('a', []),
        ('b', [Plant('before_batch', 4, skip_batch)]),
        ('c', [Plant('before_batch', 4, skip_batch), Plant('after_step', 9, change_bias)]),
    ]
    for name, cbs in sides:
        with make_normed(tmp_path / name, *cbs).no_bar() as learn:
            learn.fit(3)

    def make_side(i: int) -> Learner:
        return make_normed(tmp_path / sides[i][0], *sides[i][1])

    one = first_difference(make_side(0), make_side(1))
    assert is_found(one, (4, 'before_batch', 'Plant', 'event (')), one
    assert one is not None and one.first_loss == 4 and one.losses[1] is None
    both = first_difference(make_side(1), make_side(2))
    assert is_found(both, (9, 'after_step', 'Plant', 'weight 3.bias')), both


def test_one_fit_is_compared_with_each_record(tmp_path: Path) -> None:
    def cycle(n: int, lr: float) -> Callable[..., Any]:
        return lambda learn, **options: learn.fit_one_cycle(n, lr, **options)

    for name, n, lr in (('a', 3, 0.01), ('b', 4, 0.01), ('c', 3, 0.02)):
        with make_normed(tmp_path / name).no_bar() as learn:
            cycle(n, lr)(learn)
    a, b, c = (tmp_path / name for name in 'abc')
    found = first_difference(a, b, make=make_normed, fit=cycle(3, 0.01))
    assert found is not None and found.what == 'number of epochs (3 and 4)'
    with pytest.raises(CheckpointError, match='had the loss') as error:
        first_difference(a, c, make=make_normed, fit=cycle(3, 0.01))
    assert f'{c / "checkpoints"} was repeated' in error.value.__notes__[-1]
    assert first_difference(a, a, make=make_normed, fit=cycle(3, 0.01)) is None


def test_an_evaluation_of_an_earlier_fit(tmp_path: Path) -> None:
    for name, shift in (('a', 0.0), ('b', 0.01)):
        learn = make_normed(tmp_path / name)
        with learn.no_bar():
            learn.dls.valid.dataset.x[5] += shift
            learn.fit(1)
            learn.dls.valid.dataset.x[5] -= shift
            learn.fit(2)
    found = first_difference(tmp_path / 'a', tmp_path / 'b', make=make_normed)
    assert found is not None and (found.event, found.what) == ('after_eval', 'valid_loss')
    assert 'valid_loss after batch 6' in found.seen


def test_another_number_of_epochs(tmp_path: Path) -> None:
    for name, n in (('a', 3), ('b', 4)):
        with make_normed(tmp_path / name).no_bar() as learn:
            learn.fit(n)
    found = first_difference(tmp_path / 'a', tmp_path / 'b', make=make_normed)
    assert found is not None and found.what == 'number of epochs (3 and 4)'


def test_a_run_that_was_stopped_and_one_that_was_killed(tmp_path: Path) -> None:
    def die(cb: Callback) -> None:
        if cb.learn.time.ba == 13:
            raise KeyboardInterrupt

    stopper = FixedStopper('12ba')
    for name, cbs in {'whole': [], 'stopped': [stopper], 'killed': []}.items():
        with make(tmp_path / name, *cbs).no_bar() as learn:
            if name == 'killed':
                with pytest.raises(KeyboardInterrupt):
                    learn.fit(EPOCHS, cbs=Callback(before_batch=die))
            else:
                learn.fit(EPOCHS)
    whole, stopped, killed = (make(tmp_path / name) for name in ('whole', 'stopped', 'killed'))
    for pair in ((whole, stopped), (stopped, whole)):
        found = first_difference(*pair)
        assert found is not None and found.batch == 12 and 'end of the run' in found.what
    assert first_difference(whole, killed) is None
