# SPDX-License-Identifier: Apache-2.0
"""Prediction and test-time augmentation on a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from fastcore.foundation import L
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from learnkit.core.activation import find_activation, find_decoder
from learnkit.core.batch import (
    are_equal,
    describe,
    detuplify,
    form_of,
    is_sample_list,
    map_tensors,
    tensors_in,
)
from learnkit.core.errors import (
    BatchError,
    EmptyLoaderError,
    LoaderError,
    OptionError,
)
from learnkit.core.interrupts import deferred_interrupts
from learnkit.core.random import (
    capture_rng,
    draw_seed,
    preserved_generators,
    preserved_rng,
    restore_rng,
    seed_all,
)
from learnkit.core.validation import check_count, warn_user
from learnkit.data.dataloaders import evaluation_loaders, make_unshuffled
from learnkit.engine.callback import Callback
from learnkit.engine.checks import check_function
from learnkit.engine.dispatch import as_callback, as_list
from learnkit.inference.gather import (
    GatherPredsCallback,
    PredictionSink,
    Replicated,
    reorder_samples,
    shard_loader,
)
from learnkit.inference.loaders import (
    choose_loader,
    find_loader_name,
    plan_loader,
)
from learnkit.inference.sinks import check_sink, open_sink
from learnkit.inference.validate import open_evaluation, run_in_fit_and_epoch

if TYPE_CHECKING:
    from learnkit.learner import Learner

_END = object()  # marks the end of a loader, as the default of `next`


def get_preds(
    learn: Learner,
    *,
    ds_idx: int,
    dl: Any,
    with_input: bool,
    with_decoded: bool,
    with_loss: bool,
    act: Callable[[Any], Any] | None,
    inner: bool,
    reorder: bool,
    cbs: Any,
    sink: Any,
    **kwargs: Any,
) -> Any:
    "Return predictions and targets of a loader on the CPU, concatenated along the first dimension."
    check_function('act', act)
    # random generators are captured after this, so that random numbers drawn by a constructor stay drawn
    new_cbs = [as_callback(cb) for cb in as_list(cbs)]
    options = {'with_input': with_input, 'with_loss': with_loss, **kwargs}
    loader_name = find_loader_name(learn, ds_idx, dl)
    run = partial(
        _run_predictions, learn, inner=inner, with_loss=with_loss, loader_name=loader_name
    )
    if sink is not None:
        others = [name for name in kwargs if name != 'with_targs']
        if others:
            raise OptionError(f'A sink goes without {", ".join(others)}.')
        entries = PredictionSink(
            with_decoded=with_decoded,
            act=act or find_activation(learn.loss_func),
            decode=find_decoder(learn.loss_func),
            **options,
        )
        dl, _ = plan_loader(learn, ds_idx, dl, reorder, sort=True)
        _write_predictions(learn, entries, sink, dl, run, new_cbs)
        return sink

    dl, order = plan_loader(learn, ds_idx, dl, reorder)
    dl, _ = shard_loader(learn, dl)
    cb = GatherPredsCallback(**options)
    run(dl, [*new_cbs, cb])
    res = cb.all_tensors()
    i = 1 if with_input else 0  # index of the predictions
    if res[i] is not None:
        activate = act or partial(_apply_to_samples, find_activation(learn.loss_func))
        res[i] = activate(res[i])
        if with_decoded:
            res.insert(i + 2, _apply_to_samples(find_decoder(learn.loss_func), res[i]))
    return tuple(res if order is None else (reorder_samples(o, order) for o in res))


def _write_predictions(
    learn: Learner,
    entries: PredictionSink,
    sink: Any,  # folder, path, array or function
    dl: Any,  # loader, before it is sharded
    run: Callable[[Any, list[Any]], None],  # f(loader, callbacks), which predicts on the loader
    cbs: list[Any],
) -> None:
    "Predict on a loader, and write the entries of each batch to a sink."
    dl, world = shard_loader(learn, dl)
    check_sink(sink, entries.names, world)
    with open_sink(sink, entries.names, world, lambda: learn.iter) as entries.give:
        run(dl, [*cbs, entries])


def _apply_to_samples(
    f: Callable[[Any], Any],  # function of a batch
    preds: Any,  # predictions; a list of samples if their shapes differ
) -> Any:
    "Apply a function of a batch to predictions, or to each sample of a list of tensors."
    if not isinstance(preds, list) or not all(isinstance(t, Tensor) for t in preds):
        return f(preds)
    return [f(t[None])[0] for t in preds]


def _run_predictions(
    learn: Learner,
    dl: Any,
    cbs: list[Any],
    inner: bool,
    with_loss: bool,
    loader_name: str | None,
) -> None:
    "Predict on a loader; the callbacks `cbs` receive the predictions."
    loss_context = learn.loss_not_reduced() if with_loss else nullcontext()
    with (
        deferred_interrupts() as deferred,
        loss_context,
        open_evaluation(learn, 'prediction', L(cbs)),
        deferred.paused(),
    ):
        learn.phase = 'predict'
        learn.dl_name = 'valid'
        learn.loader_name = loader_name
        body = partial(_do_predictions, learn, dl)
        if inner:
            body()
        else:
            run_in_fit_and_epoch(learn, body)


def predict_iter(
    learn: Learner,
    *,
    dl: Any,
    ds_idx: int,
    with_input: bool,
    with_decoded: bool,
    with_loss: bool,
    act: Callable[[Any], Any] | None,
    inner: bool,
    cpu: bool,
    cbs: Any,
) -> Iterator[tuple[Any, ...]]:
    "Return an iterator over the predictions of each batch, computed on demand in the loader's order."
    check_function('act', act)
    loader_name = find_loader_name(learn, ds_idx, dl)
    dl, _ = shard_loader(learn, choose_loader(learn, ds_idx, dl))
    entries = PredictionSink(
        with_input=with_input,
        with_decoded=with_decoded,
        with_loss=with_loss,
        act=act or find_activation(learn.loss_func),
        decode=find_decoder(learn.loss_func),
        cpu=cpu,
    )
    new_cbs = [as_callback(cb) for cb in as_list(cbs)]

    def run(batch: Any) -> None:
        _run_predictions(learn, [batch], [*new_cbs, entries], inner, with_loss, loader_name)

    return _predict_batches(dl, entries, run)


def _predict_batches(
    dl: Any,
    entries: PredictionSink,
    run: Callable[[Any], None],  # f(batch), which predicts and passes the result to `entries`
) -> Iterator[tuple[Any, ...]]:
    "Predict on each batch in a separate run; code between two batches keeps its random numbers."
    batches = state = None
    with preserved_generators(dl):
        for i in count():
            predicted: list[tuple[Any, ...]] = []
            entries.give = lambda *values, predicted=predicted: predicted.append(values)
            with preserved_rng():
                if state is not None:
                    restore_rng(state)
                batches = iter(dl) if batches is None else batches
                batch = next(batches, _END)
                if batch is _END:
                    break
                run(batch)
                seed_all(draw_seed())  # or else all batches would draw the same numbers
                state = capture_rng()
            share = getattr(dl, 'share', lambda i: None)(i)
            if share is None or share[0]:  # other batches are fillers of this rank
                yield from predicted
    if not i:
        raise EmptyLoaderError(f'The loader ({type(dl).__name__}) returned no batch to predict on.')


def predict(
    learn: Learner,
    *,
    item: Any,
    rm_type_tfms: Any,
    with_input: bool,
) -> tuple[Any, ...]:
    "Predict on one sample."
    if callable(getattr(learn.dls, 'test_dl', None)):
        return _predict_typed(learn, item, rm_type_tfms, with_input)
    batch = _collate_item(learn, item)
    inputs, preds, _, decoded = learn.get_preds(
        dl=Replicated([batch]), with_input=True, with_decoded=True, cbs=_make_input_callback()
    )
    sample_decoded = _take_first(decoded)
    label = _find_class_name(sample_decoded, getattr(learn.dls, 'vocab', None))
    res = label, sample_decoded, _take_first(preds)
    return (_take_first(inputs), *res) if with_input else res


def _collate_item(learn: Learner, item: Any) -> Any:
    "Return a batch of one item, by the collate function of the loader that validates, or else trains."
    loaders = [('train', learn.dls.train), *evaluation_loaders(learn.dls)]
    name, dl = loaders[min(1, len(loaders) - 1)]
    collate: Any = getattr(dl, 'collate_fn', None)
    is_own = collate not in (None, default_collate) and dl.batch_sampler is not None
    try:
        if is_own:
            with preserved_rng():
                batch = collate([_complete_sample(item, dl.dataset)])
            return form_of(learn.dls, name).split(batch, predicting=True)[0]
        batch = default_collate([item])
    except Exception as e:
        raise BatchError(f'predict({describe(item)}): {e}. Pass what the data set returns.') from e
    if isinstance(item, (tuple, list)):
        return tuple(batch)
    return batch if isinstance(item, Mapping) else (batch,)


def _complete_sample(item: Any, dataset: Any) -> Any:
    "Add the targets of the data set's first sample to the inputs of an item, if samples are tuples."
    if isinstance(item, Mapping) or isinstance(dataset, IterableDataset):
        return item
    inputs = item if isinstance(item, tuple) else (item,)
    sample = dataset[0]
    return (*inputs, *sample[len(inputs) :]) if isinstance(sample, (tuple, list)) else item


def _predict_typed(
    learn: Learner, item: Any, rm_type_tfms: Any, with_input: bool
) -> tuple[Any, ...]:
    "Predict on one sample with `dls` that create test loaders and decode batches (fastai)."
    dls = learn.dls
    n = getattr(dls, 'n_inp', -1)
    dl = dls.test_dl([item], rm_type_tfms=rm_type_tfms, num_workers=0)
    if learn.world.size > 1:
        dl = Replicated(dl)
    inputs, preds, _, decoded = learn.get_preds(dl=dl, with_input=True, with_decoded=True)
    xb = (inputs,) if n == 1 else _as_tuple(inputs)
    sample = dls.decode_batch((*xb, *_as_tuple(decoded)))[0]
    res = detuplify(sample[n:]), _take_first(decoded), _take_first(preds)
    return (detuplify(sample[:n]), *res) if with_input else res


def tta(
    learn: Learner,
    *,
    ds_idx: int,
    dl: Any,
    n: int,
    item_tfms: Any,
    batch_tfms: Any,
    beta: float | None,
    use_max: bool,
    augment: Callable[..., Any] | None,
    undo: Callable[[Any], Any] | None,
) -> tuple[Any, Any]:
    "Predict with test-time augmentation: `lerp(augmented, plain, beta)`."
    check_count('n', n)
    check_function('augment', augment)
    check_function('undo', undo)
    dl = make_unshuffled(choose_loader(learn, ds_idx, dl))
    if item_tfms is not None or batch_tfms is not None:
        dl = _replace_transforms(dl, item_tfms, batch_tfms)
    set_split = getattr(getattr(dl, 'dataset', None), 'set_split_idx', None)
    if set_split is None and augment is None:
        raise OptionError(
            'tta: the data has no augmentation. Pass one: `tta(augment=f)`, where '
            'f(x) returns the inputs of a batch augmented.'
        )
    combine = torch.maximum if use_max else torch.add
    with learn.run.lock, preserved_rng():
        open_valid_split = set_split and partial(set_split, 1)
        open_train_split = set_split and partial(set_split, 0)  # with training transforms
        plain, targs = _predict_augmented(learn, dl, open_valid_split, None)
        if isinstance(plain, list) and isinstance(plain[0], Mapping):
            raise BatchError(f'tta: {describe(plain)}, one dict a sample, has no average.')
        augmented: Any = None
        augmenter = Augmenter(augment, undo)
        for _ in range(n):
            preds, new_targs = _predict_augmented(learn, dl, open_train_split, augmenter)
            if not are_equal(new_targs, targs, others=True):
                raise LoaderError(
                    'tta: this loader returns different samples each time. Pass `dl=` one that does not shuffle.'
                )
            _check_shapes(plain, preds)
            augmented = preds if augmented is None else _combine_tensors(combine, augmented, preds)
    if use_max:
        return _combine_tensors(torch.maximum, plain, augmented), targs
    augmented = map_tensors(augmented, lambda t: t / n)
    if beta is None:
        return (augmented, plain), targs
    return _combine_tensors(lambda a, b: torch.lerp(a, b.to(a), beta), augmented, plain), targs


def _predict_augmented(
    learn: Learner, dl: Any, open_split: Any, cbs: Callback | None
) -> tuple[Any, Any]:
    "Predict once, and reseed the random generators, so that the next call draws different numbers."
    with open_split() if open_split else nullcontext():
        res: tuple[Any, Any] = learn.get_preds(dl=dl, cbs=cbs)
    seed_all(draw_seed())
    return res


def _do_predictions(learn: Learner, dl: Any) -> None:
    "Predict on a loader between `before_predict` and `after_predict`."
    learn.dl = dl
    learn('before_predict')
    with learn.parts.evaluations.preserved(dl):
        learn._do_epoch_validate(dl=dl)
    learn('after_predict')


def _take_first(o: Any) -> Any:
    "Return the first sample of a batch."
    if is_sample_list(o, 1):
        return o[0]
    return map_tensors(o, lambda t: t[0] if t.ndim else t)


def _as_tuple(o: Any) -> tuple[Any, ...]:
    return tuple(o) if isinstance(o, (tuple, list)) else (o,)


def _find_class_name(decoded: Any, vocab: Any) -> Any:
    "Return the name of a class, or the names of all classes that are True; without a vocab, return `decoded`."
    if vocab is None or not isinstance(decoded, Tensor) or decoded.is_floating_point():
        return decoded
    if decoded.dtype == torch.bool:
        return [vocab[i] for i in decoded.nonzero()[:, 0].tolist()]
    return vocab[int(decoded)] if decoded.ndim == 0 else decoded


def _make_input_callback() -> Callback:
    "Return a callback that uses every entry of a batch as input."

    def before_batch(cb: Callback) -> None:
        learn = cb.learn
        if not isinstance(learn.xb[0], Mapping):
            learn.xb = (*learn.xb, *learn.yb)
        learn.yb = ()

    cb = Callback(before_batch=before_batch)
    cb.order = float('-inf')
    return cb


class Augmenter(Callback):
    "Augment the inputs of each batch, and map the predictions back to the original inputs."

    def __init__(
        self,
        augment: Callable[..., Any] | None = None,  # f(*xb) -> augmented inputs
        undo: Callable[[Any], Any] | None = None,  # f(preds) -> predictions of the plain inputs
    ) -> None:
        self.augment = augment
        self.undo = undo
        self._has_checked = False

    def before_batch(self) -> None:
        if self.augment is None:
            return
        xb = self.learn.xb
        augmented = self.augment(*xb)
        is_one_list = len(xb) == 1 and isinstance(xb[0], (tuple, list))
        self.learn.xb = (augmented,) if is_one_list else _as_tuple(augmented)

    def after_batch(self) -> None:
        learn = self.learn
        if 'pred' not in vars(learn):  # another callback cancelled the batch
            return
        if self.undo is not None:
            learn.pred = self.undo(learn.pred)
        elif not self._has_checked:
            self._has_checked = True
            if learn.world.is_first:
                _warn_of_positions(learn.xb, learn.pred)


def _warn_of_positions(xb: tuple[Any, ...], pred: Any) -> None:
    "Warn if predictions have a value for each position of an input, which an augmentation may have moved."
    preds = tensors_in(pred)
    pairs = [(x, p) for x in tensors_in(xb) for p in preds if _has_positions(x, p)]
    if pairs:
        x, p = pairs[0]
        warn_user(
            f'tta: the predictions {describe(p)} have the size of the inputs {describe(x)}. An augmentation that '
            'moves positions, such as a flip, needs `undo=f`, where f(predictions) moves them back. For any other, '
            '`undo=lambda preds: preds` turns off this warning.'
        )


def _has_positions(
    x: Tensor,  # input (samples, channels, height, width), or (samples, time, features)
    pred: Tensor,
) -> bool:
    "Return True if predictions have the height and width of an input, or its time; maps may be smaller."
    if pred.ndim == x.ndim > 3:
        return True
    if (
        x.ndim == 3
    ):  # predictions (samples, classes) may have as many classes as a sample has features
        return pred.ndim == 3 and (pred.shape[:2] == x.shape[:2] or pred.shape[2] == x.shape[2])
    size = x.shape[2:]
    return bool(size) and pred.ndim > len(size) and pred.shape[-len(size) :] == size


def _check_shapes(plain: Any, augmented: Any) -> None:
    "Raise `OptionError` if augmented predictions cannot be averaged with the plain ones."
    shapes = [[tuple(t.shape) for t in tensors_in(preds)] for preds in (plain, augmented)]
    if shapes[0] != shapes[1]:
        raise OptionError(
            f'tta: the predictions are {describe(plain)}, for augmented inputs {describe(augmented)}. Pass '
            '`undo=f`, where f(predictions) returns them in the shape of the plain ones.'
        )


def _combine_tensors(f: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Any:
    "Apply `f` to each pair of corresponding tensors of two nested structures."
    b_iter = iter(tensors_in(b))
    return map_tensors(a, lambda t: f(t, next(b_iter)))


def _replace_transforms(dl: Any, item_tfms: Any, batch_tfms: Any) -> Any:
    "Return a fastai loader with other transforms; raise `OptionError` for other loaders."
    if hasattr(dl, 'after_item'):
        return dl.new(after_item=item_tfms, after_batch=batch_tfms)
    raise OptionError(
        f'tta: a {type(dl).__name__} has no item_tfms and batch_tfms. Use `augment=f`, where f(x) '
        'returns the inputs of a batch augmented.'
    )
