"""What is kept of the batches that are predicted on: gathered in memory, of all processes, or handed on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor

from learnkit.core.batch import (
    batch_counter,
    children_of,
    concat,
    count_samples,
    describe,
    detuplify,
    has_listed_samples,
    have_listed_samples,
    is_sample_list,
    map_tensors,
    rebuilt,
)
from learnkit.core.comm import ALONE, Comm
from learnkit.core.errors import BatchError, LossError
from learnkit.data.shard import Shard
from learnkit.engine.callback import Callback
from learnkit.engine.loop import sample_count
from learnkit.inference.sinks import save_plain
from learnkit.metrics.merge import gather_on_host, in_turn

__all__ = [
    'GatherPredsCallback',
    'AsyncToCPU',
    'PredictionSink',
    'Replicated',
    'dealt',
    'per_sample',
    'reordered',
]


class GatherPredsCallback(Callback):
    """Gather predictions and targets, and inputs and losses on request, on the CPU; batches are joined at the end.

    Results leave a GPU one batch late, so that nothing waits for them. `save_preds` and `save_targs` get a file a
    batch, called by its number, which `torch.load` reads with `weights_only=True`. Where several processes train
    together, each predicts its share, and all of them gather everything, in the order of the data.

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
        save_preds: str | Path | None = None,  # a folder: each batch's predictions are saved there
        save_targs: str | Path | None = None,  # folder for each batch's (first) targets
        with_preds: bool = True,  # gather the predictions
        with_targs: bool = True,  # gather the targets
        concat_dim: int = 0,  # the dimension along which batches are joined
    ) -> None:
        self.with_input, self.with_loss = with_input, with_loss
        self.with_preds, self.with_targs = with_preds, with_targs
        self.save_preds, self.save_targs, self.concat_dim = save_preds, save_targs, concat_dim
        self._depth: int | None = (
            None  # of the run that is gathered: a prediction inside it gathers for itself
        )
        self._world = ALONE  # the processes that share the loader
        self._start()

    def _start(self) -> None:
        self.inputs: Any = []
        self.preds: Any = []
        self.targets: Any = []
        self.losses: Any = []
        self._sizes: list[int] = []  # samples of each batch; none where one has no size
        self._listed = False  # a batch has its samples in a list
        self.n_batches, self._joined = 0, False
        self._arriving = AsyncToCPU()

    def _is_ours(self) -> bool:
        return bool(self._depth == self.learn.run.depth and not self.learn.training)

    def before_validate(self) -> None:
        depth = self.learn.run.depth
        if self._depth is None or depth < self._depth:
            self._depth = depth  # one inside this one is over
        if not self._is_ours():
            return
        self._start()
        self._world = _sharing(self.learn)
        for folder in (self.save_preds, self.save_targs):
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)

    def before_batch(self) -> None:
        if self.with_input and self._is_ours():
            self._input = self._detached(self.learn.xb)

    def after_batch(self) -> None:
        learn = self.learn
        if not self._is_ours() or 'pred' not in learn.__dict__:
            return
        if self.with_loss and 'loss_grad' not in learn.__dict__:
            return
        self.n_batches += 1
        inputs = self._input if self.with_input else None
        losses = per_sample(learn.loss, count_samples(learn), learn.yb) if self.with_loss else None
        self._note_size()
        batch = (learn.iter, inputs, self._detached(learn.pred), self._detached(learn.yb), losses)
        for arrived in self._arriving.put(batch):
            self._keep(*arrived)

    def _note_size(self) -> None:
        "Keep the number of samples of the batch at hand, and where they are."
        n = sample_count(self.learn)
        self._sizes.append(n)
        self._listed = self._listed or has_listed_samples((*self.learn.xb, *self.learn.yb), n)

    def _detached(self, b: Any) -> Any:
        "Detach, and leave the way to the CPU to `AsyncToCPU` unless the loader has its own."
        return self.learn.to_detach(b, cpu=hasattr(self.learn.dl, 'to_detach'))

    def _keep(self, i: int, inputs: Any, preds: Any, targs: Any, losses: Any) -> None:
        if self.with_loss:
            self.losses.append(losses)
        if self.with_input:
            self.inputs.append(inputs)
        if self.with_preds:
            self.preds.append(map_tensors(preds, _compact))
        if self.with_targs:
            self.targets.append(targs)
        number = str(_place_of(i, self._world))
        if self.save_preds is not None:
            save_plain(preds, Path(self.save_preds) / number)
        if self.save_targs is not None and targs:
            save_plain(targs[0], Path(self.save_targs) / number)

    def after_validate(self) -> None:
        if self._is_ours():
            self._join()

    def on_run_failed(self) -> None:
        if self._is_ours():
            self._depth = None

    def cleanup(self) -> None:
        self._depth = None

    def _join(self) -> None:
        if self._joined:
            return
        for arrived in self._arriving.rest():
            self._keep(*arrived)
        self._joined = True
        if self._world.size > 1:
            self._take_all()
        if not self.n_batches:
            return
        join = partial(concat, dim=self.concat_dim, sizes=self._sizes, listed=self._listed)
        if self.with_input:
            self.inputs = detuplify(_join_entries(self.inputs, join))
        if self.with_preds:
            # of which there may be one in all
            samples = have_listed_samples(self.preds, self._sizes, self._listed)
            self.preds = join(self.preds) if samples else detuplify(join(self.preds))
        if self.with_targs:
            self.targets = detuplify(_join_entries(self.targets, join))
        if self.with_loss:
            self.losses = concat(self.losses)

    def _take_all(self) -> None:
        "Take in the batches of all processes, in the order of the data."
        mine = (
            self.n_batches,
            self._listed,
            self.inputs,
            self.preds,
            self.targets,
            self.losses,
            self._sizes,
        )
        told = gather_on_host(self._world, mine, 'predictions')
        self.n_batches, self._listed = (
            sum(n for n, *_ in told),
            any(listed for _, listed, *_ in told),
        )
        parts = map(in_turn, list(zip(*told, strict=True))[2:])
        self.inputs, self.preds, self.targets, self.losses, self._sizes = parts

    def all_tensors(self) -> list[Any]:
        """Return what was gathered: inputs if asked for, predictions, targets, losses if asked for.

        Raises `BatchError` when there was no batch."""
        self._join()  # what was cut short has not been joined
        if not self.n_batches:
            raise BatchError(
                'There is nothing to return: not one batch was predicted on. Does a callback '
                'cancel them all?'
            )
        res = [self.preds if self.with_preds else None, self.targets if self.with_targs else None]
        return [
            *([self.inputs] if self.with_input else []),
            *res,
            *([self.losses] if self.with_loss else []),
        ]


def _join_entries(items: list[Any], join: Callable[[list[Any]], Any]) -> Any:
    "Join tuples of inputs or targets entry by entry: as many of them as samples are no samples."
    if len({len(o) for o in items}) > 1:
        return join(items)  # raises
    return tuple(join(list(group)) for group in zip(*items, strict=True))


class Replicated(list[Any]):
    "Batches that every process predicts on, each for itself."


def dealt(learn: Any, dl: Any) -> tuple[Any, Comm]:
    "Return this process's share of a loader, each sample once, and the processes that share it."
    world, team = learn.world, learn.strategy.team
    if world.size == 1 or isinstance(dl, Replicated) or (team and team.sharded_already):
        return dl, ALONE
    from learnkit.distributed.shards import shard

    options: dict[str, Any] = {'count': batch_counter(learn)}
    if team:
        options |= {
            'batch_size': team._given['batch_size'],
            'fillers': team._parts.needs_equal_evaluations,
        }
    own = shard(
        dl.whole if isinstance(dl, Shard) else dl,
        world.rank,
        world.size,
        **{'fillers': False, **options},
    )
    return own, world if hasattr(own, 'share') else ALONE


def _sharing(learn: Any) -> Comm:
    "Return the processes that share the loader which is evaluated: this one alone, where it goes through all of it."
    return learn.world if hasattr(learn.dl, 'share') else ALONE


def _place_of(i: int, world: Comm) -> int:
    "Return the number of a process's batch among those of all: they are dealt out in turn."
    return i * world.size + world.rank


def _compact(t: Tensor) -> Tensor:
    "Return a small part of a large tensor (the last of many tokens) as a tensor of its own, which holds no more."
    return t.clone() if 2 * t.nbytes < t.untyped_storage().nbytes() else t


class AsyncToCPU:
    """Bring results to the CPU. From CUDA they travel while the next batch is computed, and arrive one batch late.

    >>> arriving = AsyncToCPU()
    >>> arriving.put((torch.ones(1), 'text')), arriving.rest()
    ([(tensor([1.]), 'text')], [])
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Any, list[torch.cuda.Event]]] = []

    def put(self, b: Any) -> list[Any]:
        "Send a nested structure, and return those that have arrived."
        devices: set[torch.device] = set()

        def look(t: Tensor) -> Tensor:
            devices.add(t.device)
            return t

        map_tensors(b, look)
        if all(d.type != 'cuda' for d in devices):
            return [*self.rest(), map_tensors(b, Tensor.cpu)]
        # torch puts what it copies like this into pinned memory, on the stream that computes
        sent = map_tensors(b, lambda t: t.to('cpu', non_blocking=True))
        there = [torch.cuda.current_stream(d).record_event() for d in devices if d.type == 'cuda']
        arrived, self._pending = self.rest(), [(sent, there)]
        return arrived

    def rest(self) -> list[Any]:
        "Wait for what is on its way, and return it."
        pending, self._pending = self._pending, []
        for event in (event for _, there in pending for event in there):
            event.synchronize()
        # in ordinary memory: pinned memory is scarce
        return [
            map_tensors(sent, lambda t: t.clone() if t.is_pinned() else t) for sent, _ in pending
        ]


class PredictionSink:
    "The entries of each batch of a run, by name, handed to `give` as soon as the batch is through."

    def __init__(
        self,
        learn: Any,
        give: Callable[..., Any],  # called with the entries of a batch
        with_input: bool = False,
        with_decoded: bool = False,
        with_loss: bool = False,
        with_targs: bool = True,
        act: Callable[[Any], Any] | None = None,  # on predictions; None: `loss_func.activation`
        cpu: bool = True,  # bring the entries to the CPU
        arriving: AsyncToCPU | None = None,  # copies without a wait, a batch late; None: at once
    ) -> None:
        self.learn, self.give, self.cpu, self.arriving = learn, give, cpu, arriving
        self.act = act or getattr(learn.loss_func, 'activation', noop)
        self.decode = getattr(learn.loss_func, 'decodes', noop)
        wanted = {
            'inputs': with_input,
            'preds': True,
            'targs': with_targs,
            'decoded': with_decoded,
            'losses': with_loss,
        }
        self.names = tuple(name for name, wants in wanted.items() if wants)
        self._depth: int | None = (
            None  # of the run that is followed: another one inside it is not ours
        )
        self.iter = 0  # number of the batch that is handed on

    def callback(self) -> Callback:
        "Return a callback that takes them."
        return Callback(
            before_validate=self._start, before_batch=self._take_input, after_batch=self._take
        )

    def _start(self, cb: Callback) -> None:
        if self._depth is None:
            self._depth = self.learn.run.depth

    def _detached(self, b: Any) -> Any:
        "Detach, and bring to the CPU what `arriving` does not."
        return self.learn.to_detach(
            b, self.cpu and (self.arriving is None or hasattr(self.learn.dl, 'to_detach'))
        )

    def _take_input(self, cb: Callback) -> None:
        if self._depth == self.learn.run.depth and 'inputs' in self.names:
            self._input = self._detached(self.learn.xb)

    def _take(self, cb: Callback) -> None:
        learn = self.learn
        if self._depth != learn.run.depth or 'pred' not in learn.__dict__:
            return
        if 'losses' in self.names and 'loss_grad' not in learn.__dict__:
            return
        n = sample_count(learn)
        listed = is_sample_list(learn.pred, n, has_listed_samples((*learn.xb, *learn.yb), n))
        preds = self._detached(learn.pred)
        entries = {'preds': preds if listed else detuplify(preds), 'iter': learn.iter}
        if 'inputs' in self.names:
            entries['inputs'] = detuplify(self._input)
        if 'targs' in self.names:
            entries['targs'] = detuplify(self._detached(learn.yb))
        if 'losses' in self.names:
            entries['losses'] = self._detached(per_sample(learn.loss, n, learn.yb))
        if self.arriving is None:
            return self._hand_on(entries)
        for arrived in self.arriving.put(entries):
            self._hand_on(arrived)

    def _hand_on(self, entries: dict[str, Any]) -> None:
        self.iter = entries['iter']
        entries['preds'] = self.act(entries['preds'])
        if 'decoded' in self.names:
            entries['decoded'] = self.decode(entries['preds'])
        self.give(*[entries[name] for name in self.names])

    def finish(self) -> None:
        "Hand on what is still on its way."
        if self.arriving is not None:
            for arrived in self.arriving.rest():
                self._hand_on(arrived)


def reordered(
    o: Any,  # predictions, inputs, targets or losses of a whole loader
    order: Tensor,  # the places of its samples
) -> Any:
    """Return the samples of tensors and of lists with one entry a sample in another order.

    Raises `BatchError` for what has another number of entries.

    >>> reordered({'x': torch.tensor([5., 6.]), 'name': ['a', 'b']}, torch.tensor([1, 0]))
    {'x': tensor([6., 5.]), 'name': ['b', 'a']}
    """
    n = len(order)
    if isinstance(o, Tensor) and o.ndim and len(o) == n:
        return o[order]
    if is_sample_list(o, n):
        return [o[i] for i in order.tolist()]
    children = children_of(o)
    if children is not None and any(c is not None for c in children):
        return rebuilt(o, [reordered(c, order) for c in children])
    if o is None or children is not None:
        return o
    raise BatchError(
        f'{describe(o)} is not one entry for each of {n} samples, and cannot be put into their order. '
        'Give `reorder=False`, for the order of the loader.'
    )


def per_sample(loss: Tensor, bs: int, yb: tuple[Any, ...] = ()) -> Tensor:
    """Return an unreduced loss as one number a sample.

    >>> per_sample(torch.tensor([[1., 3.], [5., 7.]]), 2)
    tensor([2., 6.])
    """
    n_targets = [t.shape[0] for t in yb if isinstance(t, Tensor) and t.ndim]
    if loss.numel() in (bs, *n_targets[:1]):
        return loss  # in the shape it has, as in fastai
    has_rows = loss.ndim > 0 and loss.shape[0] == bs
    is_flattened = not yb or bs in n_targets  # sample by sample
    if loss.numel() % bs or not (has_rows or is_flattened):
        raise LossError(
            f'The loss of {bs} samples came as {tuple(loss.shape)}, not one for each sample: with_loss '
            'needs a `loss_func` that takes `reduction`.'
        )
    return loss.reshape(bs, -1).mean(1)
