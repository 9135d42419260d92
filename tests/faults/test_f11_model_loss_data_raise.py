"""Row 11: model, loss, step, metric or data raises. As in row 9, and the next fit equals a fresh one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from learnkit import DataLoaders, Learner
from tests.faults.fault_helpers import (
    N_EPOCH,
    Watch,
    fits_like_fresh,
    mae,
    make_learner,
    notes,
    raised_by,
    start_again,
)


class Broken(Exception):
    "The exception of these tests, which cannot be constructed from a message."

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(code)


class Fuse:
    "Raises at the n-th call after it was armed."

    def __init__(self) -> None:
        self.left, self.error = 0, Broken(7, why='x')

    def arm(self, nth: int) -> None:
        self.left = nth

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


class BackwardFuse(torch.autograd.Function):
    "Return the tensor; its backward calls the fuse."

    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.fuse()
        return grad, None


class FusedLoader:
    "A loader with a fuse in each place where a loader may raise."

    def __init__(self, dl: Any, where: str, fuse: Fuse) -> None:
        self.dl, self.where, self.fuse = dl, where, fuse

    def __len__(self) -> int:
        return len(self.dl)

    def __iter__(self) -> Iterator[Any]:
        if self.where == 'iter':
            self.fuse()
        return self.batches()

    def batches(self) -> Iterator[Any]:
        for batch in self.dl:
            if self.where == 'next':
                self.fuse()
            yield batch


def in_model(learn: Learner, fuse: Fuse) -> None:
    learn.model[0].register_forward_hook(lambda *_: fuse())


def in_backward(learn: Learner, fuse: Fuse) -> None:
    learn.model[1].register_forward_hook(lambda m, i, out: BackwardFuse.apply(out, fuse))


def in_loss(learn: Learner, fuse: Fuse) -> None:
    def loss(pred: Tensor, y: Tensor) -> Tensor:
        value = nn.functional.mse_loss(pred, y)
        fuse()
        return value

    learn.loss_func = loss


def in_step(learn: Learner, fuse: Fuse) -> None:
    class Adam(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            fuse()
            return super().step(closure)

    learn.opt_func = Adam


def in_metric(learn: Learner, fuse: Fuse) -> None:
    def metric(pred: Tensor, y: Tensor) -> Tensor:
        fuse()
        return mae(pred, y)

    metric.__name__ = 'mae'
    learn.metrics = metric


def in_logger(learn: Learner, fuse: Fuse) -> None:
    learn.logger = lambda row: fuse()


def in_loader(where: str) -> Callable[[Learner, Fuse], None]:
    def put(learn: Learner, fuse: Fuse) -> None:
        learn.dls.train = FusedLoader(learn.dls.train, where, fuse)

    put.__name__ = f'in_loader_{where}'
    return put


def in_valid_loader(learn: Learner, fuse: Fuse) -> None:
    name, dl = learn.dls.evaluation[0]
    learn.dls.evaluation[0] = name, FusedLoader(dl, 'next', fuse)


def in_collate(learn: Learner, fuse: Fuse) -> None:
    def collate(samples: Any) -> Any:
        fuse()
        return torch.utils.data.default_collate(samples)

    learn.dls.train = DataLoader(learn.dls.train.dataset, batch_size=4, collate_fn=collate)


FAILING_PARTS = {
    in_model: 4,
    in_backward: 2,
    in_loss: 2,
    in_step: 2,
    in_metric: 5,  # the first batch and its halves are measured before
    in_logger: 1,
    in_loader('next'): 3,
    in_loader('iter'): 2,
    in_valid_loader: 2,
    in_collate: 2,
}


@pytest.mark.parametrize(
    ('put', 'nth'), FAILING_PARTS.items(), ids=lambda o: getattr(o, '__name__', str(o))
)
def test_it_comes_out_as_it_was_and_the_next_fit_equals_a_fresh_one(
    put: Callable[[Learner, Fuse], None], nth: int
) -> None:
    fuse, learn = Fuse(), make_learner(watch := Watch())
    start_again(learn)
    whole = learn.loss_func, learn.opt_func, learn.metrics, learn.logger
    put(learn, fuse)
    fuse.arm(nth)
    e = raised_by(lambda: learn.fit(N_EPOCH))
    assert e is fuse.error and e.args == (7,) and e.__cause__ is None
    assert watch.fired == [('after_error', e), ('cleanup', e)]
    where = [n for n in notes(e) if n.startswith('in ')]
    assert len(where) == 1 and '(epoch ' in where[0], notes(e)

    learn.loss_func, learn.opt_func, learn.metrics, learn.logger = whole
    for module in learn.model.modules():
        module._forward_hooks.clear()
    fits_like_fresh(learn, watch)


def test_stop_iteration_inside_the_data_is_no_end_of_the_epoch() -> None:
    "An error in a data set must not silently shorten the epoch."

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, i: int) -> Any:
            if i == 9:
                next(iter([]))
            return torch.zeros(3), torch.zeros(1)

    dls = DataLoaders(DataLoader(Samples(), batch_size=4), None, device='cpu')
    learn = make_learner(dls=dls, metrics=None)
    e = raised_by(lambda: learn.fit(1))
    assert not isinstance(e, StopIteration) and ('3' in str(e) or 'StopIteration' in str(e))
