"""What predictions and targets have to be to each other, where torch would go on with numbers that mean nothing."""
from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from learnkit.errors import LossError, MetricError
from learnkit.rng import preserved_rng

__all__ = ['check_pairing', 'shape_fix', 'check_choice', 'of_classes', 'takes_class_numbers', 'check_class_numbers']

F = TypeVar('F', bound=Callable[..., Any])

_MULTI = {'accuracy': 'accuracy_multi', 'error_rate': 'accuracy_multi',
          'top_k_accuracy': 'accuracy_multi', 'brier_score_loss': 'BrierScoreMulti',
          **{name: f'{name}Multi' for name in ('F1Score', 'FBeta', 'HammingLoss', 'Jaccard', 'MatthewsCorrCoef',
                                               'Precision', 'Recall', 'RocAuc')},
          'RocAucBinary': 'RocAucMulti', 'APScoreBinary': 'APScoreMulti'}


def check_pairing(
    loss_func: Callable[..., Any],  # called with the predictions and the targets
    pred: Any,
    yb: tuple[Any, ...],
) -> None:
    """Raise `LossError` where a loss compares each prediction with every target, as (n, 1) against (n,) does.

    Only shapes that torch would broadcast are looked at. Whether the loss takes them so is tried on other numbers: a
    mean over all pairs stays the same when the targets are shifted.

    >>> check_pairing(torch.nn.functional.mse_loss, torch.zeros(8, 1), (torch.zeros(8),))
    Traceback (most recent call last):
    learnkit.errors.LossError: mse_loss compares each of the 8 predictions with each of the 8 targets: ...
    """
    if len(yb) != 1 or not _would_broadcast(pred, yb[0]): return
    targ, named = yb[0], loss_func.func if isinstance(loss_func, partial) else loss_func
    if not _ignores_order(loss_func, pred, targ): return
    name = getattr(named, '__name__', None) or type(named).__name__
    raise LossError(f'{name} compares each of the {pred.numel()} predictions with each of the {targ.numel()} targets: '
                    f'their shapes {tuple(pred.shape)} and {tuple(targ.shape)} are broadcast. {shape_fix(pred, targ)}')


def shape_fix(
    pred: Tensor,  # predictions
    targ: Tensor,  # as many targets
) -> str:
    """Say how both get one shape.

    >>> shape_fix(torch.zeros(8, 1), torch.zeros(8))
    'Give the targets as `y[:, None]`, or the loss `model(x).squeeze(1)`.'
    """
    if pred.shape == (*targ.shape, 1):
        return f'Give the targets as `y[{":, "*targ.ndim}None]`, or the loss `model(x).squeeze({targ.ndim})`.'
    if targ.shape == (*pred.shape, 1):
        return f'Give the targets as `y[{":, "*pred.ndim}0]`, or the loss `model(x)[{":, "*pred.ndim}None]`.'
    return 'Give both one shape.'


def _would_broadcast(pred: Any, targ: Any) -> bool:
    if not isinstance(pred, Tensor) or not isinstance(targ, Tensor) or pred.shape == targ.shape: return False
    if pred.numel() != targ.numel() or pred.is_complex() or targ.is_complex(): return False
    try: return torch.broadcast_shapes(pred.shape, targ.shape).numel() > pred.numel()
    except RuntimeError: return False


def _ignores_order(loss_func: Callable[..., Any], pred: Tensor, targ: Tensor) -> bool:
    "Tell whether the loss stays the same when targets change places; no where it cannot be computed."
    p = torch.linspace(0, 1, pred.numel(), device=pred.device)
    t = p if targ.is_floating_point() else p > 0.5
    try:
        with preserved_rng(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            losses = [loss_func(p.to(pred.dtype).view(pred.shape), t.roll(n).to(targ.dtype).view(targ.shape))
                      for n in (0, pred.numel() // 2)]
            a, b = (loss.double().sum() for loss in losses)
    except Exception: return False
    return bool(torch.isclose(a, b, rtol=0.01))


def check_choice(
    name: str,     # the metric's, for the message
    pred: Tensor,  # scores
    axis: int,     # where the classes should be
) -> None:
    """Raise `MetricError` where there is one output, of which the highest is always class 0.

    >>> check_choice('accuracy', torch.zeros(8, 1), -1)
    Traceback (most recent call last):
    learnkit.errors.MetricError: accuracy: predictions of shape (8, 1) have one output along axis -1: ...
    """
    if not -pred.ndim <= axis < pred.ndim or pred.shape[axis] != 1: return
    multi = f'use `{_MULTI[name]}`, which says 1 where the sigmoid is above `thresh`; or ' if name in _MULTI else ''
    raise MetricError(f'{name}: predictions of shape {tuple(pred.shape)} have one output along axis {axis}: there are '
                      f'no classes to choose from. For one output a sample {multi}give the model two outputs, and '
                      'train with cross_entropy.')


def of_classes(f: F) -> F:
    "Mark what takes class numbers: `check_class_numbers` is for its targets."
    vars(f)['of_classes'] = True
    return f


def takes_class_numbers(
    metric: Any,  # a `Metric`
) -> bool:
    "Tell whether what a metric computes was marked by `of_classes`."
    while metric is not None:
        f = getattr(metric, 'func', None) or getattr(metric, 'prepare', None)
        while isinstance(f, partial): f = f.func
        if getattr(f, 'of_classes', False): return True
        metric = getattr(metric, '__dict__', {}).get('metric')
    return False


def check_class_numbers(
    name: str,             # the metric's, for the message
    yb: tuple[Any, ...],   # the targets of a batch
) -> None:
    """Raise `MetricError` for targets that are no class numbers; it waits for a device.

    >>> check_class_numbers('accuracy', (torch.tensor([0.5, 1.]),))
    Traceback (most recent call last):
    learnkit.errors.MetricError: accuracy: the targets, 0.5 for one, are no class numbers. ...
    """
    targ = yb[0] if yb else None
    if not isinstance(targ, Tensor) or not targ.is_floating_point(): return
    if len(odd := targ[targ != targ.round()]):
        raise MetricError(f'{name}: the targets, {odd[0].item():.4g} for one, are no class numbers. For other numbers '
                          'there are `mse`, `mae`, `rmse` and `R2Score`.')
