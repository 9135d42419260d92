"""Predictions: run a loader through the model and gather what comes out."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
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
from learnkit.engine.dispatch import as_callback, as_list
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
from learnkit.inference.stream import PredictionStream, stream_predictions

__all__ = [
    'GatherPredsCallback',
    'get_preds',
    'plan_loader',
    'predict',
    'predict_iter',
    'resolve_loader',
    'tta',
    'validate',
]


def validate(
    learn: Any,
    ds_idx: int | None = None,
    dl: Any = None,
    cbs: Any = None,
) -> L | None:
    "Compute loss and metrics, and return them as a list: `[valid_loss, *metrics]` of each loader."
    source = _find_name(learn, ds_idx, dl)
    loaders: Any = None
    if dl is not None:
        loaders = [('valid', dealt(learn, resolve_loader(learn, dl))[0])]
    elif ds_idx is not None:
        dl = _get_loader(learn, ds_idx)
        loaders = [('train' if ds_idx == 0 else 'valid', dealt(learn, dl)[0])]
    elif not evaluation_loaders(learn.dls):
        _get_loader(learn, 1)  # raises
    outer = learn.__dict__.get('final_record')  # of the run in which a callback starts this one
    learn.final_record = None
    try:
        with (
            learn.lock,
            preserved_state(learn),
            learn.validation_context(cbs=cbs, inner=True),
            learn.strategy.run(learn, 'evaluation'),
        ):
            learn.loader_name = source
            _run_in_fit_and_epoch(learn, partial(learn.do_evaluation, loaders))
        record: L | None = learn.final_record
        return record
    finally:
        if learn.run.kind:
            learn.final_record = outer


def get_preds(
    learn: Any,
    ds_idx: int = 1,
    dl: Any = None,
    with_input: bool = False,
    with_decoded: bool = False,
    with_loss: bool = False,
    act: Callable[[Any], Any] | None = None,
    inner: bool = False,
    reorder: bool = True,
    cbs: Any = None,
    sink: Any = None,
    **kwargs: Any,
) -> Any:
    "Return predictions and targets of a loader on the CPU, joined along the first dimension."
    check_function('act', act)
    # made here, so that what one of them draws stays drawn
    new_cbs = [as_callback(cb) for cb in as_list(cbs)]
    options = {'with_input': with_input, 'with_loss': with_loss, **kwargs}
    source = _find_name(learn, ds_idx, dl)
    run = partial(_run_predictions, learn, inner=inner, with_loss=with_loss, source=source)
    if sink is not None:
        if others := [name for name in kwargs if name != 'with_targs']:
            raise OptionError(f'A sink goes without {", ".join(others)}.')
        asked = PredictionSink(
            learn, noop, with_decoded=with_decoded, act=act, arriving=AsyncToCPU(), **options
        )
        dl, _ = plan_loader(learn, ds_idx, dl, reorder, sort=True)
        dl, world = dealt(learn, dl)
        check_sink(sink, asked.names, world)
        with opened_sink(sink, asked.names, world, lambda: asked.iter) as asked.give:
            run(dl, [*new_cbs, asked.callback()])
            world.run_on_all(asked.finish)
        return sink

    dl, order = plan_loader(learn, ds_idx, dl, reorder)
    dl, _ = dealt(learn, dl)
    cb = GatherPredsCallback(**options)
    run(dl, [*new_cbs, cb])
    res = cb.all_tensors()
    at = 1 if with_input else 0
    if res[at] is not None:
        res[at] = (act or getattr(learn.loss_func, 'activation', noop))(res[at])
        if with_decoded:
            res.insert(at + 2, getattr(learn.loss_func, 'decodes', noop)(res[at]))
    return tuple(res) if order is None else tuple(reordered(o, order) for o in res)


def _run_predictions(
    learn: Any, dl: Any, cbs: list[Any], inner: bool, with_loss: bool, source: str | None
) -> None:
    "Predict on a loader, with the callbacks `cbs` taking the predictions."
    loss_context = learn.loss_not_reduced() if with_loss else nullcontext()
    with (
        learn.lock,
        preserved_state(learn),
        learn.validation_context(cbs=L(cbs), inner=True),
        loss_context,
        learn.strategy.run(learn, 'evaluation'),
    ):
        learn.phase, learn.dl_name, learn.loader_name = 'predict', 'valid', source
        body = partial(_do_predictions, learn, dl)
        if inner:
            body()
        else:
            _run_in_fit_and_epoch(learn, body)


def predict_iter(
    learn: Any,
    dl: Any = None,
    ds_idx: int = 1,
    with_input: bool = False,
    with_decoded: bool = False,
    with_loss: bool = False,
    act: Callable[[Any], Any] | None = None,
    inner: bool = False,
    cpu: bool = True,
    cbs: Any = None,
) -> PredictionStream:
    "Predict batch by batch, each when it is asked for, in the loader's order: an iterator over their entries."
    check_function('act', act)
    source = _find_name(learn, ds_idx, dl)
    dl, _ = dealt(learn, _choose_loader(learn, ds_idx, dl))
    new_cbs = [as_callback(cb) for cb in as_list(cbs)]
    batch: list[tuple[Any, ...]] = []
    taken = PredictionSink(
        learn,
        lambda *entries: batch.append(entries),
        with_input=with_input,
        with_decoded=with_decoded,
        with_loss=with_loss,
        act=act,
        cpu=cpu,
    )

    def run(watch: Callback) -> Iterator[None]:
        return stream_predictions(learn, dl, [watch, *new_cbs, taken.callback()], inner, source)

    return PredictionStream(learn, run, batch, learn.loss_not_reduced if with_loss else nullcontext)


def predict(
    learn: Any,
    item: Any,
    rm_type_tfms: Any = None,
    with_input: bool = False,
) -> tuple[Any, ...]:
    "Predict on one sample."
    if callable(getattr(learn.dls, 'test_dl', None)):
        return _predict_typed(learn, item, rm_type_tfms, with_input)
    try:
        batch = default_collate([item])
    except TypeError as e:
        raise BatchError(f'predict({describe(item)}): {e}. Give what the data set does.') from e
    if isinstance(item, (tuple, list)):
        batch = tuple(batch)
    elif not isinstance(item, Mapping):
        batch = (batch,)
    inputs, preds, _, decoded = learn.get_preds(
        dl=Replicated([batch]), with_input=True, with_decoded=True, cbs=_all_inputs()
    )
    dec, pred = _first(decoded), _first(preds)
    res = _class_name(dec, getattr(learn.dls, 'vocab', None)), dec, pred
    return (_first(inputs), *res) if with_input else res


def _predict_typed(learn: Any, item: Any, rm_type_tfms: Any, with_input: bool) -> tuple[Any, ...]:
    "Predict where the data makes its own test loader and decodes its batches."
    dls, n = learn.dls, getattr(learn.dls, 'n_inp', -1)
    dl = dls.test_dl([item], rm_type_tfms=rm_type_tfms, num_workers=0)
    if learn.world.size > 1:
        dl = Replicated(dl)
    inputs, preds, _, decoded = learn.get_preds(dl=dl, with_input=True, with_decoded=True)
    xb = (inputs,) if n == 1 else _as_tuple(inputs)
    sample = dls.decode_batch((*xb, *_as_tuple(decoded)))[0]
    res = detuplify(sample[n:]), _first(decoded), _first(preds)
    return (detuplify(sample[:n]), *res) if with_input else res


def tta(
    learn: Any,
    ds_idx: int = 1,
    dl: Any = None,
    n: int = 4,
    item_tfms: Any = None,
    batch_tfms: Any = None,
    beta: float | None = 0.25,
    use_max: bool = False,
    augment: Callable[..., Any] | None = None,
) -> tuple[Any, Any]:
    "Predict on augmented samples too (test time augmentation) and average: `lerp(augmented, plain, beta)`."
    if not isinstance(n, int) or n < 1:
        raise OptionError(f'tta(n={n!r}): n is a whole number from 1 up.')
    check_function('augment', augment)
    dl = in_order(_choose_loader(learn, ds_idx, dl))
    if item_tfms is not None or batch_tfms is not None:
        dl = _with_transforms(dl, item_tfms, batch_tfms)
    split = getattr(getattr(dl, 'dataset', None), 'set_split_idx', None)
    if split is None and augment is None:
        raise OptionError(
            'tta: these data have no augmentation of their own. Give one: `tta(augment=f)`, where '
            'f(x) returns the inputs of a batch augmented.'
        )
    combine = torch.maximum if use_max else torch.add
    with learn.lock, preserved_rng():
        plain, targs = _predict_augmented(learn, dl, split and partial(split, 1), None)
        aug: Any = None
        for _ in range(n):
            preds, same = _predict_augmented(learn, dl, split and partial(split, 0), augment)
            if describe(same) != describe(targs) or not _equal(same, targs):
                raise LoaderError(
                    'tta: this loader gives other samples each time. Pass `dl=` one that does not '
                    'shuffle.'
                )
            if describe(preds) != describe(plain) or not _can_be_averaged(plain, preds):
                raise BatchError(
                    f'tta: predictions {describe(preds)} are no tensors of one shape, which could be '
                    'averaged. Predict with `get_preds`, and combine them by a function of your own.'
                )
            aug = preds if aug is None else _joined(combine, aug, preds)
    if use_max:
        return _joined(torch.maximum, plain, aug), targs
    aug = map_tensors(aug, lambda t: t / n)
    if beta is None:
        return (aug, plain), targs
    return _joined(lambda a, b: torch.lerp(a, b.to(a), beta), aug, plain), targs


def _predict_augmented(
    learn: Any, dl: Any, split: Any, augment: Callable[..., Any] | None
) -> tuple[Any, Any]:
    "Predict once, and let the random generators go on with other numbers."
    with split() if split else nullcontext():
        res: tuple[Any, Any] = learn.get_preds(dl=dl, cbs=_augmented(augment) if augment else None)
    _draw_anew()
    return res


def plan_loader(
    learn: Any, ds_idx: int, dl: Any, reorder: bool, sort: bool = False
) -> tuple[Any, Tensor | None]:
    "Return the loader to predict on, and the order in which its samples belong where that is another one."
    given, dl = dl is not None, _choose_loader(learn, ds_idx, dl)
    if not reorder:
        return dl, None
    if not callable(getattr(dl, 'get_idxs', None)):
        return in_order(dl), None
    with preserved_rng():  # what chooses samples draws here
        # a given loader is asked itself: a new one would not know its weights
        if not given or dl.drop_last:
            dl = dl.new(shuffle=False, drop_last=False)
        idxs = list(_drawn_idxs(dl))
        if not all(isinstance(i, (int, np.integer)) for i in idxs):
            return dl, None
        idxs = learn.world.broadcast([int(i) for i in idxs])
        ordered = dl.new(get_idxs=_Always(sorted(idxs) if sort else idxs))
    return ordered, None if sort else torch.tensor(idxs).argsort(stable=True)


def _choose_loader(learn: Any, ds_idx: int, dl: Any) -> Any:
    "Return the loader that is meant; all of it, where processes have a part each."
    dl = _get_loader(learn, ds_idx) if dl is None else resolve_loader(learn, dl)
    return dl.whole if isinstance(dl, Shard) else dl


def _find_name(learn: Any, ds_idx: int | None, dl: Any) -> str | None:
    "Return the name in `dls` of a loader that is asked for, None where it has no name there."
    if not isinstance(learn.dls, DataLoaders):
        return None
    named = learn.dls._named()
    if isinstance(dl, str):
        return dl
    if dl is not None:
        return next((name for name, loader in named if loader is dl), None)
    return named[ds_idx][0] if isinstance(ds_idx, int) and ds_idx in range(len(named)) else None


def resolve_loader(learn: Any, dl: Any) -> Any:
    "Return the loader that was given, by its name in `dls` or as it is."
    if isinstance(dl, str):
        return _get_loader(learn, dl)
    if is_rows(dl):
        few = ''
        if isinstance(dl, (Tensor, np.ndarray)):
            few = '`dl=[(x,)]`, with targets `dl=[(x, y)]`, and of many samples '
        raise LoaderError(
            f'dl is {describe(dl)}, no batches: give {few}`dl=TensorLoader(x, bs=64)`.'
        )
    if isinstance(dl, DataLoaders) or (hasattr(dl, 'valid') and hasattr(dl, 'train_ds')):
        raise LoaderError(
            f'dl is a {type(dl).__name__}, of several loaders: pass its `.train` or its `.valid`.'
        )
    check_loader('dl', dl)
    return dl


def _get_loader(learn: Any, ds_idx: int | str) -> Any:
    "Return a loader of `dls` by its number or name; raise `LoaderError` where there is none."
    try:
        return learn.dls[ds_idx]
    except TypeError:
        if is_rows(ds_idx):
            resolve_loader(learn, ds_idx)  # raises
        raise LoaderError(
            f'ds_idx={ds_idx!r} is no number of a loader: a loader is given as `dl=`.'
        ) from None
    except (IndexError, KeyError):
        what = 'validation loader' if ds_idx == 1 else f'loader {ds_idx!r}'
        raise LoaderError(
            f'There is no {what}: give one to `DataLoaders(train, valid)`, or pass `dl=`.'
        ) from None


def _do_predictions(learn: Any, dl: Any) -> None:
    "Predict on a loader, between the events around it."
    learn('before_predict')
    with preserved_generators(dl):
        learn._do_epoch_validate(dl=dl)
    learn('after_predict')


def _run_in_fit_and_epoch(learn: Any, body: Callable[[], Any]) -> None:
    "Run something in the same wrappers as training."
    epoch = partial(learn._with_events, body, 'epoch', CancelEpochException)
    learn._with_events(epoch, 'fit', CancelFitException)


def _drawn_idxs(dl: Any) -> list[Any]:
    "Return the indices that a loader of fastai gives next, its own generator left as it was."
    rng: Any = getattr(dl, 'rng', None)
    state = rng.getstate() if isinstance(rng, random.Random) else None
    try:
        return list(dl.get_idxs())
    finally:
        if state is not None:
            rng.setstate(state)


class _Always:
    "A function of no argument that gives one value, and can be sent to worker processes."

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


def _first(o: Any) -> Any:
    "Return the first sample of a batch."
    if is_sample_list(o, 1):
        return o[0]
    return map_tensors(o, lambda t: t[0] if t.ndim else t)


def _as_tuple(o: Any) -> tuple[Any, ...]:
    return tuple(o) if isinstance(o, (tuple, list)) else (o,)


def _class_name(decoded: Any, vocab: Any) -> Any:
    "Return the name of a class, or those of the classes that are on; without a vocab what was decoded."
    if vocab is None or not isinstance(decoded, Tensor) or decoded.is_floating_point():
        return decoded
    if decoded.dtype == torch.bool:
        return [vocab[i] for i in decoded.nonzero()[:, 0].tolist()]
    return vocab[int(decoded)] if decoded.ndim == 0 else decoded


def _all_inputs() -> Callback:
    "Make a callback that takes every entry of a batch as input."

    def before_batch(cb: Callback) -> None:
        learn = cb.learn
        if not isinstance(learn.xb[0], Mapping):
            learn.xb = (*learn.xb, *learn.yb)
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

    def note(t: Tensor) -> Tensor:
        others.append(t)
        return t

    map_tensors(b, note)
    theirs = iter(others)
    return map_tensors(a, lambda t: f(t, next(theirs)))


def _equal(a: Any, b: Any) -> bool:
    "Return True if the tensors of two structures of the same kind are equal."
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    parts, others = children_of(a), children_of(b)
    if parts is None or others is None:
        return parts is others
    return len(parts) == len(others) and all(map(_equal, parts, others))


def _can_be_averaged(a: Any, b: Any) -> bool:
    "Return True if two predictions hold tensors of the same shapes, and not lists of dicts (boxes, that is)."
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape
    parts, others = children_of(a), children_of(b)
    if parts is None or others is None:
        return parts is others
    if isinstance(a, list) and any(isinstance(c, Mapping) for c in a):
        return False
    return len(parts) == len(others) and all(map(_can_be_averaged, parts, others))


def _with_transforms(dl: Any, item_tfms: Any, batch_tfms: Any) -> Any:
    if hasattr(dl, 'after_item'):
        return dl.new(after_item=item_tfms, after_batch=batch_tfms)
    raise OptionError(
        f'tta: a {type(dl).__name__} has no item_tfms and batch_tfms. Use `augment=f`, where f(x) '
        'returns the inputs of a batch augmented.'
    )


def _draw_anew() -> None:
    "Let every global generator go on with other numbers, drawn from torch's."
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(seed)
    random.seed(seed)
    if 'numpy.random' in sys.modules:
        np.random.seed(seed % 2**32)
