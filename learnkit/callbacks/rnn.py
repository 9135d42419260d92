# SPDX-License-Identifier: Apache-2.0
"""Callbacks for recurrent models: hidden state, several outputs, penalties on activations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from learnkit.core.batch import describe
from learnkit.core.errors import ModelError, OptionError
from learnkit.engine.callback import Callback


class ModelResetter(Callback):
    """Call `model.reset()` before each epoch's training and validation and after the fit.

    A model without `reset` has no state between batches and stays unchanged. No state.

    >>> ModelResetter()
    ModelResetter
    """

    def before_train(self) -> None:
        reset = getattr(self.learn.model, 'reset', None)
        if reset is not None:
            reset()

    before_validate = after_fit = before_train


class RNNCallback(Callback):
    """Split a model's `(output, raw outputs, outputs)`: the loss gets the output, `learn.rnn` the others.

    `raw_out` and `out` are the outputs of the last layer, `[batch, time, hidden]`, before and after
    dropout; each of the three may be a list over layers. The prediction of a model that returns one
    tensor stays unchanged. No state.

    Raises `ModelError` for any other output.

    >>> RNNCallback().name
    'rnn'
    """

    def __init__(self) -> None:
        self.raw_out: Any = None
        self.out: Any = None

    def after_pred(self) -> None:
        pred = self.learn.pred
        if isinstance(pred, Tensor):
            return
        if not isinstance(pred, (tuple, list)) or len(pred) != 3:
            raise ModelError(
                f'RNNCallback: {type(self.learn.model).__name__} returned {describe(pred)}, not (output, raw '
                'outputs, outputs).'
            )
        self.learn.pred, self.raw_out, self.out = (
            o[-1] if isinstance(o, (tuple, list)) else o for o in pred
        )

    def cleanup(self) -> None:
        self.raw_out = self.out = None


class RNNRegularizer(Callback):
    """Add penalties on the activations of a recurrent model to the minimized loss, not to the reported one.

    The penalties are `alpha` times the mean square of the outputs (AR), and `beta` times the mean
    square of the change of the raw outputs between time steps (TAR): Merity, McCann and Socher,
    "Revisiting activation regularization for language RNNs", 2017. Needs `RNNCallback`. No state.

    Raises `OptionError` before training without an `RNNCallback`, and `ModelError` if the model returns
    no activations.

    >>> RNNRegularizer(alpha=2., beta=1.).beta
    1.0
    """

    order = RNNCallback.order + 1
    run_valid = False

    def __init__(
        self,
        alpha: float = 0.0,  # weight of the activations (AR)
        beta: float = 0.0,  # weight of the change of activations over time (TAR)
    ) -> None:
        self.alpha = alpha
        self.beta = beta

    def before_fit(self) -> None:
        has_outputs = any(isinstance(cb, RNNCallback) for cb in self.learn.cbs)
        if (self.alpha or self.beta) and not has_outputs:
            raise OptionError(
                'RNNRegularizer needs RNNCallback: add both, with `cbs=rnn_cbs(alpha, beta)`.'
            )

    def after_loss(self) -> None:
        if not self.alpha and not self.beta:
            return
        rnn = next(cb for cb in self.learn.cbs if isinstance(cb, RNNCallback))
        if rnn.out is None:
            raise ModelError(
                f'RNNRegularizer: {type(self.learn.model).__name__} returned no activations to penalise. '
                'Return (output, raw outputs, outputs).'
            )
        penalty = self.alpha * rnn.out.float().pow(2).mean()
        h = rnn.raw_out
        if self.beta and h.shape[1] > 1:
            penalty = penalty + self.beta * (h[:, 1:] - h[:, :-1]).float().pow(2).mean()
        self.learn.loss_grad = self.learn.loss_grad + penalty


def rnn_cbs(
    alpha: float = 0.0,  # weight of the activations (AR)
    beta: float = 0.0,  # weight of the change of activations over time (TAR)
) -> list[Callback]:
    """Return the callbacks for the training of a recurrent model.

    >>> rnn_cbs(), rnn_cbs(alpha=2., beta=1.)
    ([ModelResetter, RNNCallback], [ModelResetter, RNNCallback, RNNRegularizer(alpha=2.0, beta=1.0)])
    """
    penalties = [RNNRegularizer(alpha, beta)] if alpha or beta else []
    return [ModelResetter(), RNNCallback(), *penalties]
