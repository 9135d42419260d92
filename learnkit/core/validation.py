# SPDX-License-Identifier: Apache-2.0
"""Checks of options, predictions and targets; hints for errors that torch raises; warnings."""

from __future__ import annotations

import contextlib
import operator
import re
import sys
import warnings
from collections.abc import Callable
from inspect import Parameter, signature
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn import functional

from learnkit.core.batch import children_of, passed_names, short_repr, tensors_in
from learnkit.core.errors import LearnkitError, LossError, MetricError, OptionError
from learnkit.core.model import copy_buffers, name_of, restore_buffers, unwrap_partial
from learnkit.core.random import preserved_generators, preserved_rng

if TYPE_CHECKING:
    from learnkit.learner import Learner

# `warn_user` skips frames of these files to find the line of user code
_INTERNAL_PATHS = (
    str(Path(__file__).parents[1]),
    contextlib.__file__,
    str(Path(torch.__file__).parent),
)

_OTHER_LOSSES = (
    'For numbers use `MSELoss()`; for yes or no `BCEWithLogitsLoss()`; for one class of several, give the model an '
    'output for each class and whole numbers as targets.'
)

# parameter names that users choose for targets and to predictions
_TARGETS = 'y_true true target targets targ targs label labels gt y'.split()
_PREDICTIONS = (
    'y_pred pred preds prediction predictions output outputs out logits y_hat yhat scores'.split()
)

F = TypeVar('F', bound=Callable[..., Any])


# -- warnings --------------------------------------------------------------------------------------


def warn_user(text: str) -> None:
    "Issue a warning with the location of the user code that called the package."
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL_PATHS):
        frame = frame.f_back
        level += 1
    warn(text, stacklevel=level)


def warn_of_nan(
    learn: Learner,
    losses: list[float],  # training loss of each step of the fit
    n_before: int,  # number of steps before this epoch
) -> None:
    "Warn if this epoch is the first with NaN losses, unless a callback handles NaN losses."
    first = next((i for i, loss in enumerate(losses) if loss != loss), -1)
    class_names = {cls.__name__ for cb in learn.cbs for cls in type(cb).__mro__}
    is_handled = bool(class_names & {'GuardNonFinite', 'LRFinder'})
    if first < n_before or is_handled or not learn.world.is_first:
        return
    if any(vars(cb).get('scaler') is not None for cb in learn.cbs):
        return  # the callback of the gradient scaler issues a warning
    warn_user(
        f'train_loss is nan since epoch {learn.epoch}, batch {first - n_before}: with `cbs=GuardNonFinite()` the '
        'fit ends there, and reports what became nan first. A lower learning rate may help.'
    )


def warn_of_order(
    f: Callable[..., Any],  # loss function or metric, called with predictions and targets
) -> None:
    "Warn about a function that takes targets before predictions by its parameter names, such as `f(y_true, y_pred)`."
    f = unwrap_partial(f)
    if str(getattr(f, '__module__', '')).startswith('torch.'):
        return  # torch's order is known, and reading a signature takes longer than a small batch
    try:
        names = list(signature(getattr(f, 'forward', f)).parameters)[:2]
    except (TypeError, ValueError):
        return  # functions written in C have no signature
    if len(names) == 2 and names[0] in _TARGETS and names[1] in _PREDICTIONS:
        warn_user(
            f'{name_of(f)}({", ".join(names)}) is called with predictions first, then targets. Exchange its parameters.'
        )


# -- hints for torch's errors ----------------------------------------------------------------------


def model_hint(b: Any, model: nn.Module, e: Exception) -> str:
    """Return a hint for a known error of a model's forward pass, or an empty string.

    >>> model_hint((torch.zeros(1, 4),), nn.BatchNorm1d(4), ValueError('Expected more than 1 value per channel ...'))
    ': batch norm cannot train on one sample. Set `drop_last=True` in the loader, or another batch size'
    >>> error = TypeError('Linear.forward() takes 2 positional arguments but 3 were given')
    >>> model_hint((torch.zeros(1, 4), torch.zeros(1)), nn.Linear(4, 1), error)
    ': 2 inputs, and forward() takes 1. ...write `DataLoaders(..., n_inp=1)`'
    """
    if 'more than 1 value per channel' in str(e):
        return ': batch norm cannot train on one sample. Set `drop_last=True` in the loader, or another batch size'
    return _input_hint(b, model, e) or precision_hint(b, model)


def _container_hint(entry: Any, model: nn.Module) -> str:
    "Return a hint for a container that was passed as the only input, or an empty string."
    kind = type(entry).__name__
    if type(entry) in (tuple, list):
        return (
            f': the {kind} of {len(entry)} entries is one input. For several inputs, let the loader yield flat batches '
            f'`(x1, x2, y)`, of which `DataLoaders(..., n_inp={len(entry)})` counts the inputs'
        )
    if children_of(entry) is not None and passed_names(model, (entry,)) is None:
        parameters = ', '.join(signature(model.forward).parameters)
        return (
            f': the {kind} is one input. Its entries are passed by keyword if they are named as the parameters of '
            f'forward() are ({parameters}): rename the entries, or let the loader yield tuples `(x, y)`'
        )
    return ''


def _input_hint(xb: Any, model: nn.Module, e: Exception) -> str:
    "Return a hint for inputs that do not match the parameters of forward, or an empty string."
    if not isinstance(xb, (tuple, list)) or not isinstance(e, (TypeError, AttributeError)):
        return ''
    error = str(e)
    forward = getattr(model.forward, '__qualname__', '')
    if error.startswith(f'{forward}() takes'):
        taken = re.search(r'(\d+) positional', error)
        n_taken = int(taken[1]) - 1 if taken else 0  # without `self`
        if 0 < n_taken < len(xb):
            return (
                f': {len(xb)} inputs, and forward() takes {n_taken}. Without `n_inp` the last entry of a batch is the '
                f'target, and all others are inputs: write `DataLoaders(..., n_inp={n_taken})`'
            )
    if len(xb) != 1:
        return ''
    is_missing = error.startswith(f'{forward}() missing')
    if is_missing or re.search(rf'\b{type(xb[0]).__name__}\b', error):
        return _container_hint(xb[0], model)
    return ''


def precision_hint(b: Any, model: nn.Module) -> str:
    """Return a hint for float64 inputs from NumPy with a float32 model, or an empty string.

    >>> precision_hint((torch.zeros(2, 3, dtype=torch.float64),), nn.Linear(3, 1))
    ". The model is in float32, NumPy's numbers are float64: pass it `x.astype('float32')`, or of a tensor `x.float()`"
    """
    input_dtypes = {t.dtype for t in tensors_in(b)}
    model_dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if model_dtypes != {torch.float32} or torch.float64 not in input_dtypes:
        return ''
    return (
        ". The model is in float32, NumPy's numbers are float64: pass it `x.astype('float32')`, or of a tensor "
        '`x.float()`'
    )


def loss_hint(loss_func: Any, pred: Any, yb: tuple[Any, ...], e: Exception) -> str:
    """Return a hint for a known error of a loss function, or an empty string.

    >>> error = RuntimeError('expected target dtype to be Long or Byte, but got Float')
    >>> loss_hint(nn.CrossEntropyLoss(), torch.zeros(2, 3), (torch.zeros(2),), error)
    ": class numbers are int64. Pass `y.astype('int64')`, or of a tensor `y.long()`"
    """
    if hint := logits_hint(pred, e):
        return hint
    targ = yb[0] if yb else None
    if not isinstance(pred, Tensor) or not isinstance(targ, Tensor):
        return ''
    return (
        classes_hint(loss_func, pred, yb, e)
        or _shape_hint(pred, targ, str(e))
        or _dtype_hint(pred, targ, str(e))
    )


def logits_hint(pred: Any, e: Exception) -> str:
    """Return a hint for a function that expects the whole output of a model of transformers, or an empty string.

    >>> logits_hint(torch.zeros(2), AttributeError("'Tensor' object has no attribute 'logits'"))
    ': the Learner passes the logits of the output, so that `outputs.logits` is `outputs` itself'
    """
    if not isinstance(pred, Tensor) or not isinstance(e, AttributeError):
        return ''
    if "no attribute 'logits'" in str(e):
        return ': the Learner passes the logits of the output, so that `outputs.logits` is `outputs` itself'
    return ''


def _shape_hint(pred: Tensor, targ: Tensor, error: str) -> str:
    "Return a hint for targets of the wrong shape."
    if 'arget size' in error and pred.numel() == targ.numel():
        return f'. {shape_fix(pred, targ).removesuffix(".")}'
    if 'multi-target' in error and targ.ndim == 2 and targ.shape[1] == 1:
        conversion = '' if targ.dtype == torch.int64 else '.long()'
        return f'. Pass the targets as `y[:, 0]{conversion}`'
    return ''


def _dtype_hint(pred: Tensor, targ: Tensor, error: str) -> str:
    "Return a hint for targets of the wrong dtype."
    if 'Long' in error and re.search('but (got|found)', error) and targ.dtype != torch.int64:
        return ": class numbers are int64. Pass `y.astype('int64')`, or of a tensor `y.long()`"
    phrases = ('cast to the desired output type', 'two bool tensors', 'Found dtype')
    is_int = pred.is_floating_point() and not targ.is_floating_point()
    if is_int and any(phrase in error for phrase in phrases):
        return ": targets must be floats. Pass `y.astype('float32')`, or of a tensor `y.float()`"
    return ''


def classes_hint(loss_func: Any, pred: Tensor, yb: tuple[Any, ...], e: Exception) -> str:
    """Return the range of targets and the number of classes for an out-of-bounds error, or an empty string.

    >>> error = IndexError('Target 9 is out of bounds.')
    >>> classes_hint(nn.CrossEntropyLoss(), torch.zeros(2, 5), (torch.tensor([0, 9]),), error)
    ': targets from 0 to 9 for 5 classes'
    """
    if not isinstance(e, IndexError) or 'out of bounds' not in str(e):
        return ''
    low, high = (int(v) for v in yb[0].aminmax())
    n_classes = pred.shape[getattr(loss_func, 'axis', 1)]
    return f': targets from {low} to {high} for {n_classes} classes'


# -- signatures ------------------------------------------------------------------------------------


def takes_alone(f: Any) -> str:
    """Return 'only' if a function takes one positional argument, 'also' if it takes one or two, or an empty string.

    A first parameter `*args` takes any number, and does not count: the losses of fastai have it.
    """
    try:
        sig = signature(f.forward if isinstance(f, nn.Module) else f)
        sig.bind(f)
    except (TypeError, ValueError):  # functions written in C have no signature
        return ''
    if next(iter(sig.parameters.values())).kind is Parameter.VAR_POSITIONAL:
        return ''
    try:
        sig.bind(f, f)
    except TypeError:
        return 'only'
    return 'also'


def takes(f: Any, name: str) -> bool:
    "Return True if a function takes the keyword `name`, or if its signature is unknown."
    try:
        params = signature(f).parameters.values()
    except (TypeError, ValueError):
        return True  # functions written in C have no signature
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in params)


# -- options ---------------------------------------------------------------------------------------


def is_number(value: object) -> bool:
    """Return True for a real number other than NaN or a boolean.

    >>> is_number(2), is_number(float('inf')), is_number(True), is_number('2')
    (True, True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def is_count(value: object, least: int = 1) -> bool:
    """Return True for an integer of `least` or more, other than a boolean.

    >>> is_count(2), is_count(0), is_count(2.0), is_count(True)
    (True, False, False, False)
    """
    try:
        # raises TypeError for a value that is not an integer
        return not isinstance(value, bool) and operator.index(value) >= least  # type: ignore[arg-type]
    except TypeError:
        return False


def check_count(
    name: str,  # name of the option
    value: Any,
    least: int = 1,
    error: type[LearnkitError] = OptionError,
) -> int:
    """Return `value` as an int; raise `error` if it is not a whole number, or below `least`.

    >>> check_count('n_epoch', -1, 0)
    Traceback (most recent call last):
    learnkit.core.errors.OptionError: n_epoch=-1: pass a whole number, 0 or more.
    """
    if is_count(value, least):
        return operator.index(value)
    raise error(f'{name}={short_repr(value)}: pass a whole number, {least} or more.')


# -- predictions and targets of losses -------------------------------------------------------------


def check_pairing(
    loss_func: Callable[..., Any],  # function of predictions and targets
    pred: Any,  # predictions of a batch
    yb: tuple[Any, ...],  # targets of the batch
) -> None:
    """Raise `LossError` if a loss compares each prediction with every target, as for shapes (n, 1) and (n,).

    Only shapes that torch would broadcast are checked. The check computes the loss of test values: a mean over all
    pairs does not change when the targets are shifted.

    >>> check_pairing(torch.nn.functional.mse_loss, torch.zeros(8, 1), (torch.zeros(8),))
    Traceback (most recent call last):
    learnkit.core.errors.LossError: mse_loss compares each of the 8 predictions with each of the 8 targets: ...
    """
    if len(yb) != 1 or not isinstance(pred, Tensor) or not isinstance(yb[0], Tensor):
        return
    targ = yb[0]
    is_paired = pred.shape == targ.shape or pred.numel() != targ.numel()
    if is_paired or not _ignores_order(loss_func, pred, targ):
        return
    name = name_of(unwrap_partial(loss_func))
    raise LossError(
        f'{name} compares each of the {pred.numel()} predictions with each of the {targ.numel()} targets: '
        f'their shapes {tuple(pred.shape)} and {tuple(targ.shape)} are broadcast. {shape_fix(pred, targ)}'
    )


def check_class_scores(
    loss_func: Callable[..., Any],  # function of predictions and targets
    pred: Any,  # predictions of a batch, (B, C, ...)
    yb: tuple[Any, ...],  # targets of the batch
) -> None:
    """Raise `LossError` if cross-entropy gets a single class; warn about targets that are not class probabilities.

    torch computes the loss of both without an error. The loss of a single class is always 0, so nothing is trained.

    >>> check_class_scores(nn.CrossEntropyLoss(), torch.zeros(8, 1), (torch.zeros(8, 1),))
    Traceback (most recent call last):
    learnkit.core.errors.LossError: CrossEntropyLoss compares classes: predictions of shape (8, 1) have one class. ...
    """
    loss = unwrap_partial(loss_func)
    kind = getattr(loss, 'func', loss)  # `CrossEntropyLossFlat` has torch's loss as `func`
    if not (isinstance(kind, nn.CrossEntropyLoss) or kind is functional.cross_entropy):
        return
    if len(yb) != 1 or not isinstance(pred, Tensor) or not isinstance(yb[0], Tensor):
        return
    targ = yb[0]
    axis = getattr(loss, 'axis', 1)
    has_axis = -pred.ndim <= axis < pred.ndim
    if not has_axis or pred.shape[axis] == 1:
        raise LossError(
            f'{name_of(loss)} compares classes: predictions of shape {tuple(pred.shape)} have one class. '
            f'{_OTHER_LOSSES}'
        )
    if not targ.is_floating_point() or targ.shape != pred.shape:
        return
    total = targ.detach().float().sum(axis)
    is_sum = ((total - 1).abs() < 1e-2) | (total == 0)  # 0: a sample that is ignored
    if not bool(is_sum.all() & (targ >= 0).all()):
        warn_user(
            f"{name_of(loss)} takes targets of the predictions' shape as probabilities, and these are not: they are "
            f'negative, or do not sum to 1 over the classes. {_OTHER_LOSSES}'
        )


def shape_fix(
    pred: Tensor,  # predictions
    targ: Tensor,  # targets, as many as predictions
) -> str:
    """Return advice on how predictions and targets get the same shape.

    >>> shape_fix(torch.zeros(8, 1), torch.zeros(8))
    'Pass the targets as `y[:, None]`, or the loss `model(x).squeeze(1)`.'
    """
    if pred.shape == (*targ.shape, 1):
        return f'Pass the targets as `y[{":, " * targ.ndim}None]`, or the loss `model(x).squeeze({targ.ndim})`.'
    if targ.shape == (*pred.shape, 1):
        return f'Pass the targets as `y[{":, " * pred.ndim}0]`, or the loss `model(x)[{":, " * pred.ndim}None]`.'
    return 'Give both the same shape.'


def _ignores_order(loss_func: Callable[..., Any], pred: Tensor, targ: Tensor) -> bool:
    "Return True for shapes that torch broadcasts, if shifting the targets does not change the loss."
    n = pred.numel()
    ramp = torch.linspace(0, 1, n, device=pred.device)
    test_pred = ramp.to(pred.dtype).view(pred.shape)
    test_targ = (ramp if targ.is_floating_point() else ramp > 0.5).to(targ.dtype)

    copies = copy_buffers(loss_func) if isinstance(loss_func, nn.Module) else []

    def compute_loss(shift: int) -> Tensor:
        loss: Tensor = loss_func(test_pred, test_targ.roll(shift).view(targ.shape))
        return loss.double().sum()

    try:
        if torch.broadcast_shapes(pred.shape, targ.shape).numel() == n:
            return False
        with (
            preserved_rng(),
            preserved_generators(loss_func),
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter('ignore')
            return bool(torch.isclose(compute_loss(0), compute_loss(n // 2), rtol=0.01))
    except Exception:
        return False  # other shapes, or a loss that cannot be computed
    finally:
        restore_buffers(copies, skip_equal=True)


# -- predictions and targets of metrics ------------------------------------------------------------


def check_choice(
    name: str,  # name of the metric, for the message
    pred: Tensor,  # scores
    axis: int,  # dimension of the classes
) -> None:
    """Raise `MetricError` for scores of a single class, whose argmax is always 0.

    >>> check_choice('accuracy', torch.zeros(8, 1), -1)
    Traceback (most recent call last):
    learnkit.core.errors.MetricError: accuracy: predictions of shape (8, 1) have one output along axis -1: ...
    """
    if not -pred.ndim <= axis < pred.ndim or pred.shape[axis] != 1:
        return
    raise MetricError(
        f'{name}: predictions of shape {tuple(pred.shape)} have one output along axis {axis}: there are '
        'no classes to choose from. Use a model with two outputs, and train with cross_entropy, or use a metric of '
        'labels, such as `accuracy_multi` or `F1ScoreMulti`, which predict 1 above `thresh`.'
    )
