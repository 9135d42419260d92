"""Several processes train like one process on all of the data: weights, histories, counters, files."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F

from learnkit import SGD, Callback, DataLoaders, Learner, ProgressCallback
from learnkit.comm.ranks import SINGLE_RANK
from learnkit.core.errors import OptionError
from learnkit.distributed import DistributedTraining
from tests.helpers.distributing import compare, make_dls, make_learner, weights
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ('kind', 'n_train', 'n'), [('tensors', 104, 2), ('torch', 97, 2), ('tensors', 101, 3)]
)
def test_processes_train_as_one_with_bigger_batches(kind: str, n_train: int, n: int) -> None:
    make = lambda bs: make_learner(make_dls(n_train, bs, kind))
    compare(make, lambda learn: learn.fit_one_cycle(3, 1e-2, cbs=ProgressCallback()), n)


def test_a_global_batch_size() -> None:
    make = lambda bs: make_learner(make_dls(101, bs))
    compare(make, lambda learn: learn.fit(2), batch_size='global')


@pytest.mark.parametrize('size', [1, 3])
def test_microbatches(size: int) -> None:
    compare(lambda bs: make_learner(make_dls(103, bs), microbatch=size), lambda learn: learn.fit(2))


def test_a_weighted_loss() -> None:
    def by_class(xb: Any, yb: Any) -> Any:
        return (yb[0] + 1.0).sum()

    def loss(pred: Any, y: Any) -> Any:
        return (F.cross_entropy(pred, y, reduction='none') * (y + 1)).sum() / (y + 1).sum()

    make = lambda bs: make_learner(
        make_dls(101, bs), loss_func=loss, weight_func=by_class, metrics=None, microbatch=3
    )
    compare(make, lambda learn: learn.fit(2))


@pytest.mark.parametrize('microbatch', [None, 3])
def test_class_weights_and_targets_that_do_not_count(microbatch: int | None) -> None:
    loss = torch.nn.CrossEntropyLoss(
        torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64), ignore_index=1
    )
    make = lambda bs: make_learner(
        make_dls(101, bs), loss_func=loss, metrics=None, microbatch=microbatch
    )
    compare(make, lambda learn: learn.fit(2))


def test_a_loss_that_is_a_sum() -> None:
    loss = torch.nn.CrossEntropyLoss(reduction='sum')
    # the mean of the sums of batches is another for other batches: `eval_every=None`
    make = lambda bs: make_learner(make_dls(101, bs), loss_func=loss, lr=1e-3, eval_every=None)
    compare(make, lambda learn: learn.fit(2))


# an epoch has 13 batches


def test_one_script_serves_one_process() -> None:
    learn, again = make_learner(), make_learner()
    dls, model = learn.dls, learn.model
    with learn.distributed('ddp'):
        assert learn.dls is dls and learn.world is SINGLE_RANK
        learn.fit(1)
    again.fit(1)
    assert torch.equal(weights(learn), weights(again)) and learn.model is model


def test_the_learner_is_as_before_at_the_end() -> None:
    def job(rank: int) -> None:
        learn = make_learner(cbs=DistributedTraining(timeout='20s'))
        assert learn.world.size == 2
        assert len(learn.dls.train) == 7
        assert learn.dls.train is not (dls := learn.dls)
        learn.fit(1)
        learn.remove_cb(DistributedTraining)
        assert learn.world is SINGLE_RANK and learn.dls is not dls and len(learn.dls.train) == 13
        assert [type(cb).__name__ for cb in learn.cbs] == ['TrainEvalCallback', 'Recorder']
        learn.fit(1)  # alone, on all of the data
        assert learn.recorder.smooth_loss.count == 13 and not torch.distributed.is_initialized()

    run_ranks(job)


def test_random_numbers_are_each_process_s_own_and_the_order_is_not() -> None:
    def job(rank: int) -> Any:
        drawn = []
        cbs = Callback(
            before_batch=lambda cb: drawn.append(
                torch.cat([cb.x[:, :1].sum()[None], torch.rand(1, dtype=torch.float64)])
            )
        )
        learn = make_learner(make_dls(64, 8, 'torch'), cbs=cbs)
        with learn.distributed('ddp', timeout='20s'):
            learn.fit(1)
        return torch.stack(drawn)

    a, b = run_ranks(job)
    assert not set(a[:, 0].tolist()) & set(b[:, 0].tolist())
    assert not set(a[:, 1].tolist()) & set(b[:, 1].tolist())


def test_bad_options() -> None:
    for options in (
        {'strategy': 'dpp'},
        {'batch_size': 'each'},
        {'timeout': '3ep'},
    ):
        with pytest.raises(OptionError, match=[*options][-1]):
            DistributedTraining(**options)


def test_rows_and_files_are_the_first_one_s(tmp_path: Path) -> None:
    from learnkit import CSVLogger, SaveModelCallback

    def job(rank: int) -> Any:
        dls = make_dls()
        cbs = [CSVLogger(), SaveModelCallback()]
        learn = Learner(dls, make_learner().model, F.cross_entropy, path=tmp_path, cbs=cbs)
        with learn.distributed('ddp', timeout='20s'), learn.removed_cbs(learn.progress):
            learn.fit(2)
            a = weights(learn)
            learn.save('last')
            learn.load('model')
        return a

    a, b = run_ranks(job)
    assert torch.equal(a, b)
    assert sorted(p.name for p in (tmp_path / 'models').iterdir()) == ['last.pth', 'model.pth']


class Scaled(torch.nn.Module):
    "A loss with a parameter."

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(1, dtype=torch.float64))

    def forward(self, pred: Any, y: Any) -> Any:
        return F.cross_entropy(pred * self.scale.exp(), y)


def test_a_loss_function_that_learns_is_one_in_all() -> None:
    def job(rank: int) -> Any:
        torch.manual_seed(rank)
        loss = Scaled()

        def with_loss(model: Any) -> Any:
            return [*model.parameters(), *loss.parameters()]

        learn = make_learner(make_dls(101, 4), loss_func=loss, splitter=with_loss)
        with learn.distributed('ddp', timeout='20s'):
            begun = loss.scale.item()
            learn.fit(1)
            learn.check_replicas()
        return [begun, loss.scale.item()]

    a, b = run_ranks(job)
    assert a == b and a[0] != a[1]


def test_a_sampler_of_torch_gets_the_epoch() -> None:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from tests.helpers.distributing import make_data

    def job(rank: int) -> Any:
        data, seen = TensorDataset(*make_data(32)), []
        sampler = DistributedSampler(data, 2, rank, seed=3)
        note = Callback(
            before_batch=lambda cb: seen.append(cb.x[:, 0].tolist()) if cb.training else None
        )
        learn = make_learner(
            DataLoaders(DataLoader(data, 8, sampler=sampler), device='cpu'), cbs=note
        )
        with learn.distributed('ddp', timeout='20s'):
            learn.fit(2)
        return [[*seen[0], *seen[1]], [*seen[2], *seen[3]]]

    a, b = run_ranks(job)
    assert a[0] != a[1] and sorted(a[0]) != sorted(a[1])
    for epoch in (0, 1):
        assert sorted(a[epoch] + b[epoch]) == sorted(make_dls(32).train.tensors[0][:, 0].tolist())


def test_the_search_for_a_rate_finds_the_same_everywhere_and_undoes_itself() -> None:
    def search(learn: Learner) -> list[float]:
        before = weights(learn)
        found = learn.lr_find(show_plot=False)
        assert torch.equal(weights(learn), before)
        return [*learn.lr_search.losses, found.valley]

    def job(rank: int) -> list[float]:
        learn = make_learner(make_dls(400, 4))
        with learn.distributed('ddp', timeout='20s'):
            found = search(learn)
            learn.fit(1)
            learn.check_replicas()
        return found

    alone = torch.tensor(search(make_learner(make_dls(400, 8))))
    for found in run_ranks(job):
        assert (torch.tensor(found) - alone).abs().max() < 1e-6


def test_gradients_can_be_compressed() -> None:
    # without annotations: torch compares them with classes, and here they are strings
    def halved(state, bucket):
        state.append(bucket.buffer().numel())
        return default_hooks.fp16_compress_hook(None, bucket)

    def job(rank: int) -> list[Any]:
        sizes: list[int] = []
        learn = make_learner(make_dls(101, 4))
        with learn.distributed('ddp', timeout='20s', comm_hook=halved, comm_state=sizes):
            learn.fit(1)
            learn.check_replicas()
        return [weights(learn), len(sizes)]

    alone = make_learner(make_dls(101, 8))
    alone.fit(1)
    for got, n in run_ranks(job):
        assert n == 13 and 0 < (got - weights(alone)).abs().max() < 1e-2


class Half(torch.nn.Module):
    "A model of which one half is never called."

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(5, 3).double(), torch.nn.Linear(5, 3).double()

    def forward(self, x: Any) -> Any:
        return self.used(x)


def test_parameters_without_a_part_in_the_loss() -> None:
    "An error names the option of the wrapper; with it, unused parameters keep their values."
    torch.manual_seed(0)
    model = Half()

    def job(rank: int) -> tuple[list[Any], list[str]]:
        learn = make_learner(opt_func=SGD)
        learn.model = deepcopy(model)
        with pytest.raises(RuntimeError, match='finished reduction'):
            with learn.distributed('ddp', timeout='20s'):
                learn.fit(1)
        learn = make_learner(opt_func=SGD)
        learn.model = deepcopy(model)
        with learn.distributed('ddp', timeout='20s', find_unused_parameters=True):
            learn.fit(1)
        unused = learn.model.unused
        ends = [weights(learn), unused.weight.grad, torch.equal(unused.weight, model.unused.weight)]
        return ends

    alone = make_learner(make_dls(bs=16), opt_func=SGD)
    alone.model = deepcopy(model)
    alone.fit(1)
    for got, grad, is_unchanged in run_ranks(job):
        assert (got - weights(alone)).abs().max() < 1e-12 and grad is None and is_unchanged
