"""Common mistakes that torch accepts, or reports far from their cause, are reported at once with the fix."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import Callback, DataLoaders, GuardNonFinite, Learner
from learnkit.core.errors import BatchError, LoaderError, LossError, MetricError
from learnkit.losses import MSELossFlat
from learnkit.metrics import accuracy, accuracy_multi, top_k_accuracy

torch.manual_seed(0)
X, Y = torch.randn(32, 4), torch.randn(32)
LABELS = (Y > 0).long()


def learner(
    y: Any, n_out: int = 1, loss_func: Any = F.mse_loss, x: Any = X, **kwargs: Any
) -> Learner:
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=16, device='cpu', shuffle=False)
    return Learner(dls, nn.Linear(4, n_out), loss_func, default_cbs=True, **kwargs)


def untouched(learn: Learner, error: type[Exception], match: str | None = None) -> BaseException:
    "Fit, and check that the error is raised before a weight changes."
    before = [p.clone() for p in learn.model.parameters()]
    with pytest.raises(error, match=match) as e, learn.no_bar():
        learn.fit(1)
    assert all(map(torch.equal, before, learn.model.parameters()))
    return e.value


def notes(e: BaseException) -> str:
    return '\n'.join(getattr(e, '__notes__', ()))


# -- metrics of classes ----------------------------------------------------------------------------


@pytest.mark.parametrize('metric', [accuracy, partial(top_k_accuracy, k=1)])
def test_one_output_has_no_classes_to_choose_from(metric: Any) -> None:
    with pytest.raises(MetricError, match=r'axis -1: .*`accuracy_multi`'):
        metric(torch.randn(8, 1), torch.ones(8).long())
    y = LABELS[:, None].float()
    learn = learner(y, loss_func=F.binary_cross_entropy_with_logits, metrics=metric)
    untouched(learn, MetricError, 'one output')
    learn.metrics = accuracy_multi
    with learn.no_bar():
        learn.fit(1)
    preds = learn.model(X).detach()[:, 0]
    expected = ((preds > 0) == (LABELS == 1)).float().mean().item()
    assert learn.history[0]['accuracy_multi'] == pytest.approx(expected)


# -- shapes that would be broadcast ----------------------------------------------------------------

BROADCASTING: list[Callable[..., Any]] = [
    nn.MSELoss(),
    partial(F.smooth_l1_loss, beta=0.5),
    lambda pred, y: ((pred - y) ** 2).mean(),
]


@pytest.mark.parametrize('loss', BROADCASTING)
def test_losses_that_would_compare_everything_with_everything(loss: Any) -> None:
    learn = learner(9 * Y, loss_func=loss)
    e = untouched(learn, LossError, r'shapes \(16, 1\) and \(16,\) are broadcast')
    assert 'each of the 16 predictions' in str(e)
    assert '`y[:, None]`, or the loss `model(x).squeeze(1)`' in str(e)
    learn = learner((9 * Y)[:, None], loss_func=loss)
    with learn.no_bar():
        learn.fit(1)


@pytest.mark.parametrize('loss', [MSELossFlat(), lambda p, y: F.mse_loss(p.squeeze(1), y)])
def test_losses_that_flatten_are_fine(loss: Any) -> None:
    learn = learner(Y, loss_func=loss)
    nn.init.zeros_(learn.model.weight)  # so that all predictions are equal
    with learn.no_bar():
        learn.fit(1)
    assert len(learn.history) == 1


# -- targets of a loss -----------------------------------------------------------------------------

CE, BCEL = F.cross_entropy, F.binary_cross_entropy_with_logits
HINTS = [
    (CE, 3, LABELS.float(), "y.astype('int64')"),
    (CE, 3, LABELS[:, None], '`y[:, 0]`'),
    (BCEL, 1, LABELS[:, None], 'y.float()'),
]


@pytest.mark.parametrize(('loss', 'n_out', 'y', 'expected_text'), HINTS)
def test_hints_of_targets(loss: Any, n_out: int, y: Tensor, expected_text: str) -> None:
    e = untouched(learner(y, n_out, loss), Exception)
    assert expected_text in notes(e), notes(e)


# -- what a callback writes ------------------------------------------------------------------------


@pytest.mark.parametrize(('name', 'entry'), [('xb', 'x'), ('yb', 'y')])
def test_a_tensor_where_a_tuple_belongs(name: str, entry: str) -> None:
    def write(cb: Callback) -> None:
        setattr(cb.learn, name, getattr(cb, entry))

    learn = learner(Y[:, None], cbs=Callback(before_batch=write))
    expected_text = rf'`{name}` is Tensor\[16, .\] float32, not a tuple: write `self.learn.{name} = \({entry},\)`'
    untouched(learn, BatchError, expected_text)


# -- data ------------------------------------------------------------------------------------------


A = np.random.default_rng(0).normal(size=(32, 4)).astype('float32')
B = np.zeros((32, 1), dtype='float32')


@pytest.mark.parametrize('batch', [(A, B), {'input': A, 'y': B}], ids=['tuple', 'dict'])
def test_batches_of_arrays(batch: Any) -> None:
    A.flags.writeable = False  # as pandas gives them
    learn = Learner([batch], nn.Linear(4, 1), F.mse_loss)
    with learn.no_bar():
        learn.fit(1)
    preds, targs = learn.get_preds(dl=[batch])
    assert torch.allclose(preds, learn.model(torch.tensor(A)))
    assert torch.equal(targs, torch.tensor(B))
    A.flags.writeable = True
    preds, targs = learn.get_preds(dl=[(A,)])
    assert torch.allclose(preds, learn.model(torch.tensor(A))) and targs is None


def test_targets_in_the_place_of_a_validation_set() -> None:
    for x, y in ((X, Y), (A, B), (X, LABELS)):
        with pytest.raises(LoaderError, match=r'from_tensors\(\(x, y\), \(xv, yv\)\)'):
            DataLoaders.from_tensors(x, y)
    dls = DataLoaders.from_tensors(X, X[:7], bs=4)  # of inputs alone
    assert sum(len(x) for (x,) in dls.valid) == 7


# -- losses that are no numbers --------------------------------------------------------------------


def breaking_at(n: int) -> Callback:
    def spoil(cb: Callback) -> None:
        if cb.train_iter == n:
            cb.model.weight.data[:] = float('nan')

    return Callback(before_batch=spoil)


@pytest.mark.parametrize(('n', 'where'), [(0, 'epoch 0, batch 0'), (3, 'epoch 1, batch 1')])
def test_a_loss_that_becomes_nan_is_reported_once(n: int, where: str) -> None:
    learn = learner(Y[:, None], cbs=breaking_at(n))
    with warnings.catch_warnings(record=True) as seen, learn.no_bar():
        warnings.simplefilter('always')
        learn.fit(4)
    (one,) = seen
    assert str(one.message).startswith(
        f'train_loss is nan since {where}: with `cbs=GuardNonFinite()`'
    )
    assert one.filename == __file__


def test_with_a_guard_only_the_guard_warns() -> None:
    learn = learner(Y[:, None], cbs=[breaking_at(1), GuardNonFinite('skip')])
    with warnings.catch_warnings(record=True) as seen, learn.no_bar():
        warnings.simplefilter('always')
        learn.fit(2)
    assert [str(w.message)[:15] for w in seen] == ['The loss is nan']
