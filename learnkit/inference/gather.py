# SPDX-License-Identifier: Apache-2.0
"""Gather the predictions of all batches and ranks in memory, or pass the predictions of each batch to a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fastcore.imports import noop
from torch import Tensor
from typing_extensions import override

from learnkit.comm.ranks import SINGLE_RANK, Comm
from learnkit.core.batch import (
    are_sample_lists,
    batch_counter,
    children_of,
    concat,
    count_samples,
    describe,
    detuplify,
    is_sample_list,
    map_tensors,
    microbatches,
    rebuild,
)
from learnkit.core.denominator import IGNORED, denominator_of
from learnkit.core.errors import BatchError, LossError
from learnkit.core.files import as_local_path
from learnkit.data.shard import unshard
from learnkit.engine.callback import Callback
from learnkit.engine.counters import sample_count
from learnkit.inference.sinks import save_plain
from learnkit.metrics.merge import gather_on_host, interleave

if TYPE_CHECKING:
    from learnkit.learner import Learner


class BatchCollector(Callback):
    "Base class of callbacks that collect the entries of each batch of a run; runs inside the run are ignored."

    def __init__(
        self,
        with_input: bool = False,  # collect the inputs
        with_loss: bool = False,  # collect the loss of each sample
        with_targs: bool = True,  # collect the targets
        cpu: bool = True,  # move the entries to the CPU
    ) -> None:
        self.with_input = with_input
        self.with_loss = with_loss
        self._lacks_loss = False  # whether a batch had a prediction and no loss
        self.with_targs = with_targs
        self._cpu = cpu
        self._depth: int | None = None  # depth of the collected run

    def _take(self, entries: dict[str, Any]) -> None:
        "Process the entries of a batch: `n`, `preds`, and what is asked for."

    def _is_collected_run(self) -> bool:
        return bool(self._depth == self.learn.run.depth and not self.learn.training)

    def before_validate(self) -> None:
        depth = self.learn.run.depth
        if self._depth is None or depth < self._depth:
            self._depth = depth  # an earlier run at a larger depth has ended

    def before_batch(self) -> None:
        if self.with_input and self._is_collected_run():
            self._input = self._detach(self.learn.xb)

    def after_batch(self) -> None:
        learn = self.learn
        if not self._is_collected_run() or 'pred' not in learn.__dict__:
            return
        if self.with_loss and 'loss_grad' not in learn.__dict__:
            self._lacks_loss = learn.loss is None
            return
        n = sample_count(learn)
        entries = {'n': n, 'preds': self._detach(learn.pred)}
        if self.with_input:
            entries['inputs'] = self._input
        if self.with_targs:
            entries['targs'] = self._detach(learn.yb)
        if self.with_loss:
            n = n or count_samples(learn)  # raises `BatchError` for an unknown number
            entries['losses'] = self._detach(compute_sample_losses(learn, n))
        self._take(entries)

    def _detach(self, b: Any) -> Any:
        return self.learn.to_detach(b, self._cpu)

    def on_run_failed(self) -> None:
        if self._is_collected_run():
            self._depth = None

    def cleanup(self) -> None:
        self._depth = None


class GatherPredsCallback(BatchCollector):
    """Gather predictions and targets, and optionally inputs and losses, on the CPU.

    Batches are concatenated at the end.
    `save_preds` and `save_targs` receive one file per batch, named by its number, which `torch.load` reads with
    `weights_only=True`. With several ranks, each rank predicts on its shard, and then gathers the results of all ranks
    in the order of the data.

    >>> from learnkit.testing import synth_learner
    >>> gathered, learn = GatherPredsCallback(), synth_learner(n_valid=2)
    >>> with learn.added_cbs(gathered), learn.no_bar(): _ = learn.validate()
    >>> preds, targets = gathered.all_tensors()
    >>> preds.shape, targets.shape
    (torch.Size([32, 1]), torch.Size([32, 1]))
    """

    def __init__(
        self,
        with_input: bool = False,  # also gather the inputs
        with_loss: bool = False,  # also gather the loss of each sample
        save_preds: str | Path | None = None,  # folder for one file of predictions per batch
        save_targs: str | Path | None = None,  # folder for one file of (first) targets per batch
        with_preds: bool = True,  # gather the predictions
        with_targs: bool = True,  # gather the targets
        concat_dim: int = 0,  # dimension along which batches are concatenated
        pickle_protocol: int = 2,  # ignored (for fastai's code): only protocol 2 is safe to load
    ) -> None:
        collects_targs = with_targs or save_targs is not None
        super().__init__(with_input, with_loss, collects_targs)
        self.with_preds = with_preds
        self.gathers_targs = with_targs
        self.save_preds = None if save_preds is None else as_local_path(save_preds)
        self.save_targs = None if save_targs is None else as_local_path(save_targs)
        self.concat_dim = concat_dim
        self._world = SINGLE_RANK  # ranks that share the loader
        self._start()

    def _start(self) -> None:
        self.inputs: Any = []
        self.preds: Any = []
        self.targets: Any = []
        self.losses: Any = []
        self._sizes: list[int] = []  # number of samples of each batch
        self._is_joined = False

    @override
    def before_validate(self) -> None:
        super().before_validate()
        if not self._is_collected_run():
            return
        self._start()
        self._world = _get_sharing_ranks(self.learn.world, self.learn.dl)
        for folder in (self.save_preds, self.save_targs):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)

    @override
    def _take(self, entries: dict[str, Any]) -> None:
        self._sizes.append(entries['n'])
        preds = entries['preds']
        targs = entries.get('targs', ())
        if self.with_loss:
            self.losses.append(entries['losses'])
        if self.with_input:
            self.inputs.append(entries['inputs'])
        if self.with_preds:
            self.preds.append(map_tensors(preds, _release_storage))
        if self.gathers_targs:
            self.targets.append(targs)
        if self._world.has_copied_data:
            return
        # batches go to the ranks in turn
        number = str(self.learn.iter * self._world.data_size + self._world.data_rank)
        if self.save_preds is not None:
            save_plain(preds, self.save_preds / number)
        if self.save_targs is not None and targs:
            save_plain(targs[0], self.save_targs / number)

    def after_validate(self) -> None:
        if self._is_collected_run():
            self._join()

    def _join(self) -> None:
        if self._is_joined:
            return
        self._is_joined = True
        if self._world.size > 1:
            self._gather_ranks()
        if not self._sizes:
            return
        join = partial(concat, dim=self.concat_dim, sizes=self._sizes)
        if self.with_input:
            self.inputs = detuplify(_join_entries(self.inputs, join))
        if self.with_preds:
            # a list of samples may have a single element, which must stay in its list
            are_lists = are_sample_lists(self.preds, self._sizes)
            preds = join(self.preds)
            self.preds = preds if are_lists else detuplify(preds)
        if self.gathers_targs:
            self.targets = detuplify(_join_entries(self.targets, join))
        if self.with_loss:
            self.losses = concat(self.losses)

    def _gather_ranks(self) -> None:
        "Gather the batches of all ranks, in the order of the data."
        own = self.inputs, self.preds, self.targets, self.losses, self._sizes
        batches = zip(*gather_on_host(self._world, own, 'predictions'), strict=True)
        self.inputs, self.preds, self.targets, self.losses, self._sizes = map(interleave, batches)

    def all_tensors(self) -> list[Any]:
        """Return the gathered values: [inputs,] predictions, targets[, losses].

        Raises `BatchError` if no batch was predicted on, and `LossError` if no batch had a requested loss.
        """
        self._join()  # the batches of an interrupted run are not concatenated yet
        if not self._sizes:
            if self._lacks_loss:
                raise LossError(
                    'with_loss=True: the model has no loss in evaluation. Leave the option out.'
                )
            raise BatchError(
                'There is nothing to return: not one batch was predicted on. Does a callback '
                'cancel them all?'
            )
        res = [
            self.preds if self.with_preds else None,
            self.targets if self.gathers_targs else None,
        ]
        if self.with_input:
            res.insert(0, self.inputs)
        if self.with_loss:
            res.append(self.losses)
        return res


def _join_entries(items: list[Any], join: Callable[[list[Any]], Any]) -> Any:
    "Concatenate tuples of inputs or targets entry by entry; an entry is never a sample."
    if len({len(o) for o in items}) > 1:
        return join(items)  # raises
    return tuple(join(list(group)) for group in zip(*items, strict=True))


class Replicated(list[Any]):
    "List of batches that is not sharded: every rank predicts on all batches."


def shard_loader(learn: Learner, dl: Any) -> tuple[Any, Comm]:
    "Return this rank's shard of a loader, without duplicate samples, and the ranks that share the loader."
    world = learn.world
    processes = learn.parts.processes
    if isinstance(dl, Replicated) or not processes.shards_loaders:
        return dl, SINGLE_RANK
    from learnkit.distributed.shards import shard

    rank_dl = shard(
        unshard(dl),
        world.data_rank,
        world.data_size,
        processes.batch_size,
        count=batch_counter(learn),
    )
    return rank_dl, _get_sharing_ranks(world, rank_dl)


def _get_sharing_ranks(world: Comm, dl: Any) -> Comm:
    "Return the ranks that share a loader; `SINGLE_RANK` if the loader is not sharded."
    return world if hasattr(dl, 'share') else SINGLE_RANK


def _release_storage(t: Tensor) -> Tensor:
    "Copy a small view of a large tensor (such as the last of many tokens), so that the large storage is freed."
    return t.clone() if 2 * t.nbytes < t.untyped_storage().nbytes() else t


class PredictionSink(BatchCollector):
    "Pass the entries of each batch of a run (predictions, targets, ...) to `give` after the batch."

    def __init__(
        self,
        give: Callable[..., Any] = noop,  # f(*entries), called for each batch
        with_input: bool = False,  # include the inputs
        with_decoded: bool = False,  # include decoded predictions
        with_loss: bool = False,  # include the loss of each sample
        with_targs: bool = True,  # include the targets
        act: Callable[[Any], Any] = noop,  # activation of predictions
        decode: Callable[[Any], Any] = noop,  # decoder of activated predictions
        cpu: bool = True,  # move the entries to the CPU
    ) -> None:
        super().__init__(with_input, with_loss, with_targs, cpu)
        self.give = give
        self._act = act
        self._decode = decode
        included = {
            'inputs': with_input,
            'preds': True,
            'targs': with_targs,
            'decoded': with_decoded,
            'losses': with_loss,
        }
        self.names = tuple(name for name, is_included in included.items() if is_included)

    @override
    def _take(self, entries: dict[str, Any]) -> None:
        is_list = is_sample_list(entries['preds'], entries['n'])
        parts = {k: detuplify(v) if k in ('inputs', 'targs') else v for k, v in entries.items()}
        parts['preds'] = self._act(entries['preds'] if is_list else detuplify(entries['preds']))
        if 'decoded' in self.names:
            parts['decoded'] = self._decode(parts['preds'])
        self.give(*[parts[name] for name in self.names])


def reorder_samples(
    o: Any,  # predictions, inputs, targets or losses of a whole loader
    order: Tensor,  # index of each sample, of shape [samples]
) -> Any:
    """Reorder the samples of tensors and of lists with one entry per sample.

    Raises `BatchError` for an object with another number of entries.

    >>> reorder_samples({'x': torch.tensor([5., 6.]), 'name': ['a', 'b']}, torch.tensor([1, 0]))
    {'x': tensor([6., 5.]), 'name': ['b', 'a']}
    """
    n = len(order)
    if isinstance(o, Tensor) and o.ndim and len(o) == n:
        return o[order]
    if is_sample_list(o, n):
        return [o[i] for i in order.tolist()]
    children = children_of(o)
    if children is not None and any(c is not None for c in children):
        return rebuild(o, [reorder_samples(c, order) for c in children])
    if o is None or children is not None:
        return o
    raise BatchError(
        f'{describe(o)} is not one entry for each of {n} samples, and cannot be put into their order. '
        'Pass `reorder=False`, for the order of the loader.'
    )


def compute_sample_losses(learn: Learner, n: int) -> Tensor:
    """Average the unreduced loss of a batch over the targets of each sample that count.

    `learn.weight_func(xb, yb)` counts them for each sample, if it is a function. Otherwise, targets of the loss
    function's `ignore_index` do not count.
    """
    loss = learn.loss
    weights = None
    if callable(learn.weight_func) and loss.numel() > n:
        samples = microbatches(learn.xb, learn.yb, 1, n)
        weights = torch.tensor([float(learn.weight_func(xb, yb)) for xb, yb in samples])
    return average_per_sample(loss, n, learn.yb, find_ignore_index(learn.loss_func), weights)


def find_ignore_index(loss_func: Any) -> int:
    "Return the `ignore_index` of a loss function, or torch's default."
    owners: tuple[Any, ...] = (
        loss_func,
        getattr(loss_func, 'func', None),
        denominator_of(loss_func),
    )
    found = [o.ignore_index for o in owners if hasattr(o, 'ignore_index')]
    return int(found[0]) if found else IGNORED


def average_per_sample(
    loss: Tensor,  # unreduced loss of a batch
    bs: int,  # number of samples
    yb: tuple[Any, ...] = (),  # targets
    ignore_index: int = IGNORED,  # target whose loss of 0 does not count, like the loss 0 of NaN
    weights: Tensor | None = None,  # denominator of each sample; None: the targets that count
) -> Tensor:
    """Average an unreduced loss over all dimensions but the samples, and return it with shape [samples].

    >>> average_per_sample(torch.tensor([[1., 3.], [5., 0.]]), 2, (torch.tensor([[2, 0], [1, -100]]),))
    tensor([2., 5.])
    """
    n_targets = [t.shape[0] for t in yb if isinstance(t, Tensor) and t.ndim]
    if loss.numel() in (bs, *n_targets[:1]):
        return loss  # in its own shape, as in fastai
    has_rows = loss.ndim > 0 and loss.shape[0] == bs
    is_flattened = not yb or bs in n_targets  # the elements of each sample are contiguous
    if loss.numel() % bs or not (has_rows or is_flattened):
        raise LossError(
            f'The loss of {bs} samples came as {tuple(loss.shape)}, not one for each sample: with_loss '
            'needs a `loss_func` that takes `reduction`.'
        )
    rows = loss.reshape(bs, -1)
    if weights is None:
        weights = _find_counted(loss, yb, ignore_index).reshape(bs, -1).sum(1).clamp_min(1)
    return rows.sum(1) / weights.to(rows)


def _find_counted(loss: Tensor, yb: tuple[Any, ...], ignore_index: int) -> Tensor:
    "Return False for each entry of a loss that is 0 because its target is `ignore_index` or NaN."
    targ = yb[0] if yb else None
    if not isinstance(targ, Tensor) or targ.numel() != loss.numel():
        return torch.ones_like(loss, dtype=torch.bool)
    targ = targ.reshape(loss.shape)
    is_left_out = targ.isnan() if targ.is_floating_point() else targ.long() == ignore_index
    return ~(is_left_out & (loss == 0))
