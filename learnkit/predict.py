"""Predictions: run a loader through the model and gather what comes out."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastcore.basics import noop
from fastcore.foundation import L

from learnkit.batch import concat, detuplify, find_bs
from learnkit.callback import Callback
from learnkit.data import check_loader, evaluation_loaders, in_order
from learnkit.errors import BatchError, CancelEpochException, CancelFitException, LoaderError, LossError
from learnkit.loop import Loop
from learnkit.rng import preserved_generators

__all__ = ['GatherPredsCallback', 'Predictions']


class GatherPredsCallback(Callback):
    "Gather predictions and targets, and inputs and losses on request, on the CPU; batches are joined at the end."

    def __init__(
        self,
        with_input: bool = False,              # also gather the inputs
        with_loss: bool = False,               # also gather the loss of each sample
        save_preds: Path | None = None,        # a folder: each batch's predictions are saved there
        save_targs: Path | None = None,        # a folder: each batch's targets are saved there
        with_preds: bool = True,               # gather the predictions
        with_targs: bool = True,               # gather the targets
        concat_dim: int = 0,                   # the dimension along which batches are joined
    ) -> None:
        self.with_input, self.with_loss = with_input, with_loss
        self.with_preds, self.with_targs = with_preds, with_targs
        self.save_preds, self.save_targs, self.concat_dim = save_preds, save_targs, concat_dim
        self._depth: int | None = None  # of the run that is gathered: a prediction inside it gathers for itself
        self._start()

    def _start(self) -> None:
        self.inputs: Any = []
        self.preds: Any = []
        self.targets: Any = []
        self.losses: Any = []
        self.n_batches, self._joined = 0, False

    def _is_other_run(self) -> bool: return bool(self._depth != self.learn._depth)

    def before_validate(self) -> None:
        if self._depth is None: self._depth = self.learn._depth
        if not self._is_other_run(): self._start()

    def before_batch(self) -> None:
        if self.with_input and not self._is_other_run(): self._input = self.learn.to_detach(self.learn.xb)

    def after_batch(self) -> None:
        learn = self.learn
        if self._is_other_run() or 'pred' not in learn.__dict__: return
        if self.with_loss and 'loss_grad' not in learn.__dict__: return
        preds, targs = learn.to_detach(learn.pred), learn.to_detach(learn.yb)
        if self.with_loss: self.losses.append(learn.to_detach(_per_sample(learn.loss, find_bs(learn.yb))))
        if self.with_input: self.inputs.append(self._input)
        if self.with_preds: self.preds.append(preds)
        if self.with_targs: self.targets.append(targs)
        if self.save_preds is not None: torch.save(preds, Path(self.save_preds)/str(learn.iter))
        if self.save_targs is not None: torch.save(targs[0], Path(self.save_targs)/str(learn.iter))
        self.n_batches += 1

    def after_validate(self) -> None:
        if not self._is_other_run(): self._join()

    def _join(self) -> None:
        if self._joined or not self.n_batches: return
        self._joined, join = True, partial(concat, dim=self.concat_dim)
        if self.with_input: self.inputs = detuplify(join(self.inputs))
        if self.with_preds: self.preds = detuplify(join(self.preds))
        if self.with_targs: self.targets = detuplify(join(self.targets))
        if self.with_loss: self.losses = concat(self.losses)

    def all_tensors(self) -> list[Any]:
        """Return what was gathered: inputs if asked for, predictions, targets, losses if asked for.

        Raises `BatchError` when there was no batch."""
        if not self.n_batches: raise BatchError('There is nothing to return: not one batch was predicted on.')
        self._join()  # what was cut short has not been joined
        res = [self.preds if self.with_preds else None, self.targets if self.with_targs else None]
        return [*([self.inputs] if self.with_input else []), *res, *([self.losses] if self.with_loss else [])]


def _per_sample(loss: torch.Tensor, bs: int) -> torch.Tensor:
    if loss.numel() == bs: return loss
    if loss.numel() % bs:
        raise LossError(f'The loss of {bs} samples came as {tuple(loss.shape)}, not one for each sample: with_loss '
                        'needs a `loss_func` that takes `reduction`.')
    return loss.view(bs, -1).mean(1)


class Predictions(Loop):
    "The part of the Learner that validates and predicts outside training."
    validation_context: Callable[..., ExitStack]
    loss_not_reduced: Callable[[], Any]

    def validate(
        self,
        ds_idx: int | None = None,   # 0: the training loader, 1: the first validation loader; None: all of those
        dl: Any = None,              # a loader to use instead, or its name in `dls`
        cbs: Any = None,             # further callbacks for this run
    ) -> L | None:
        """Compute loss and metrics, and return them as a list: `[valid_loss, *metrics]` of each loader.

        Counters, history, RNGs and the modes of the modules are afterwards as they were.

        Raises `LoaderError` when there is no such loader, and `EmptyLoaderError` when it has no batch.
        """
        if dl is not None: loaders: Any = [('valid', self._given(dl))]
        else: loaders = None if ds_idx is None else [('train' if ds_idx == 0 else 'valid', self._loader(ds_idx))]
        if loaders is None and not evaluation_loaders(self.dls): self._loader(1)  # raises
        self.final_record: L | None = None
        with self.lock, self._put_back(), self.validation_context(cbs=cbs, inner=True), self._run('evaluation'):
            self._in_fit_and_epoch(partial(self._do_evaluation, loaders))
        return self.final_record

    def get_preds(
        self,
        ds_idx: int = 1,                     # which loader to predict on: 0 training, 1 validation
        dl: Any = None,                      # a loader to use instead, or its name in `dls`
        with_input: bool = False,            # return the inputs, first
        with_decoded: bool = False,          # return decoded predictions, by `loss_func.decodes`
        with_loss: bool = False,             # return the loss of each sample, last
        act: Callable[[Any], Any] | None = None,  # applied to predictions; None: `loss_func.activation`, if any
        inner: bool = False,                 # leave out the events of fit and epoch: for use inside a callback
        reorder: bool = True,                # in data-set order, nothing dropped, where the loader can be rebuilt
        cbs: Any = None,                     # further callbacks for this run
        **kwargs: Any,                       # more for `GatherPredsCallback`
    ) -> tuple[Any, ...]:
        """Return predictions and targets of a loader on the CPU, joined along the first dimension.

        What was asked for comes in the order: inputs, predictions, targets, decoded predictions, losses. Several inputs
        or targets come as a list or tuple of tensors; targets are None where the loader has none.

        Raises `LoaderError` when there is no such loader, and `EmptyLoaderError` when it has no batch.
        """
        dl = self._loader(ds_idx) if dl is None else self._given(dl)
        dl = in_order(dl) if reorder else dl
        cb = GatherPredsCallback(with_input=with_input, with_loss=with_loss, **kwargs)
        with ExitStack() as contexts:
            for context in (self.lock, self._put_back(), self.validation_context(cbs=L(cbs) + L(cb), inner=True),
                            self.loss_not_reduced() if with_loss else nullcontext(), self._run('evaluation')):
                contexts.enter_context(context)
            self.phase, self.dl_name = 'predict', 'valid'
            body = partial(self._do_predictions, dl)
            if inner: body()
            else: self._in_fit_and_epoch(body)
        res = cb.all_tensors()
        at = 1 if with_input else 0
        if res[at] is not None:
            res[at] = (act or getattr(self.loss_func, 'activation', noop))(res[at])
            if with_decoded: res.insert(at + 2, getattr(self.loss_func, 'decodes', noop)(res[at]))
        return tuple(res)

    def _given(self, dl: Any) -> Any:
        "Return the loader that was given, by its name in `dls` or as it is."
        if isinstance(dl, str): return self._loader(dl)
        check_loader('dl', dl)
        return dl

    def _loader(self, ds_idx: int | str) -> Any:
        try: return self.dls[ds_idx]
        except (IndexError, KeyError):
            what = 'validation loader' if ds_idx == 1 else f'loader {ds_idx!r}'
            raise LoaderError(f'There is no {what}: give one to `DataLoaders(train, valid)`, or pass `dl=`.') from None

    def _do_predictions(self, dl: Any) -> None:
        self('before_predict')
        with preserved_generators(dl): self._do_epoch_validate(dl=dl)
        self('after_predict')

    def _in_fit_and_epoch(self, body: Callable[[], Any]) -> None:
        "Run something in the same wrappers as training."
        epoch = partial(self._with_events, body, 'epoch', CancelEpochException)
        self._with_events(epoch, 'fit', CancelFitException)
