"""Callbacks around predictions: fetch them during a fit, collect what goes through, predict with dropout on."""

from __future__ import annotations

from typing import Any

import torch
from fastcore.foundation import L
from torch import Tensor, nn

from learnkit.callbacks.training import is_count
from learnkit.core.errors import OptionError
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import as_list

__all__ = ['FetchPredsCallback', 'CollectDataCallback', 'MCDropoutCallback', 'mc_dropout_preds']

_PASSED_ON = {'ds_idx', 'dl', 'act', 'inner', 'reorder', 'cbs'}  # to `get_preds`


class FetchPredsCallback(Callback):
    """Predict after each validation, inside the fit: `preds` has what `get_preds` returned.

    With several validation loaders it predicts once, when all are through: in `after_eval` instead of `after_validate`.
    The fit goes on with the very numbers that it has without it. Left out while it predicts are the callbacks with
    `remove_on_fetch`, itself among them, and those in `cbs`. `get_preds` itself does not set it off. Predictions are in
    no checkpoint: after a resume they are there from the next evaluation on.

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
        ds_idx: int = 1,  # which loader to predict on: 0 training, 1 validation
        dl: Any = None,  # a loader to use instead, or its name in `dls`
        with_input: bool = False,  # fetch the inputs too, first
        with_decoded: bool = False,  # fetch decoded predictions too, last
        cbs: Any = None,  # callbacks of the Learner, or classes of them, to leave out too
        reorder: bool = True,  # in data-set order, where the loader can be rebuilt
    ) -> None:
        self.ds_idx, self.with_input, self.with_decoded, self.reorder = (
            ds_idx,
            with_input,
            with_decoded,
            reorder,
        )
        self.dl, self.cbs, self.preds = dl, L(as_list(cbs)), None

    def after_validate(self) -> None:
        "Predict, unless predictions are what this is about."
        if self.learn.phase != 'predict' and not self._has_several():
            self._fetch()

    def after_eval(self) -> None:
        if self._has_several():
            self._fetch()

    def _has_several(self) -> bool:
        return len(evaluation_loaders(self.learn.dls)) > 1

    def _fetch(self) -> None:
        learn = self.learn  # gone while this callback is left out itself
        left_out = [cb for cb in learn.cbs if getattr(cb, 'remove_on_fetch', False)]
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
    """Collect inputs, targets, prediction and loss of every batch, on the CPU, in `data`: to look at, in tests for one.

    Each run starts with an empty list, which grows with the data, validation included; batches cancelled before their
    prediction are not in it. It is in no checkpoint: after a resume it has the batches of this process.

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
        "Start an empty list, unless this is a run inside another one."
        if self.learn.run.depth <= 1:
            self.data = L()

    def after_batch(self) -> None:
        "Keep what the batch was and gave."
        learn = self.learn
        if 'pred' in learn.__dict__:
            self.data.append(learn.to_detach((learn.xb, learn.yb, learn.pred, learn.loss)))


class MCDropoutCallback(Callback):
    """Leave dropout on in evaluation (Monte Carlo dropout, Gal & Ghahramani 2016, arXiv:1506.02142).

    Every kind of dropout in torch.nn is meant, that inside recurrent layers and attention too, and modules whose class
    has "dropout" in its name; not a `F.dropout` that a model calls itself. Normalisation stays in evaluation.

    Each evaluation draws other masks: from a seed that a new callback draws from torch's global generator, and then on.
    So `[learn.get_preds(cbs=MCDropoutCallback()) for _ in range(10)]` gives ten different samples, the same after the
    same `torch.manual_seed`, and a fit with this callback trains as it does without. Checkpointed: the generator.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(model=nn.Sequential(nn.Dropout(), nn.Linear(1, 1)), default_cbs=False)
    >>> a, b = [learn.get_preds(cbs=MCDropoutCallback())[0] for _ in range(2)]
    >>> torch.equal(a, b), torch.equal(*[learn.get_preds()[0] for _ in range(2)])
    (False, True)
    """

    def __init__(self) -> None:
        self._seeds = torch.Generator().manual_seed(_drawn(None))
        self._switched: dict[
            int, list[nn.Module]
        ] = {}  # what is on, by the depth of the run that evaluates

    def before_validate(self) -> None:
        "Switch dropout on, and draw from a seed of its own: the loop puts the generators back after the evaluation."
        torch.manual_seed(_drawn(self._seeds))
        switched = [m for m in self.learn.model.modules() if not m.training and _drops(m)]
        for m in switched:
            m.training = True  # of this module alone, not of what is in it
        self._switched[self.learn.run.depth] = switched

    def after_validate(self) -> None:
        self._switch_off(self.learn.run.depth)

    def after_cancel_epoch(self) -> None:
        self._switch_off(self.learn.run.depth)

    def after_cancel_fit(self) -> None:
        self._switch_off(self.learn.run.depth)

    def on_run_failed(self) -> None:
        self._switch_off(self.learn.run.depth)

    def cleanup(self) -> None:
        for depth in list(self._switched):
            self._switch_off(depth)

    def _switch_off(self, depth: int) -> None:
        for m in self._switched.pop(depth, []):
            if not self.learn.model.training:
                m.training = False  # otherwise the modes have been put back already

    def state_dict(self) -> dict[str, Any]:
        "Return the state of the generator that seeds each evaluation."
        return {'seeds': self._seeds.get_state()}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on with those seeds."
        self._seeds.set_state(sd['seeds'].cpu())


def _drawn(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _drops(m: nn.Module) -> bool:
    "Tell whether a module drops something in training mode."
    if isinstance(m, nn.modules.dropout._DropoutNd) or 'dropout' in type(m).__name__.lower():
        return True
    if isinstance(m, nn.TransformerEncoderLayer):
        return True  # in evaluation its fused code leaves its dropout out
    return isinstance(m, (nn.RNNBase, nn.MultiheadAttention)) and m.dropout > 0


def mc_dropout_preds(
    learn: Any,  # a Learner
    n: int = 10,  # how often to predict
    **kwargs: Any,  # `ds_idx`, `dl`, `act`, `inner`, `reorder` and `cbs`, as for `get_preds`
) -> tuple[Tensor, Tensor, Any]:  # mean and standard deviation (of a sample: n - 1), and targets
    """Predict `n` times with dropout on; return mean and standard deviation over the times, and the targets.

    Memory is that of three predictions, whatever `n` (Welford 1962).

    Raises `OptionError` for an `n` below 2, for other options, and for a model whose predictions are no tensor.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(model=nn.Sequential(nn.Dropout(), nn.Linear(1, 1)), default_cbs=False)
    >>> mean, std, targs = mc_dropout_preds(learn, n=5)
    >>> mean.shape == std.shape == targs.shape
    True
    """
    if not is_count(n, 2):
        raise OptionError(f'mc_dropout_preds(n={n!r}): n is a whole number from 2 up.')
    if others := sorted(kwargs.keys() - _PASSED_ON):
        raise OptionError(
            f'mc_dropout_preds takes {", ".join(sorted(_PASSED_ON))}, not {", ".join(others)}: it has '
            'predictions and targets alone. For the rest: `learn.get_preds`.'
        )
    cbs = [*as_list(kwargs.pop('cbs', None)), MCDropoutCallback()]
    mean, squares, targs = torch.zeros(()), torch.zeros(()), None
    for i in range(1, n + 1):
        preds, targs = learn.get_preds(cbs=cbs, **kwargs)
        if not isinstance(preds, Tensor):
            raise OptionError('mc_dropout_preds: the model gives more than one tensor.')
        gap = preds - mean
        mean = mean + gap / i
        squares = squares + gap * (preds - mean)
    return mean, (squares / (n - 1)).sqrt(), targs
