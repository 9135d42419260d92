# SPDX-License-Identifier: Apache-2.0
"""Explanations of errors of the model, the loss and the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from learnkit.core.batch import describe
from learnkit.core.errors import BatchError, CancelException, LossError, add_note, list_places
from learnkit.core.model import name_of
from learnkit.core.validation import loss_hint, model_hint, precision_hint

if TYPE_CHECKING:
    from learnkit.learner import Learner


def explain_error(learn: Learner, e: BaseException) -> BaseException:
    """Return the error to raise for an error inside a batch: `e` with a note, or a clearer one.

    Where it was raised is read from the state of the batch: without a prediction in the model,
    without `loss_grad` in the loss function, otherwise in the backward pass or the step.
    """
    if isinstance(e, AttributeError) and e.name == 'loss_grad' and learn.training:
        return _explain_no_loss(learn)
    if list_places(e) or isinstance(e, CancelException) or not isinstance(e, Exception):
        return e
    state = learn.__dict__
    if learn.batch is None:
        return e
    if 'pred' not in state:
        return _explain_model(learn, e)
    if 'loss_grad' not in state:
        return _explain_loss(learn, e)
    return _explain_backward(learn, e) if learn.training else e


def _explain_model(learn: Learner, e: Exception) -> Exception:
    if not isinstance(learn.xb, (tuple, list)):
        return _make_tuple_error(learn, 'xb', 'x')
    hint = model_hint(learn.xb, learn.model, e)
    add_note(e, f'{type(learn.model).__name__} got {describe(learn.xb)}{hint}')
    return e


def _explain_loss(learn: Learner, e: Exception) -> Exception:
    if not isinstance(learn.yb, (tuple, list)):
        return _make_tuple_error(learn, 'yb', 'y')
    if isinstance(e, LossError) or learn.loss_func is None:
        return e
    what = f'{describe(learn.pred)} and the targets {describe(learn.yb)}'
    hint = loss_hint(learn.loss_func, learn.pred, learn.yb, e)
    add_note(e, f'{name_of(learn.loss_func)} got {what}{hint}')
    return e


def _explain_backward(learn: Learner, e: Exception) -> Exception:
    loss = learn.loss_grad
    if not isinstance(loss, Tensor) or not isinstance(e, RuntimeError):
        return e
    if loss.numel() != 1:
        return LossError(
            f'The loss has shape {tuple(loss.shape)}; one number is needed to learn '
            "from. Use reduction='mean', or return loss.mean()."
        )
    # after a compiled pass the loss is detached, and the parameters have their gradients
    if not loss.requires_grad and all(p.grad is None for p in learn.opt.parameters()):
        return LossError(
            'The loss does not depend on any parameter that requires a gradient. Is the model '
            'frozen, or was the loss detached, computed under no_grad, or turned into a number and '
            'back?'
        )
    hint = precision_hint(learn.yb, learn.model)
    hint = hint or loss_hint(learn.loss_func, learn.pred, learn.yb, e)
    if hint:
        add_note(e, f'The targets are {describe(learn.yb)}{hint}')
    return e


def _explain_no_loss(learn: Learner) -> Exception:
    if learn.loss_func is None:
        return LossError(
            f'No loss function: {type(learn.model).__name__} returned {describe(learn.pred)}, '
            'without a loss. Pass `loss_func=`, for example '
            'torch.nn.functional.cross_entropy.'
        )
    return BatchError(
        f'The training batch {describe(learn.batch)} has no targets, so there is no loss to '
        'learn from. Pass (input, target) batches, or set `self.learn.yb` in before_batch.'
    )


def _make_tuple_error(learn: Learner, name: str, entry: str) -> BatchError:
    return BatchError(
        f'`{name}` is {describe(getattr(learn, name))}, not a tuple: write '
        f'`self.learn.{name} = ({entry},)`.'
    )
