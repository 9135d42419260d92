# SPDX-License-Identifier: Apache-2.0
"""Callbacks for predictions: predict during a fit, collect batches, predict with dropout."""

from __future__ import annotations

from typing import Any

import torch
from fastcore.foundation import L
from torch import nn
from typing_extensions import override

from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import as_list
from learnkit.engine.traits import trait_of


class FetchPredsCallback(Callback):
    """Predict after each validation of a fit, and keep the result of `get_preds` in `preds`.

    With several validation loaders the callback predicts once after all of them: in `after_eval`
    instead of `after_validate`. The results of the
    fit are the same with and without this callback. During the prediction, callbacks with
    `remove_on_fetch` (including this one) and the callbacks in `cbs` are left out. A user's own
    `get_preds` does not trigger it. Checkpointed: nothing; after a resume the predictions are
    available after the next evaluation.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=FetchPredsCallback())
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(1)
    >>> preds, targs = learn.fetch_preds.preds
    >>> preds.shape
    torch.Size([32, 1])
    """

    remove_on_fetch = True

    def __init__(
        self,
        ds_idx: int = 1,  # index of the loader: 0 training, 1 validation
        dl: Any = None,  # loader to use instead, or its name in `dls`
        with_input: bool = False,  # whether to return the inputs too, first
        with_decoded: bool = False,  # whether to return decoded predictions too, last
        cbs: Any = None,  # callbacks of the Learner, or their classes, to leave out too
        reorder: bool = True,  # whether to restore data-set order, if the loader can be rebuilt
    ) -> None:
        self.ds_idx = ds_idx
        self.with_input = with_input
        self.with_decoded = with_decoded
        self.reorder = reorder
        self.dl = dl
        self.cbs = L(as_list(cbs))
        self.preds = None

    def after_validate(self) -> None:
        "Predict, unless this validation is a prediction."
        if self.learn.phase != 'predict' and not self._has_several():
            self._fetch()

    def after_eval(self) -> None:
        if self._has_several():
            self._fetch()

    def _has_several(self) -> bool:
        return len(evaluation_loaders(self.learn.dls)) > 1

    def _fetch(self) -> None:
        learn = self.learn  # `self.learn` is None while this callback is left out
        left_out = [cb for cb in learn.cbs if trait_of(cb, 'remove_on_fetch')]
        with learn.removed_cbs([*left_out, *self.cbs]):
            preds = learn.get_preds(
                ds_idx=self.ds_idx,
                dl=self.dl,
                with_input=self.with_input,
                with_decoded=self.with_decoded,
                inner=True,
                reorder=self.reorder,
            )
        self.preds = preds


class CollectDataCallback(Callback):
    """Collect inputs, targets, prediction and loss of every batch, on the CPU, in `data`, e.g. for tests.

    Each run starts with an empty list, which grows with the data, including validation. Batches
    cancelled before their prediction are left out. Checkpointed: nothing; after a resume the list
    holds the batches of this process.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(n_train=3, n_valid=2, cbs=CollectDataCallback(), default_cbs=False)
    >>> learn.fit(1)
    >>> xb, yb, pred, loss = learn.collect_data.data[0]
    >>> len(learn.collect_data.data), xb[0].shape, loss.shape
    (5, torch.Size([16, 1]), torch.Size([]))
    """

    def __init__(self) -> None:
        self.data = L()

    def before_fit(self) -> None:
        "Clear the list, unless this is a nested run."
        if self.learn.run.depth <= 1:
            self.data = L()

    def after_batch(self) -> None:
        "Append the batch and its results."
        learn = self.learn
        if 'pred' in learn.__dict__:
            self.data.append(learn.to_detach((learn.xb, learn.yb, learn.pred, learn.loss)))


class MCDropoutCallback(Callback):
    """Keep dropout active in evaluation (Monte Carlo dropout, Gal & Ghahramani 2016, arXiv:1506.02142).

    Dropout means every kind in torch.nn, also inside recurrent layers and attention, and modules
    with "dropout" in the name of their class, but not `F.dropout` called by the model itself.
    Normalization layers stay in evaluation mode.

    Each evaluation draws other masks: a new callback draws a seed from torch's global generator,
    and the seed of each evaluation follows from it. So `[learn.get_preds(cbs=MCDropoutCallback())
    for _ in range(10)]` returns ten different samples, reproducible by `torch.manual_seed`, and a fit
    trains the same with and without this callback. Checkpointed: the generator.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(model=nn.Sequential(nn.Dropout(), nn.Linear(1, 1)), default_cbs=False)
    >>> a, b = [learn.get_preds(cbs=MCDropoutCallback())[0] for _ in range(2)]
    >>> torch.equal(a, b), torch.equal(*[learn.get_preds()[0] for _ in range(2)])
    (False, True)
    """

    def __init__(self) -> None:
        self._seeds = torch.Generator().manual_seed(_draw_seed(None))
        self._is_active = False

    def before_validate(self) -> None:
        "Activate dropout, and set a seed; the loop restores the generators after the evaluation."
        torch.manual_seed(_draw_seed(self._seeds))
        self._set_dropout(True)

    def after_validate(self) -> None:
        self._set_dropout(False)

    def cleanup(self) -> None:
        "Deactivate dropout after an evaluation that was interrupted."
        if self._is_active and not self.learn.model.training:
            self._set_dropout(False)

    def _set_dropout(self, mode: bool) -> None:
        self._is_active = mode
        for m in self.learn.model.modules():
            if _has_dropout(m):
                m.training = mode  # not `m.train()`, which would switch its children too

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the state of the generator that seeds each evaluation."
        return {'seeds': self._seeds.get_state()}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the generator of seeds."
        self._seeds.set_state(sd['seeds'].cpu())


def _draw_seed(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _has_dropout(m: nn.Module) -> bool:
    "Return True if a module drops elements in training mode."
    if 'dropout' in type(m).__name__.lower() or isinstance(m, nn.TransformerEncoderLayer):
        return True  # in evaluation mode the fused code of that layer skips its dropout
    return isinstance(m, (nn.RNNBase, nn.MultiheadAttention)) and m.dropout > 0
