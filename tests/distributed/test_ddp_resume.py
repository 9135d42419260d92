"""Checkpoints of several processes: one file, from which any number of processes resumes."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from learnkit import SGD, Callback, GradientAccumulation, Learner
from learnkit.callbacks import EMA, Checkpoint
from learnkit.checkpoint.compare import learn_digest
from tests.helpers.distributing import expect_interrupt, make_dls, make_learner, rows, weights
from tests.helpers.learners import quiet_learner
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


class Break(Callback):
    "Interrupt the run after `n` training batches in every process."

    order = 2000

    def __init__(self, n: int) -> None:
        self.n = n

    def batch_checkpoint(self) -> None:
        if self.learn.time.ba == self.n:
            raise KeyboardInterrupt

    def state_dict(self) -> None:
        return None  # the next process is interrupted later


def make(
    path: Path, kind: str = 'tensors', bs: int = 4, cbs: Any = (), n: int = 101, **options: Any
) -> Learner:
    dls = make_dls(
        n, bs, kind.partition('-')[0], **({'num_workers': 1} if kind == 'torch-workers' else {})
    )
    return make_learner(
        dls, path, dropout=0.2, cbs=[Checkpoint(every='1ba', keep_last=None), *cbs], **options
    )


def train(
    path: Path,
    n_ranks: int = 2,
    broken_off: int | None = None,
    resume: Any = False,
    cbs: Any = (),
    **options: Any,
) -> list[dict[str, Any]]:
    "Train three epochs in `n_ranks` processes; return each digest, weights and history."

    def job(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank + 5 if resume else 1)
        warnings.filterwarnings('ignore', message='The callbacks differ from those')
        more = [Break(broken_off)] if broken_off else []
        learn = make(path, cbs=[make_cb() for make_cb in cbs], **options)
        learn.model.noise = torch.Generator().manual_seed(rank)
        with (
            expect_interrupt() if broken_off else nullcontext(),
            learn.distributed('ddp', timeout='20s'),
            learn.added_cbs(more),
        ):
            learn.fit_one_cycle(3, 1e-2, resume=resume)
        return {
            'digest': learn_digest(learn),
            'weights': weights(learn),
            'rows': rows(learn),
            'drawn': torch.rand(3),
        }

    return run_ranks(job, n_ranks)


def add_noise(cb: Callback) -> None:
    "Draw from the generator of the model, which differs by rank."
    noise = torch.rand(cb.x.shape, generator=cb.model.noise)
    cb.learn.xb = (cb.x + noise,)


CASES: dict[str, dict[str, Any]] = {
    'workers': {'kind': 'torch-workers'},
    'four, accumulation': {'n_ranks': 4, 'cbs': (lambda: GradientAccumulation(50),)},
    'noise': {'cbs': (lambda: Callback(before_batch=add_noise),)},
    'ema': {'cbs': (lambda: GradientAccumulation(24), lambda: EMA(0.9))},
}


@pytest.mark.parametrize('case', CASES)
def test_an_interrupted_run_resumes_exactly(case: str, tmp_path: Path) -> None:
    expected = train(tmp_path / 'whole', **CASES[case])
    for n in (2, 17):
        train(tmp_path / f'{n}', broken_off=n, **CASES[case])
        again = train(tmp_path / f'{n}', resume=True, **CASES[case])
        for got, wanted in zip(again, expected, strict=True):
            assert torch.equal(got['weights'], wanted['weights'])
            assert got['rows'] == wanted['rows'] and torch.equal(got['drawn'], wanted['drawn'])
            assert got['digest'] == wanted['digest']


class Moves(nn.Module):
    "A model whose forward pass replaces a buffer that it uses, counts in extra state, and has a hook that counts."

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8).double(), nn.Linear(8, 3).double()
        self.register_buffer('mean', torch.zeros(8).double())
        self.n = self.hooked = 0
        self.first.register_forward_hook(self.count)

    def count(self, *given: Any) -> None:
        self.hooked += 1

    def get_extra_state(self) -> Any:
        return {'n': self.n, 'hooked': self.hooked}

    def set_extra_state(self, state: Any) -> None:
        self.n, self.hooked = state['n'], state['hooked']

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x).tanh()
        if self.training:
            self.n += 1
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return self.last(out + self.mean)


class Follows(Moves):
    "A model that changes its buffer in place: it differs by rank until the wrapper shares it again."

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x).tanh()
        if self.training:
            self.n += 1
            self.mean.lerp_(out.detach().mean(0), 0.1)
        return self.last(out + self.mean.clone())


class Plain(Moves):
    "A model without state that differs by rank."

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


def count_passes(
    path: Path,
    n_ranks: int,
    kills: Any = (),
    kind: type[Moves] = Moves,
    n_acc: int = 1,
    every: str | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    "Train an epoch of 8 batches, interrupted after some of them; return counts and weights of each rank."

    def job(rank: int, broken_off: int | None) -> dict[str, Any]:
        torch.manual_seed(1)
        counts: list[Any] = []

        def note(cb: Any) -> None:
            model = cb.learn.model
            counts.append((cb.learn.time.ba, model.n, model.hooked))

        cbs = [
            Checkpoint(every=every or f'{n_acc}ba', rehearse=False),
            Callback(batch_checkpoint=note),
        ]
        dls = make_dls(8 * 4 * n_ranks, 4, n_valid=4)
        cbs += [GradientAccumulation(batches=n_acc)] if n_acc > 1 else []
        learn = quiet_learner(dls, kind(), F.cross_entropy, SGD, lr=0.1, path=path, cbs=cbs)
        learn.model.double()
        with (
            expect_interrupt() if broken_off else nullcontext(),
            learn.distributed('ddp', timeout='20s', **options),
            learn.added_cbs([Break(broken_off)] if broken_off else []),
        ):
            learn.fit(1, resume=True)
        return {'counts': counts, 'weights': weights(learn), 'mean': learn.model.mean}

    found = [run_ranks(job, n_ranks, broken_off) for broken_off in (*kills, None)]
    return found[-1]


@pytest.mark.parametrize('options', [{}, {'static_graph': True}, {'find_unused_parameters': True}])
@pytest.mark.parametrize('n_ranks', [1, 3, 4])
def test_a_start_and_a_resume_run_no_forward_pass_that_counts(
    n_ranks: int, options: Any, tmp_path: Path
) -> None:
    whole = count_passes(tmp_path / 'whole', n_ranks, **options)
    killed = count_passes(tmp_path / 'killed', n_ranks, (2, 5), **options)
    for rank in range(n_ranks):
        assert whole[rank]['counts'] == [(i, i, i) for i in range(1, 9)]
        assert killed[rank]['counts'] == whole[rank]['counts'][5:]
        assert torch.equal(whole[rank]['weights'], killed[rank]['weights'])
        assert torch.equal(whole[rank]['mean'], killed[rank]['mean'])


@pytest.mark.parametrize('n_ranks', [2, 3])
def test_buffers_are_shared_when_gradients_have_been_averaged(n_ranks: int, tmp_path: Path) -> None:
    accumulating: dict[str, Any] = {'kind': Follows, 'n_acc': 2}
    whole = count_passes(tmp_path / 'whole', n_ranks, **accumulating)
    killed = count_passes(tmp_path / 'killed', n_ranks, (4, 6), **accumulating)
    for wanted, got in zip(whole, killed, strict=True):
        assert torch.equal(wanted['weights'], got['weights'])
        assert torch.equal(wanted['mean'], got['mean'])


def test_a_resumed_step_divides_accumulated_gradients_as_the_run_did(tmp_path: Path) -> None:
    "A third is not exact: x * (1 / 3) and x / 3 differ in the last bit."
    accumulating: dict[str, Any] = {'kind': Plain, 'n_acc': 2, 'every': '1ba'}
    whole = count_passes(tmp_path / 'whole', 3, **accumulating)
    for n in (4, 5):
        killed = count_passes(tmp_path / f'{n}', 3, (n,), **accumulating)
        for wanted, got in zip(whole, killed, strict=True):
            assert torch.equal(wanted['weights'], got['weights'])


class SeenMean(nn.Module):
    "Keep the mean of the inputs in the extra state, of the rank's own samples or of zeros."

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self.is_shared = is_shared
        self.mean = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.0 if self.is_shared else float(x.mean())
        return x

    def get_extra_state(self) -> Any:
        return {'mean': self.mean}

    def set_extra_state(self, state: Any) -> None:
        self.mean = state['mean']


@pytest.mark.parametrize('is_shared', [True, False])
def test_extra_state_that_differs_by_rank_is_named(is_shared: bool, tmp_path: Path) -> None:
    def job(rank: int) -> list[str]:
        learn = make(tmp_path / 'run', cbs=[])
        learn.model = nn.Sequential(SeenMean(is_shared), learn.model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            with learn.distributed('ddp', timeout=60):
                learn.fit(1)
        return [str(w.message) for w in caught if 'differs by rank' in str(w.message)]

    named = run_ranks(job, 2)
    assert [len(texts) for texts in named] == ([0, 0] if is_shared else [1, 1])
    assert is_shared or 'model.0.get_extra_state: it differs by rank' in named[0][0]
