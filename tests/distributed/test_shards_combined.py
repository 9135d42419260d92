"""Several loaders in several processes: a shard of each, with the batches of a single process, resumed at any batch."""

from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from learnkit import SGD, Callback, CombinedLoader, DataLoaders, Learner, TensorLoader
from learnkit.callbacks import Checkpoint
from learnkit.core.errors import CheckpointError
from learnkit.data.combined_position import make_position, resume_position
from learnkit.distributed.shards import shard
from tests.helpers.distributing import expect_interrupt, weights
from tests.helpers.positions import Items
from tests.helpers.ranks import run_ranks
from tests.helpers.shards import Together, batch_list, items, own_loader

pytestmark = pytest.mark.dist

MODES = ('min_size', 'max_size', 'max_size_cycle', 'sequential', 'weighted')


def make(mode: str, per_batch: int = 1) -> Any:
    def combine(seed: int) -> CombinedLoader:
        options = {'seed': 3} if mode == 'weighted' else {}
        loaders = {
            'global': items(seed, 24, 2 * per_batch, shuffle=True),
            'rows': TensorLoader(torch.arange(16), bs=2 * per_batch, shuffle=True),
            'list': batch_list(seed, 12, bs=2 * per_batch),
        }
        return CombinedLoader(loaders, mode, **options)

    return combine


def rows_of(batch: Any) -> list[Any]:
    "Return the samples of each loader of a batch."
    if batch is None:
        return []
    if isinstance(batch, dict):
        return [rows_of(part) for part in batch.values()]
    if isinstance(batch, (tuple, list)):
        batch = batch[0]
    return (batch[:, 0] if batch.ndim > 1 else batch).tolist()


def join(parts: list[list[Any]]) -> list[Any]:
    "Join the samples of all ranks in each batch."
    if any(isinstance(entry, list) for entry in parts[0]):
        return [join([*entry]) for entry in zip(*parts, strict=True)]
    return [row for part in parts for row in part]


@pytest.mark.parametrize('mode', MODES)
def test_ranks_share_the_batches_of_one_process(mode: str) -> None:
    "Two ranks with batches of 2 have the batches of 4 of a single process, in the same order."
    ranks = Together(make(mode), 2)
    one = Together(make(mode, 2), 1)
    for _ in range(2):
        ranks.take_order()
        parts = ranks.each(lambda _, dl: [(rows_of(b), dl.batch_source) for b in dl])
        one.take_order()
        [whole] = one.each(lambda _, dl: [(rows_of(b), dl.batch_source) for b in dl])
        joined = [(join([b for b, _ in rank]), rank[0][1]) for rank in zip(*parts, strict=True)]
        assert joined == whole
        assert {len(dl) for dl in ranks.shards} == {len(whole)}
        assert ranks.shards[1].share(0) == (2, 4)
        assert ranks.wholes[1].batch_source == whole[-1][1]


@pytest.mark.parametrize('mode', MODES)
def test_ranks_resume_at_any_batch(mode: str) -> None:
    def combine(seed: int) -> CombinedLoader:
        loaders = {
            'noise': DataLoader(Items('torch'), 3, shuffle=True),
            'rows': TensorLoader(torch.arange(9), bs=2, shuffle=True),
            'own': own_loader(seed, 8, 2),
        }
        return CombinedLoader(loaders, mode, **({'seed': 1} if mode == 'weighted' else {}))

    def draw(position: Any) -> list[Any]:
        dl = position.dl
        return [(rows_of(b), dl.batch_source, dl.share(i)) for i, b in enumerate(position.begin())]

    n_batches = len(Together(combine, 2).shards[0])
    for n in {1, n_batches // 2, n_batches}:
        ranks = Together(combine, 2)
        ranks.take_order()
        positions = ranks.each(lambda _, dl: make_position(dl))
        passes = ranks.each(lambda rank, _, p=positions: p[rank].begin())
        ranks.each(lambda rank, _, n=n, p=passes: [*islice(p[rank], n)])
        saved = ranks.each(lambda rank, _, n=n, p=positions: p[rank].state_dict(n))
        rngs = list(ranks.rngs)
        rest = ranks.each(lambda rank, _, p=passes: [rows_of(b) for b in p[rank]])
        again = Together(combine, 2, seed=9)
        again.take_order()
        again.rngs = rngs
        resumed = again.each(lambda rank, dl, s=saved: resume_position(dl, s[rank]))
        assert again.each(lambda r, _, p=resumed: [rows_of(b) for b in p[r].begin()]) == rest, n
        ranks.take_order()
        again.take_order()
        after = [
            t.each(lambda r, _, p=p: draw(p[r].next_position(n_batches)))
            for t, p in ((ranks, positions), (again, resumed))
        ]
        assert after[0] == after[1], n


def test_a_pass_of_two_ranks_resumes_in_one() -> None:
    ranks = Together(make('max_size_cycle'), 2)
    ranks.take_order()
    positions = ranks.each(lambda _, dl: make_position(dl))
    passes = ranks.each(lambda rank, _: positions[rank].begin())
    ranks.each(lambda rank, _: [*islice(passes[rank], 2)])
    saved = ranks.each(lambda rank, _: positions[rank].state_dict(2))
    rest = ranks.each(lambda rank, _: [rows_of(b) for b in passes[rank]])
    one = Together(make('max_size_cycle', 2), 1, seed=9)
    [resumed] = one.each(lambda _, dl: resume_position(dl, saved[0]))
    [whole] = one.each(lambda _, __: [rows_of(b) for b in resumed.begin()])
    assert whole == [join([*parts]) for parts in zip(*rest, strict=True)]
    with pytest.raises(CheckpointError, match='batches 6, now 3'):
        Together(make('max_size_cycle', 4), 1).each(lambda _, dl: resume_position(dl, saved[0]))


def test_a_loader_with_a_distributed_sampler_stays_as_it_is() -> None:
    sampler = DistributedSampler(range(8), 2, 1, shuffle=False)
    loader = CombinedLoader(
        [DataLoader(range(8), 2, sampler=sampler), TensorLoader(torch.arange(8), bs=2)],
        'sequential',
    )
    part = shard(loader, 1, 2)
    assert [b[0].tolist() if isinstance(b, tuple) else b.tolist() for b in part] == [
        [1, 3],
        [5, 7],
        [2, 3],
        [6, 7],
    ]
    assert [part.share(i) for i in range(4)] == [None, None, (2, 4), (2, 4)]


class Stop(Callback):
    "Interrupt the run after `n` training batches in every process."

    order = 2000

    def __init__(self, n: int) -> None:
        self.n = n

    def batch_checkpoint(self) -> None:
        if self.learn.time.ba == self.n:
            raise KeyboardInterrupt

    def state_dict(self) -> None:
        return None  # the next process is interrupted later


def train(mode: str, path: Path, n_ranks: int, stop: int = 0, resume: bool = False) -> list[Any]:
    "Train two epochs on two loaders in processes; return the weights and the losses of each."

    def job(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank + 5 if resume else 1)
        x = torch.linspace(-1, 1, 24)[:, None]
        per_rank = 4 // n_ranks
        loaders = {
            'a': DataLoader([*zip(x, 2 * x, strict=True)], per_rank, shuffle=True, num_workers=1),
            'b': TensorLoader(x[:12], 3 * x[:12], bs=per_rank, shuffle=True, seed=1),
        }
        options = {'seed': 3, 'weights': {'a': 1, 'b': 2}} if mode == 'weighted' else {}
        loader = CombinedLoader(loaders, mode, **options)
        torch.manual_seed(1)
        model = nn.Linear(1, 1)

        def loss(pred: Any, targ: Any) -> torch.Tensor:
            if mode == 'weighted':
                scale = {'a': 1.0, 'b': 0.5}[loader.batch_source]
                return scale * nn.functional.mse_loss(pred, targ)
            return nn.functional.mse_loss(pred[0], targ['a']) + nn.functional.mse_loss(
                pred[1], targ['b']
            )

        if mode != 'weighted':
            model = Together2(model)
        cbs = [Checkpoint(every='1ba', keep_last=None), *([Stop(stop)] if stop else [])]
        learn = Learner(DataLoaders(loader, path=path), model, loss, SGD, 0.1, cbs=cbs)
        with (
            learn.no_logging(),
            expect_interrupt() if stop else nullcontext(),
            learn.distributed('ddp', timeout='20s') if n_ranks > 1 else nullcontext(),
        ):
            learn.fit(2, resume=resume)
        return {'weights': weights(learn), 'losses': [row['train_loss'] for row in learn.history]}

    return run_ranks(job, n_ranks) if n_ranks > 1 else [job(0)]


class Together2(nn.Module):
    "Apply one module to the inputs of two loaders."

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [self.module(a), self.module(b)]


@pytest.mark.filterwarnings('ignore:The callbacks differ from those')
@pytest.mark.parametrize('mode', ['max_size_cycle', 'weighted'])
def test_two_processes_train_as_one_and_resume_twice(mode: str, tmp_path: Path) -> None:
    [one] = train(mode, tmp_path / 'one', 1)
    whole = train(mode, tmp_path / 'whole', 2)
    for rank in whole:
        assert torch.allclose(rank['weights'], one['weights'], rtol=1e-5, atol=1e-6)
        assert rank['losses'] == pytest.approx(one['losses'], rel=1e-5)
    train(mode, tmp_path / 'again', 2, stop=2)
    train(mode, tmp_path / 'again', 2, stop=8, resume=True)
    resumed = train(mode, tmp_path / 'again', 2, resume=True)
    for got, wanted in zip(resumed, whole, strict=True):
        assert torch.equal(got['weights'], wanted['weights'])
        assert got['losses'] == wanted['losses']
