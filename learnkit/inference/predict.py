"""Predictions: run a loader through the model and gather what comes out."""
from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from fastcore.basics import noop
from fastcore.foundation import L
from torch import Tensor
from torch.utils.data import default_collate

from learnkit.core.batch import children_of, describe, detuplify, is_sample_list, map_tensors
from learnkit.core.errors import (
    BatchError,
    CancelEpochException,
    CancelFitException,
    LoaderError,
    OptionError,
)
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.data.dataloaders import DataLoaders, check_loader, evaluation_loaders, in_order
from learnkit.data.shard import Shard
from learnkit.data.tensors import is_rows
from learnkit.engine.callback import Callback
from learnkit.engine.checks import check_function
from learnkit.engine.dispatch import as_callback, listed
from learnkit.engine.run import preserved_state
from learnkit.inference.gather import (
    AsyncToCPU,
    GatherPredsCallback,
    PredictionSink,
    Replicated,
    dealt,
    reordered,
)
from learnkit.inference.sinks import check_sink, opened_sink
from learnkit.inference.stream import PredictionStream, Streaming

__all__ = ['GatherPredsCallback', 'Predictions']


class Predictions(Streaming):
    "The part of the Learner that validates and predicts outside training."
    validation_context: Callable[..., ExitStack]
    loss_not_reduced: Callable[[], Any]

    def validate(
        self,
        ds_idx: int | None = None,   # 0: training, 1: first validation loader; None: all validation
        dl: Any = None,              # a loader to use instead, or its name in `dls`
        cbs: Any = None,             # further callbacks for this run
    ) -> L | None:
        """Compute loss and metrics, and return them as a list: `[valid_loss, *metrics]` of each loader.

        Counters, history, RNGs and the modes of the modules are afterwards as they were. A callback may call it from
        any of its events, and is itself not called in the evaluation that it starts.

        Raises `LoaderError` when there is no such loader, and `EmptyLoaderError` when it has no batch.

        >>> from learnkit import mae
        >>> from learnkit.testing import synth_learner
        >>> with synth_learner(metrics=mae).no_bar() as learn: valid_loss, error = learn.validate()
        >>> 0 <= error <= valid_loss ** 0.5
        True
        """
        source = self._source_of(ds_idx, dl)
        if dl is not None: loaders: Any = [('valid', dealt(self, self._given(dl))[0])]
        elif ds_idx is None: loaders = None
        else:
            dl = self._loader(ds_idx)
            loaders = [('train' if ds_idx == 0 else 'valid', dealt(self, dl)[0])]
        if loaders is None and not evaluation_loaders(self.dls): self._loader(1)  # raises
        outer = self.__dict__.get('final_record')  # of the run in which a callback starts this one
        self.final_record: L | None = None
        try:
            with self.lock, preserved_state(self), self.validation_context(cbs=cbs, inner=True), self.strategy.run(self, 'evaluation'):
                self.loader_name = source
                self._in_fit_and_epoch(partial(self.do_evaluation, loaders))
            return self.final_record
        finally:
            if self.run.kind:
                self.final_record = outer

    def get_preds(
        self,
        ds_idx: int = 1,                     # which loader to predict on: 0 training, 1 validation
        dl: Any = None,                      # a loader to use instead, or its name in `dls`
        with_input: bool = False,            # return the inputs, first
        with_decoded: bool = False,          # return decoded predictions, by `loss_func.decodes`
        with_loss: bool = False,             # return the loss of each sample, last
        act: Callable[[Any], Any] | None = None,  # on predictions; None: `loss_func.activation`
        inner: bool = False,                 # leave out the events of fit and epoch: for use inside a callback
        reorder: bool = True,                # in data-set order, nothing dropped, where the loader can be rebuilt
        cbs: Any = None,                     # further callbacks for this run
        sink: Any = None,                    # where batches go as they come, instead of memory: see below
        **kwargs: Any,                       # more for `GatherPredsCallback`
    ) -> Any:
        """Return predictions and targets of a loader on the CPU, joined along the first dimension.

        Where several processes train together, all of them call it: each predicts its share, and each gets everything
        (its own alone, with loaders that were `sharded_already`).

        What was asked for comes in the order: inputs, predictions, targets, decoded predictions, losses. Several inputs
        or targets come as a list or tuple of tensors; targets are None where the loader has none. A shuffling loader's
        samples come in the data set's order, each once, and so do those that a weighted or partial loader of fastai
        chooses, each as often as chosen. A torch sampler that chooses (WeightedRandomSampler) is followed in the order
        of its draws, as are a list, an iterable data set, and a batch sampler of one's own.

        With a `sink` memory stays constant and the sink itself is returned. It is a folder, which gets a file a batch
        (`000000.pt`, a dict for `torch.load`); the path of a `.npy` file or an array (`numpy.memmap`), which get the
        predictions alone; or a function, called with the entries of each batch. Until they are complete, the folder and
        the file are called `<name>.part`: what an interrupted run wrote is there, and is written over by the next.
        Nothing else is: a file, or a folder that is not empty, is refused. Several processes write files of one folder,
        numbered in the order of the data; of a `.npy` file each writes its own, which
        `learnkit.inference.sinks.read_rows` joins.

        Raises `LoaderError` when there is no such loader, `EmptyLoaderError` when it has no batch, and `OptionError`
        for a sink that cannot take what was asked for.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(n_valid=2)
        >>> with learn.no_bar(): preds, targets = learn.get_preds()
        >>> preds.shape, targets.shape
        (torch.Size([32, 1]), torch.Size([32, 1]))
        """
        check_function('act', act)
        # made here, so that what one of them draws stays drawn
        new_cbs = [as_callback(cb) for cb in listed(cbs)]
        options = {'with_input': with_input, 'with_loss': with_loss, **kwargs}
        source = self._source_of(ds_idx, dl)
        run = partial(self._predict_run, inner=inner, with_loss=with_loss, source=source)
        if sink is not None:
            if others := [name for name in kwargs if name != 'with_targs']:
                raise OptionError(f'A sink goes without {", ".join(others)}.')
            asked = PredictionSink(self, noop, with_decoded=with_decoded, act=act, arriving=AsyncToCPU(), **options)
            dl, _ = self._planned(ds_idx, dl, reorder, sort=True)
            dl, world = dealt(self, dl)
            check_sink(sink, asked.names, world)
            with opened_sink(sink, asked.names, world, lambda: asked.iter) as asked.give:
                run(dl, [*new_cbs, asked.callback()])
                world.run_on_all(asked.finish)
            return sink

        dl, order = self._planned(ds_idx, dl, reorder)
        dl, _ = dealt(self, dl)
        cb = GatherPredsCallback(**options)
        run(dl, [*new_cbs, cb])
        res = cb.all_tensors()
        at = 1 if with_input else 0
        if res[at] is not None:
            res[at] = (act or getattr(self.loss_func, 'activation', noop))(res[at])
            if with_decoded: res.insert(at + 2, getattr(self.loss_func, 'decodes', noop)(res[at]))
        return tuple(res) if order is None else tuple(reordered(o, order) for o in res)

    def _predict_run(
        self, dl: Any, cbs: list[Any], inner: bool, with_loss: bool, source: str | None
    ) -> None:
        with ExitStack() as contexts:
            for context in (self.lock, preserved_state(self), self.validation_context(cbs=L(cbs), inner=True),
                            self.loss_not_reduced() if with_loss else nullcontext(), self.strategy.run(self, 'evaluation')):
                contexts.enter_context(context)
            self.phase, self.dl_name, self.loader_name = 'predict', 'valid', source
            body = partial(self._do_predictions, dl)
            if inner: body()
            else: self._in_fit_and_epoch(body)

    def predict_iter(
        self,
        dl: Any = None,                      # a loader, or its name in `dls`
        ds_idx: int = 1,                     # which loader when `dl` is None: 0 training, 1 validation
        with_input: bool = False,            # yield the inputs, first
        with_decoded: bool = False,          # yield decoded predictions, by `loss_func.decodes`
        with_loss: bool = False,             # yield the loss of each sample, last
        act: Callable[[Any], Any] | None = None,  # on predictions; None: `loss_func.activation`
        inner: bool = False,                 # leave out the events of fit and epoch: for use inside a callback
        cpu: bool = True,                    # bring them to the CPU; False: leave them where the model is
        cbs: Any = None,                     # further callbacks for this run
    ) -> PredictionStream:
        """Predict batch by batch, each when it is asked for, in the loader's order: an iterator over their entries.

        Each batch is what `get_preds` would return for it, and the events are the same. Between two batches the
        Learner is as it was before (modes, RNGs, weights, loop state), and no memory grows. Leaving the loop
        early ends the run as a `CancelValidException` would. A stream does not outlast what it runs in: when
        its Learner goes on to a fit, a validation or other predictions, is copied, or has callbacks taken out,
        it is ended first, and asking it for more raises `FitError`. Of several processes each gets its share.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(default_cbs=False)
        >>> [tuple(preds.shape) for preds, targs in learn.predict_iter()]
        [(16, 1), (16, 1)]
        """
        check_function('act', act)
        source = self._source_of(ds_idx, dl)
        (dl, _), new_cbs = dealt(self, self._chosen(ds_idx, dl)), [as_callback(cb) for cb in listed(cbs)]
        batch: list[tuple[Any, ...]] = []
        taken = PredictionSink(self, lambda *entries: batch.append(entries), with_input=with_input, with_decoded=with_decoded,
                      with_loss=with_loss, act=act, cpu=cpu)
        run = lambda watch: self._predicting(dl, [watch, *new_cbs, taken.callback()], inner, source)
        return PredictionStream(self, run, batch, self.loss_not_reduced if with_loss else nullcontext)

    def predict(
        self,
        item: Any,                    # the input of one sample as a data set gives it; a tuple of several inputs
        rm_type_tfms: Any = None,     # for data of fastai: how many type transforms to leave out
        with_input: bool = False,     # return the input too, first
    ) -> tuple[Any, ...]:  # (input,) prediction decoded by `loss_func.decodes`, and activated
        """Predict on one sample.

        What `dls.decode_batch` makes of the prediction comes first, where the data can do that (fastai's); otherwise
        its name in `dls.vocab`, or without one the prediction as `loss_func.decodes` gives it.

        >>> from learnkit.testing import synth_learner
        >>> decoded, same, pred = synth_learner(default_cbs=False).predict(torch.ones(1))
        >>> pred.shape
        torch.Size([1])
        """
        if callable(getattr(self.dls, 'test_dl', None)): return self._predict_typed(item, rm_type_tfms, with_input)
        try: batch = default_collate([item])
        except TypeError as e: raise BatchError(f'predict({describe(item)}): {e}. Give what the data set does.') from e
        dl = Replicated([tuple(batch) if isinstance(item, (tuple, list)) else
                         batch if isinstance(item, Mapping) else (batch,)])
        inputs, preds, _, decoded = self.get_preds(dl=dl, with_input=True, with_decoded=True, cbs=_all_inputs())
        dec, pred = _first(decoded), _first(preds)
        res = _class_name(dec, getattr(self.dls, 'vocab', None)), dec, pred
        return (_first(inputs), *res) if with_input else res

    def _predict_typed(self, item: Any, rm_type_tfms: Any, with_input: bool) -> tuple[Any, ...]:
        "Predict where the data makes its own test loader and decodes its batches."
        dls, n = self.dls, getattr(self.dls, 'n_inp', -1)
        dl = dls.test_dl([item], rm_type_tfms=rm_type_tfms, num_workers=0)
        if self.world.size > 1: dl = Replicated(dl)
        inputs, preds, _, decoded = self.get_preds(dl=dl, with_input=True, with_decoded=True)
        sample = dls.decode_batch((*((inputs,) if n == 1 else _as_tuple(inputs)), *_as_tuple(decoded)))[0]
        res = detuplify(sample[n:]), _first(decoded), _first(preds)
        return (detuplify(sample[:n]), *res) if with_input else res

    def tta(
        self,
        ds_idx: int = 1,               # which loader to predict on: 0 training, 1 validation
        dl: Any = None,                # a loader to use instead, or its name in `dls`
        n: int = 4,                    # how often to predict on augmented samples
        item_tfms: Any = None,         # for data of fastai: other transforms of each item
        batch_tfms: Any = None,        # for data of fastai: other transforms of each batch
        beta: float | None = 0.25,     # share of the plain predictions; None: both, augmented first
        use_max: bool = False,         # take the largest prediction instead of the mean
        augment: Callable[..., Any] | None = None,  # f(*xb) -> augmented inputs, for any loader
    ) -> tuple[Any, Any]:  # predictions, targets
        """Predict on augmented samples too (test time augmentation) and average: `lerp(augmented, plain, beta)`.

        fastai's data brings its training transforms; for any other loader `augment` makes the inputs of a batch anew,
        as a torchvision transform does. Each of the `n` times draws other random numbers, and the RNGs are afterwards
        as they were. Several outputs are averaged each.

        Raises `OptionError` when there is nothing that could augment, or `n` is not positive.

        >>> from learnkit.testing import synth_learner
        >>> preds, targs = synth_learner(default_cbs=False).tta(augment=lambda x: x + 0.1 * torch.randn_like(x))
        >>> preds.shape
        torch.Size([32, 1])
        """
        if not isinstance(n, int) or n < 1: raise OptionError(f'tta(n={n!r}): n is a whole number from 1 up.')
        check_function('augment', augment)
        dl = in_order(self._chosen(ds_idx, dl))
        if item_tfms is not None or batch_tfms is not None: dl = _with_transforms(dl, item_tfms, batch_tfms)
        split = getattr(getattr(dl, 'dataset', None), 'set_split_idx', None)
        if split is None and augment is None:
            raise OptionError('tta: these data have no augmentation of their own. Give one: `tta(augment=f)`, where '
                              'f(x) returns the inputs of a batch augmented.')
        with self.lock, preserved_rng():
            plain, targs = self._augmented_preds(dl, split and partial(split, 1), None)
            aug: Any = None
            for _ in range(n):
                preds, same = self._augmented_preds(dl, split and partial(split, 0), augment)
                if describe(same) != describe(targs) or not _equal(same, targs):
                    raise LoaderError('tta: this loader gives other samples each time. Pass `dl=` one that does not '
                                      'shuffle.')
                if describe(preds) != describe(plain) or not _can_be_averaged(plain, preds):
                    raise BatchError(f'tta: predictions {describe(preds)} are no tensors of one shape, which could be '
                                     'averaged. Predict with `get_preds`, and combine them by a function of your own.')
                aug = preds if aug is None else _joined(torch.maximum if use_max else torch.add, aug, preds)
        if use_max: return _joined(torch.maximum, plain, aug), targs
        aug = map_tensors(aug, lambda t: t / n)
        return ((aug, plain) if beta is None else _joined(lambda a, b: torch.lerp(a, b.to(a), beta), aug, plain)), targs

    def _augmented_preds(self, dl: Any, split: Any, augment: Callable[..., Any] | None) -> tuple[Any, Any]:
        "Predict once, and let the random generators go on with other numbers."
        with split() if split else nullcontext():
            res: tuple[Any, Any] = self.get_preds(dl=dl, cbs=_augmented(augment) if augment else None)
        _draw_anew()
        return res

    def _planned(self, ds_idx: int, dl: Any, reorder: bool, sort: bool = False) -> tuple[Any, Tensor | None]:
        "Return the loader to predict on, and the order in which its samples belong where that is another one."
        given, dl = dl is not None, self._chosen(ds_idx, dl)
        if not reorder: return dl, None
        if not callable(getattr(dl, 'get_idxs', None)): return in_order(dl), None
        with preserved_rng():  # what chooses samples draws here
            # a given loader is asked itself: a new one would not know its weights
            if not given or dl.drop_last: dl = dl.new(shuffle=False, drop_last=False)
            idxs = list(_drawn_idxs(dl))
            if not all(isinstance(i, (int, np.integer)) for i in idxs): return dl, None
            idxs = self.world.broadcast([int(i) for i in idxs])
            ordered = dl.new(get_idxs=_Always(sorted(idxs) if sort else idxs))
        return ordered, None if sort else torch.tensor(idxs).argsort(stable=True)

    def _chosen(self, ds_idx: int, dl: Any) -> Any:
        "Return the loader that is meant; all of it, where processes have a part each."
        dl = self._loader(ds_idx) if dl is None else self._given(dl)
        return dl.whole if isinstance(dl, Shard) else dl

    def _source_of(self, ds_idx: int | None, dl: Any) -> str | None:
        "Return the name in `dls` of a loader that is asked for, None where it has no name there."
        if not isinstance(self.dls, DataLoaders):
            return None
        named = self.dls._named()
        if isinstance(dl, str):
            return dl
        if dl is not None:
            return next((name for name, loader in named if loader is dl), None)
        return named[ds_idx][0] if isinstance(ds_idx, int) and ds_idx in range(len(named)) else None

    def _given(self, dl: Any) -> Any:
        "Return the loader that was given, by its name in `dls` or as it is."
        if isinstance(dl, str): return self._loader(dl)
        if is_rows(dl):
            few = '`dl=[(x,)]`, with targets `dl=[(x, y)]`, and of many samples ' * isinstance(dl, (Tensor, np.ndarray))
            raise LoaderError(f'dl is {describe(dl)}, no batches: give {few}`dl=TensorLoader(x, bs=64)`.')
        if isinstance(dl, DataLoaders) or (hasattr(dl, 'valid') and hasattr(dl, 'train_ds')):
            raise LoaderError(f'dl is a {type(dl).__name__}, of several loaders: pass its `.train` or its `.valid`.')
        check_loader('dl', dl)
        return dl

    def _loader(self, ds_idx: int | str) -> Any:
        try: return self.dls[ds_idx]
        except TypeError:
            if is_rows(ds_idx): self._given(ds_idx)  # raises
            raise LoaderError(f'ds_idx={ds_idx!r} is no number of a loader: a loader is given as `dl=`.') from None
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


def _drawn_idxs(dl: Any) -> list[Any]:
    "Return the indices that a loader of fastai gives next, its own generator left as it was."
    rng: Any = getattr(dl, 'rng', None)
    state = rng.getstate() if isinstance(rng, random.Random) else None
    try: return list(dl.get_idxs())
    finally:
        if state is not None: rng.setstate(state)


class _Always:
    "A function of no argument that gives one value, and can be sent to worker processes."

    def __init__(self, value: Any) -> None: self.value = value
    def __call__(self) -> Any: return self.value


def _first(o: Any) -> Any:
    "Return the first sample of a batch."
    if is_sample_list(o, 1): return o[0]
    return map_tensors(o, lambda t: t[0] if t.ndim else t)


def _as_tuple(o: Any) -> tuple[Any, ...]: return tuple(o) if isinstance(o, (tuple, list)) else (o,)


def _class_name(decoded: Any, vocab: Any) -> Any:
    "Return the name of a class, or those of the classes that are on; without a vocab what was decoded."
    if vocab is None or not isinstance(decoded, Tensor) or decoded.is_floating_point(): return decoded
    if decoded.dtype == torch.bool: return [vocab[i] for i in decoded.nonzero()[:, 0].tolist()]
    return vocab[int(decoded)] if decoded.ndim == 0 else decoded


def _all_inputs() -> Callback:
    "Make a callback that takes every entry of a batch as input."
    def before_batch(cb: Callback) -> None:
        learn = cb.learn
        if not isinstance(learn.xb[0], Mapping): learn.xb = (*learn.xb, *learn.yb)
        learn.yb = ()
    cb = Callback(before_batch=before_batch)
    cb.order = float('-inf')
    return cb


def _augmented(augment: Callable[..., Any]) -> Callback:
    def before_batch(cb: Callback) -> None:
        xb = cb.learn.xb
        augmented = augment(*xb)
        is_one_list = len(xb) == 1 and isinstance(xb[0], (tuple, list))
        cb.learn.xb = (augmented,) if is_one_list else _as_tuple(augmented)
    return Callback(before_batch=before_batch)


def _joined(f: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Any:
    "Return the structure of two that are alike, each tensor computed from the two in its place."
    others: list[Tensor] = []
    def note(t: Tensor) -> Tensor: others.append(t); return t
    map_tensors(b, note)
    theirs = iter(others)
    return map_tensors(a, lambda t: f(t, next(theirs)))


def _equal(a: Any, b: Any) -> bool:
    "Return True if the tensors of two structures of the same kind are equal."
    if isinstance(a, Tensor): return torch.equal(a, b)
    parts, others = children_of(a), children_of(b)
    if parts is None or others is None: return parts is others
    return len(parts) == len(others) and all(map(_equal, parts, others))


def _can_be_averaged(a: Any, b: Any) -> bool:
    "Return True if two predictions hold tensors of the same shapes, and not lists of dicts (boxes, that is)."
    if isinstance(a, Tensor): return isinstance(b, Tensor) and a.shape == b.shape
    parts, others = children_of(a), children_of(b)
    if parts is None or others is None: return parts is others
    if isinstance(a, list) and any(isinstance(c, Mapping) for c in a): return False
    return len(parts) == len(others) and all(map(_can_be_averaged, parts, others))


def _with_transforms(dl: Any, item_tfms: Any, batch_tfms: Any) -> Any:
    if hasattr(dl, 'after_item'): return dl.new(after_item=item_tfms, after_batch=batch_tfms)
    raise OptionError(f'tta: a {type(dl).__name__} has no item_tfms and batch_tfms. Use `augment=f`, where f(x) '
                      'returns the inputs of a batch augmented.')


def _draw_anew() -> None:
    "Let every global generator go on with other numbers, drawn from torch's."
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(seed)
    random.seed(seed)
    if 'numpy.random' in sys.modules: np.random.seed(seed % 2**32)
