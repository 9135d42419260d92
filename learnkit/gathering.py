"""What is kept of the batches that are predicted on: gathered in memory, handed on, or written to a sink."""
from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import count
from pathlib import Path
from shutil import rmtree
from typing import Any, BinaryIO

import numpy as np
import torch
from fastcore.basics import noop
from torch import Tensor

from learnkit.batch import concat, describe, detuplify, find_bs, map_tensors
from learnkit.callback import Callback
from learnkit.errors import BatchError, LossError, OptionError

__all__ = ['GatherPredsCallback', 'Arriving', 'Taken', 'check_sink', 'opened_sink', 'per_sample', 'save_plain']


class GatherPredsCallback(Callback):
    """Gather predictions and targets, and inputs and losses on request, on the CPU; batches are joined at the end.

    Results leave a GPU one batch late, so that nothing waits for them. `save_preds` and `save_targs` get a file a
    batch, called by its number, which `torch.load` reads with `weights_only=True`.

    >>> from learnkit.testing import synth_learner
    >>> gathered, learn = GatherPredsCallback(), synth_learner(n_valid=2)
    >>> with learn.added_cbs(gathered), learn.no_bar(): _ = learn.validate()
    >>> preds, targets = gathered.all_tensors()
    >>> preds.shape, targets.shape
    (torch.Size([32, 1]), torch.Size([32, 1]))
    """

    def __init__(
        self,
        with_input: bool = False,              # also gather the inputs
        with_loss: bool = False,               # also gather the loss of each sample
        save_preds: str | Path | None = None,  # a folder: each batch's predictions are saved there
        save_targs: str | Path | None = None,  # a folder: each batch's (first) targets are saved there
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
        self._arriving = Arriving()

    def _is_ours(self) -> bool: return bool(self._depth == self.learn._depth and not self.learn.training)

    def before_validate(self) -> None:
        depth = self.learn._depth
        if self._depth is None or depth < self._depth: self._depth = depth  # one inside this one is over
        if not self._is_ours(): return
        self._start()
        for folder in (self.save_preds, self.save_targs):
            if folder is not None: Path(folder).mkdir(parents=True, exist_ok=True)

    def before_batch(self) -> None:
        if self.with_input and self._is_ours(): self._input = self._detached(self.learn.xb)

    def after_batch(self) -> None:
        learn = self.learn
        if not self._is_ours() or 'pred' not in learn.__dict__: return
        if self.with_loss and 'loss_grad' not in learn.__dict__: return
        self.n_batches += 1
        inputs = self._input if self.with_input else None
        losses = per_sample(learn.loss, find_bs(learn.yb)) if self.with_loss else None
        batch = (learn.iter, inputs, self._detached(learn.pred), self._detached(learn.yb), losses)
        for arrived in self._arriving.put(batch): self._keep(*arrived)

    def _detached(self, b: Any) -> Any:
        "Detach, and leave the way to the CPU to `Arriving` unless the loader has its own."
        return self.learn.to_detach(b, cpu=hasattr(self.learn.dl, 'to_detach'))

    def _keep(self, i: int, inputs: Any, preds: Any, targs: Any, losses: Any) -> None:
        if self.with_loss: self.losses.append(losses)
        if self.with_input: self.inputs.append(inputs)
        if self.with_preds: self.preds.append(map_tensors(preds, _compact))
        if self.with_targs: self.targets.append(targs)
        if self.save_preds is not None: save_plain(preds, Path(self.save_preds)/str(i))
        if self.save_targs is not None and targs: save_plain(targs[0], Path(self.save_targs)/str(i))

    def after_validate(self) -> None:
        if self._is_ours(): self._join()

    def _run_failed(self) -> None:
        if self._is_ours(): self._depth = None

    def cleanup(self) -> None: self._depth = None

    def _join(self) -> None:
        if self._joined or not self.n_batches: return
        for arrived in self._arriving.rest(): self._keep(*arrived)
        self._joined, join = True, partial(concat, dim=self.concat_dim)
        if self.with_input: self.inputs = detuplify(join(self.inputs))
        if self.with_preds: self.preds = detuplify(join(self.preds))
        if self.with_targs: self.targets = detuplify(join(self.targets))
        if self.with_loss: self.losses = concat(self.losses)

    def all_tensors(self) -> list[Any]:
        """Return what was gathered: inputs if asked for, predictions, targets, losses if asked for.

        Raises `BatchError` when there was no batch."""
        if not self.n_batches:
            raise BatchError('There is nothing to return: not one batch was predicted on. Does a callback '
                             'cancel them all?')
        self._join()  # what was cut short has not been joined
        res = [self.preds if self.with_preds else None, self.targets if self.with_targs else None]
        return [*([self.inputs] if self.with_input else []), *res, *([self.losses] if self.with_loss else [])]


def _compact(t: Tensor) -> Tensor:
    "Return a small part of a large tensor (the last of many tokens) as a tensor of its own, which holds no more."
    return t.clone() if 2 * t.nbytes < t.untyped_storage().nbytes() else t


class Arriving:
    """Bring results to the CPU. From CUDA they travel while the next batch is computed, and arrive one batch late.

    >>> arriving = Arriving()
    >>> arriving.put((torch.ones(1), 'text')), arriving.rest()
    ([(tensor([1.]), 'text')], [])
    """

    def __init__(self) -> None: self._pending: list[tuple[Any, list[torch.cuda.Event]]] = []

    def put(self, b: Any) -> list[Any]:
        "Send a nested structure, and return those that have arrived."
        devices: set[torch.device] = set()
        def look(t: Tensor) -> Tensor:
            devices.add(t.device)
            return t
        map_tensors(b, look)
        if all(d.type != 'cuda' for d in devices): return [*self.rest(), map_tensors(b, Tensor.cpu)]
        # torch puts what it copies like this into pinned memory, on the stream that computes
        sent = map_tensors(b, lambda t: t.to('cpu', non_blocking=True))
        there = [torch.cuda.current_stream(d).record_event() for d in devices if d.type == 'cuda']
        arrived, self._pending = self.rest(), [(sent, there)]
        return arrived

    def rest(self) -> list[Any]:
        "Wait for what is on its way, and return it."
        pending, self._pending = self._pending, []
        for event in (event for _, there in pending for event in there): event.synchronize()
        # in ordinary memory: pinned memory is scarce
        return [map_tensors(sent, lambda t: t.clone() if t.is_pinned() else t) for sent, _ in pending]


class Taken:
    "The entries of each batch of a run, by name, handed to `give` as soon as the batch is through."

    def __init__(
        self,
        learn: Any,
        give: Callable[..., Any],      # called with the entries of a batch
        with_input: bool = False,
        with_decoded: bool = False,
        with_loss: bool = False,
        with_targs: bool = True,
        act: Callable[[Any], Any] | None = None,  # applied to predictions; None: `loss_func.activation`, if any
        cpu: bool = True,              # bring the entries to the CPU
        arriving: Arriving | None = None,  # brings them there without a wait, a batch late; None: at once
    ) -> None:
        self.learn, self.give, self.cpu, self.arriving = learn, give, cpu, arriving
        self.act = act or getattr(learn.loss_func, 'activation', noop)
        self.decode = getattr(learn.loss_func, 'decodes', noop)
        wanted = {'inputs': with_input, 'preds': True, 'targs': with_targs, 'decoded': with_decoded,
                  'losses': with_loss}
        self.names = tuple(name for name, wants in wanted.items() if wants)
        self._depth: int | None = None  # of the run that is followed: another one inside it is not ours

    def callback(self) -> Callback:
        "Return a callback that takes them."
        return Callback(before_validate=self._start, before_batch=self._take_input, after_batch=self._take)

    def _start(self, cb: Callback) -> None:
        if self._depth is None: self._depth = self.learn._depth

    def _detached(self, b: Any) -> Any:
        "Detach, and bring to the CPU what `arriving` does not."
        return self.learn.to_detach(b, self.cpu and (self.arriving is None or hasattr(self.learn.dl, 'to_detach')))

    def _take_input(self, cb: Callback) -> None:
        if self._depth == self.learn._depth and 'inputs' in self.names: self._input = self._detached(self.learn.xb)

    def _take(self, cb: Callback) -> None:
        learn = self.learn
        if self._depth != learn._depth or 'pred' not in learn.__dict__: return
        if 'losses' in self.names and 'loss_grad' not in learn.__dict__: return
        entries = {'preds': detuplify(self._detached(learn.pred))}
        if 'inputs' in self.names: entries['inputs'] = detuplify(self._input)
        if 'targs' in self.names: entries['targs'] = detuplify(self._detached(learn.yb))
        if 'losses' in self.names: entries['losses'] = self._detached(per_sample(learn.loss, find_bs(learn.yb)))
        if self.arriving is None: return self._hand_on(entries)
        for arrived in self.arriving.put(entries): self._hand_on(arrived)

    def _hand_on(self, entries: dict[str, Any]) -> None:
        entries['preds'] = self.act(entries['preds'])
        if 'decoded' in self.names: entries['decoded'] = self.decode(entries['preds'])
        self.give(*[entries[name] for name in self.names])

    def finish(self) -> None:
        "Hand on what is still on its way."
        if self.arriving is not None:
            for arrived in self.arriving.rest(): self._hand_on(arrived)


def per_sample(loss: Tensor, bs: int) -> Tensor:
    """Return an unreduced loss as one number a sample.

    >>> per_sample(torch.tensor([[1., 3.], [5., 7.]]), 2)
    tensor([2., 6.])
    """
    if loss.numel() == bs: return loss  # in the shape it has, as in fastai
    if loss.numel() % bs:
        raise LossError(f'The loss of {bs} samples came as {tuple(loss.shape)}, not one for each sample: with_loss '
                        'needs a `loss_func` that takes `reduction`.')
    return loss.reshape(bs, -1).mean(1)


# Sinks

def check_sink(sink: Any, names: tuple[str, ...]) -> None:
    "Raise `OptionError` for a sink that cannot take these entries."
    if callable(sink): return
    if _is_path(sink): _check_free(Path(sink), _is_folder(sink))
    if _is_folder(sink): return
    if not isinstance(sink, np.ndarray) and not _is_path(sink):
        raise OptionError(f'sink={describe(sink)}: give a folder, the path of a .npy file, a numpy array or memory '
                          'map, or a function that is called with the entries of each batch.')
    if others := [name for name in names if name not in ('preds', 'targs')]:
        raise OptionError(f'An array holds predictions alone, not {", ".join(others)}: give a folder as the sink.')


def _check_free(path: Path, is_folder: bool) -> None:
    "Raise `OptionError` where something is in the way: nothing but what a run cut short has left is written over."
    free = is_folder and path.is_dir() and not any(path.iterdir())
    if path.exists() and not free:
        raise OptionError(f'sink={str(path)!r} is there already{" and not an empty folder" * is_folder}: it would be '
                          'overwritten. Remove it, or give another name.')
    part = _part_of(path)
    if not part.exists(): return
    if is_folder: ours = part.is_dir() and all(_OWN_FILE.fullmatch(name) for name in os.listdir(part))
    else: ours = part.is_file() and _starts_as_npy(part)
    if not ours:
        raise OptionError(f'sink={str(path)!r} is called {part.name!r} until it is complete, and that is there '
                          'already, with what no prediction has written. Move it away, or give another name.')


def _starts_as_npy(path: Path) -> bool:
    with open(path, 'rb') as file: return file.read(6) in (b'', b'\x93NUMPY')


_OWN_FILE = re.compile(r'\d{6,}\.pt|\.\d{6,}\.pt\.tmp')  # a batch, and a batch on its way to the disk


def _part_of(path: Path) -> Path: return path.with_name(f'{path.name}.part')
def _is_path(sink: Any) -> bool: return isinstance(sink, (str, Path))
def _is_folder(sink: Any) -> bool: return _is_path(sink) and Path(sink).suffix != '.npy'


@contextmanager
def opened_sink(sink: Any, names: tuple[str, ...]) -> Iterator[Callable[..., Any]]:
    """Open a sink and yield the function that takes the entries of a batch.

    A folder gets a file a batch and a `.npy` file rows; both are called `<name>.part` until they are complete, and are
    usable by then too.
    """
    if callable(sink): yield sink
    elif isinstance(sink, np.ndarray): yield partial(_only_preds, names, _Rows(sink).add)
    else:
        path = Path(sink)
        part = _part_of(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_folder(sink):
            if part.is_dir(): rmtree(part)  # what an earlier run, cut short, has left
            part.mkdir()
            numbers = count()
            yield lambda *entries: save_plain(dict(zip(names, entries, strict=True)), part/f'{next(numbers):06}.pt')
            if path.exists(): path.rmdir()  # empty, as was checked
        else:
            with open(part, 'wb') as file: yield partial(_only_preds, names, _NpyFile(file).add)
        os.replace(part, path)


def _only_preds(names: tuple[str, ...], add: Callable[[Any], None], *entries: Any) -> None:
    preds = entries[names.index('preds')]
    if not isinstance(preds, Tensor):
        raise OptionError(f'An array cannot hold predictions like {describe(preds)}: give a folder as the sink.')
    preds = preds.detach().cpu()
    add((preds.float() if preds.dtype == torch.bfloat16 else preds).numpy())


def save_plain(
    o: Any,      # any nesting of tensors, numbers and strings
    path: Path,  # the file is there only when it is complete
) -> None:
    "Save as plain containers and tensors of their own, so that `torch.load` reads it with `weights_only=True`."
    temporary = path.with_name(f'.{path.name}.tmp')
    torch.save(_plain(o), temporary)
    os.replace(temporary, path)


def _plain(o: Any) -> Any:
    if isinstance(o, Tensor): return o.detach().as_subclass(Tensor).clone()  # a view would drag its storage along
    if isinstance(o, np.ndarray): return torch.as_tensor(o)
    if isinstance(o, Mapping): return {k: _plain(v) for k, v in o.items()}
    if isinstance(o, (tuple, list)): return (list if isinstance(o, list) else tuple)(map(_plain, o))
    if is_dataclass(o): return {f.name: _plain(getattr(o, f.name)) for f in fields(o)}
    if o is None or isinstance(o, (bool, int, float, complex, str)): return o
    raise BatchError(f'A {type(o).__name__} cannot be saved in a file that is safe to load: give tensors, numbers and '
                     'strings in dicts, tuples and lists.')


class _Rows:
    "An array that is filled row by row."

    def __init__(self, array: np.ndarray) -> None: self.array, self.n = array, 0

    def add(self, rows: np.ndarray) -> None:
        "Write the rows of a batch behind those that are there."
        end, room = self.n + len(rows), len(self.array)
        if end > room or rows.shape[1:] != self.array.shape[1:]:
            raise OptionError(f'The sink is an array {list(self.array.shape)}, which has no room for rows {self.n} to '
                              f'{end} of shape {list(rows.shape[1:])}.')
        self.array[self.n:end], self.n = rows, end


class _NpyFile:
    "A .npy file that grows: after each batch its header tells the rows so far, so that it can be read at any time."

    def __init__(self, file: BinaryIO) -> None: self.file, self.n = file, 0

    def add(self, rows: np.ndarray) -> None:
        "Append the rows of a batch; all batches have rows of one shape and type."
        rows = np.ascontiguousarray(rows if rows.ndim else rows[None])
        if not self.n:
            self.dtype, self.shape = rows.dtype, rows.shape[1:]
            self.file.write(self._header())
        if (rows.dtype, rows.shape[1:]) != (self.dtype, self.shape):
            raise OptionError(f'A .npy file holds rows of one shape and type: {list(self.shape)} {self.dtype} first, '
                              f'then {list(rows.shape[1:])} {rows.dtype}. Give a folder as the sink.')
        self.file.write(rows.data)
        self.n += len(rows)
        self.file.seek(0)
        self.file.write(self._header())
        self.file.seek(0, os.SEEK_END)
        self.file.flush()

    def _header(self) -> bytes:
        "Return a header (numpy's format 1.0) as long for any number of rows."
        def told(n: int) -> str:
            return repr({'descr': np.lib.format.dtype_to_descr(self.dtype), 'fortran_order': False,
                         'shape': (n, *self.shape)})
        size = (10 + len(told(sys.maxsize)) + 1 + 63) // 64 * 64  # data are aligned to 64 bytes
        start = b'\x93NUMPY\x01\x00' + (size - 10).to_bytes(2, 'little')
        return start + told(self.n).ljust(size - 11).encode() + b'\n'
