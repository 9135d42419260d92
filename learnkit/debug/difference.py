# SPDX-License-Identifier: Apache-2.0
"""The first difference between two runs: the event, the callback and the quantity.

The recorded losses, then the histories, then the checkpoints of both runs show a batch after which the runs differ.
Both Learners are rewound to the newest checkpoint in which they are equal, and train from there. Their states are
compared at a few batches, then at the batches between the last equal and the first unequal one, and finally event by
event: before and after each handler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.checkpoint.file import read_state
from learnkit.checkpoint.optimizer_state import encode_value
from learnkit.core.batch import short_repr, tensors_in
from learnkit.core.errors import CancelException, CheckpointError, OptionError, add_note
from learnkit.core.random import preserved_rng
from learnkit.core.validation import is_number
from learnkit.debug.moment import Fit, Moment, StopBefore
from learnkit.debug.record import Record
from learnkit.debug.rewind import RecordedRun, list_runs
from learnkit.debug.trace import WatchedTable, digest_tensors, read_watched, replace_tables
from learnkit.engine.callback import Callback, name_callback
from learnkit.engine.dispatch import CallbackHost, Entry, HandlerTable
from learnkit.engine.resumed_run import find_checkpoint_folder

if TYPE_CHECKING:
    from learnkit.learner import Learner

__all__ = ['Difference', 'first_difference']

Rows = Sequence[Mapping[str, Any]]
Values = Mapping[str, Any]  # by the name of a quantity: its digest, or its tensors

# kinds of quantities: of several that differ at one place, the first kind is the cause
_KINDS = (
    'order',
    'batch',
    'xb',
    'yb',
    'hyper',
    'weight',
    'buffer',
    'optimizer',
    'random',
    'pred',
    'loss',
    'loss_grad',
    'gradient',
)
_BATCHES = ('batch', 'xb', 'yb')  # quantities that consist of rows
_MOST_ROWS = 8  # rows that a message names
_POINTS = 16  # number of batches at which states are compared in one pass


@dataclass(frozen=True)
class Difference:
    """First difference between two runs.

    >>> print(Difference(7, 'before_batch', 'Noise', 'xb', ['xb'], 8, (0.5, 0.25)))
    batch 7, before_batch: Noise changed xb; the losses differ from batch 8 on (0.5 and 0.25)
    """

    batch: int  # number of the batch, over all fits
    event: str  # event at which it was found; '' for the environment
    # class of the callback that made it, with the function if it was made from functions; '' for
    # the loop, the data or the start
    callback: str
    what: str  # 'xb', 'hyper lr', 'weight 0.bias', 'random numbers', 'order of samples' ...
    others: list[str] = field(default_factory=list)  # all quantities that differ there
    # number of the first batch with another loss; None if all recorded losses are equal
    first_loss: int | None = None
    # losses of this batch; None for a batch without a loss
    losses: tuple[float | None, float | None] = (None, None)
    seen: str = ''  # what differs in the records, if all recorded losses are equal
    # positions in the batch of the rows that differ; empty for another quantity than a batch
    rows: list[int] = field(default_factory=list)
    # indices of these rows in the data set of the first run; None if they are not known
    indices: list[Any] | None = None

    def __str__(self) -> str:
        change = f'{self.callback} changed {self.what}' if self.callback else f'{self.what} differs'
        change += self._describe_rows()
        texts = [f'batch {self.batch}, {self.event or "environment"}: {change}']
        if self.first_loss is not None:
            a, b = self.losses
            texts.append(f'the losses differ from batch {self.first_loss} on ({a!r} and {b!r})')
        if self.seen:
            texts.append(f'all recorded losses are equal, and {self.seen}')
        return '; '.join(texts)

    def _describe_rows(self) -> str:
        "Return the rows that differ as a phrase after a space, or an empty string."
        if not self.rows:
            return ''
        text = f' in row {_list_first(self.rows)} of the batch'
        return text if self.indices is None else f'{text} (index {_list_first(self.indices)})'


def _list_first(values: Sequence[Any]) -> str:
    "Return the first values as text, with the number of the others."
    others = len(values) - _MOST_ROWS
    text = ', '.join(map(str, values[:_MOST_ROWS]))
    return f'{text} and {others} more' if others > 0 else text


def first_difference(
    a: Learner | str | Path,  # Learner made as for its run, or the folder of the run
    b: Learner | str | Path,  # the other one
    make: Callable[[Any], Learner] | None = None,  # f(folder) -> Learner, for folders
    fit: Fit
    | None = None,  # f(learn, resume=...) that trained; None: `learn.fit` of as many epochs
    atol: float = 0.0,  # largest difference of two numbers that counts as none
) -> Difference | None:
    """Return the first difference between two runs, or None if their records are equal as far as both have them.

    Both runs need checkpoints, and Learners that are made as for training: see `Learner.rewind`. Different versions of
    torch, devices, numbers of processes and, with one `fit` for both, numbers of epochs are reported first. Otherwise
    the recorded losses are compared, then the rows of the histories and the evaluations, then the newest checkpoints
    that both runs have: weights, buffers, optimizer, generators, callbacks. Last, a run that was stopped differs from
    one that has trained on; a run that was killed does not. Both runs are repeated from the newest checkpoint in which
    they are equal, up to the batch in which the difference arises, which is repeated event by event.

    A quantity is a loss, a batch, the order of samples, a weight, a buffer, a gradient, an option or a state of the
    optimizer, or the generators of random numbers. With `atol` tensors are kept instead of digests, in the memory of
    the host.

    Raises `OptionError` for folders without `make`, `CheckpointError` for runs without recorded losses, and what
    `Learner.rewind` raises, also if `fit` does not reproduce the recorded losses of each run.

    >>> import tempfile
    >>> from learnkit import Callback, Checkpoint
    >>> from learnkit.testing import synth_learner
    >>> def double(cb):
    ...     if cb.learn.time.ba == 7: cb.learn.xb = tuple(2 * x for x in cb.xb)
    >>> def make(folder, *cbs):
    ...     _ = torch.manual_seed(0)
    ...     return synth_learner(n_train=10, path=folder, cbs=[Checkpoint('4ba'), *cbs])
    >>> with tempfile.TemporaryDirectory() as f, tempfile.TemporaryDirectory() as g:
    ...     for folder, cbs in ((f, []), (g, [Callback(before_batch=double)])):
    ...         with make(folder, *cbs).no_bar() as learn: learn.fit(1)
    ...     found = first_difference(make(f), make(g, Callback(before_batch=double)))
    >>> found.batch, found.event, found.callback, found.what
    (7, 'before_batch', 'Callback(before_batch=double)', 'xb')
    """
    if not is_number(atol) or atol < 0:
        raise OptionError(f'atol={atol!r}: pass a number, 0 or more.')
    learners = [_as_learner(o, make) for o in (a, b)]
    if learners[0] is learners[1]:
        raise OptionError('Both runs have the same Learner: make one for each.')
    runs = [list_runs(find_checkpoint_folder(learn))[0] for learn in learners]
    environment = _compare_environments(*runs)
    lengths = _compare_lengths(*runs)
    if environment or (fit is not None and lengths):
        found = [*environment, *lengths]
        return Difference(runs[0].first, '', '', found[0], found)
    common = CommonCheckpoints(runs[0], runs[1], atol)
    symptom = _find_symptom(runs[0], runs[1], common, atol)
    if symptom is None and lengths:
        return Difference(runs[0].first, '', '', lengths[0], lengths)
    if symptom is None:
        return _compare_ends(*runs)
    known = common.find_equal_before(symptom.end - 1)
    low = max(known, *(run.first for run in runs))
    found_there = _repeat(learners, low, symptom, fit, atol)
    if found_there is None:  # the difference does not occur again
        place = symptom.batch, symptom.event, '', symptom.what, [symptom.what]
        return Difference(*place, *symptom.consequences)
    difference = Difference(*found_there[:5], *symptom.consequences)
    return replace(difference, rows=found_there.rows, indices=found_there.indices)


def _as_learner(o: Any, make: Callable[[Any], Learner] | None) -> Learner:
    if isinstance(o, (str, Path)):
        if make is None:
            raise OptionError(
                f'{o} is a folder: pass `make=`, a function of it that returns the Learner.'
            )
        o, where = make(o), f'make({str(o)!r}) returned'
    else:
        where = 'first_difference() got'
    if not isinstance(o, CallbackHost):
        raise OptionError(
            f'{where} {short_repr(o)}: both runs are repeated, so pass two Learners made as for training, or two '
            'folders and `make=`.'
        )
    return o  # type: ignore[return-value]  # a CallbackHost of this package is a Learner


def _compare_environments(a: RecordedRun, b: RecordedRun) -> list[str]:
    names = {'torch': 'version of torch', 'device': 'device', 'ranks': 'number of processes'}
    return [
        f'{text} ({a.info[name]} and {b.info[name]})'
        for name, text in names.items()
        if a.info[name] != b.info[name]
    ]


def _compare_lengths(a: RecordedRun, b: RecordedRun) -> list[str]:
    n, m = (run.info['n_epoch'] for run in (a, b))
    return [] if n == m else [f'number of epochs ({n or "a budget"} and {m or "a budget"})']


def _compare_ends(a: RecordedRun, b: RecordedRun) -> Difference | None:
    "Return the difference of a run that has ended and one that has trained on, or None."
    for run, other in ((a, b), (b, a)):
        ba = run.info['ba']
        if other.info['ba'] > ba and run.has_ended():
            what = (
                f'end of the run (after batch {ba}; the other one has at least {other.info["ba"]})'
            )
            return Difference(ba, 'after_fit', '', what, [what])
    return None


# -- records ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Symptom:
    "First place at which the records of two runs differ."

    end: int  # number of the batch before which the difference arose
    event: str
    what: str  # quantity in the record
    first_loss: int | None = None
    losses: tuple[float | None, float | None] = (None, None)
    seen: str = ''

    @property
    def batch(self) -> int:
        "Number of finished batches at the event."
        return self.end if self.first_loss is None else self.first_loss

    @property
    def consequences(self) -> tuple[Any, ...]:
        "The last fields of a `Difference`."
        return self.first_loss, self.losses, self.seen


def _find_symptom(
    a: RecordedRun, b: RecordedRun, common: CommonCheckpoints, atol: float
) -> Symptom | None:
    "Return the first difference of the losses, else of the histories, else of the newest common checkpoints."
    recorders = [run.read_recorder() for run in (a, b)]
    records = [run.read_record() for run in (a, b)]
    first = _find_first_loss(records[0], records[1], atol)
    if first is not None:
        pair = records[0].losses.get(first), records[1].losses.get(first)
        return Symptom(first + 1, 'after_loss', 'loss', first, pair)
    return _find_other_row(recorders[0], recorders[1], records[0], atol) or common.find_difference()


def _find_first_loss(a: Record, b: Record, atol: float) -> int | None:
    "Return the number of the first batch with two losses, or None; raise `CheckpointError` without any to compare."
    begin = max(a.batches.start, b.batches.start)
    batches = range(begin, min(a.batches.stop, b.batches.stop))
    if not batches:
        raise CheckpointError(
            'No batch has a recorded loss in both runs. Train with `Recorder` and `Checkpoint`, from the same batch on.'
        )
    return next(
        (ba for ba in batches if not _are_close(a.losses.get(ba), b.losses.get(ba), atol)), None
    )


def _find_other_row(
    a: Mapping[str, Any], b: Mapping[str, Any], record: Record, atol: float
) -> Symptom | None:
    "Return the first evaluation, or the first row of the history, in which two Recorders differ."
    found = []
    for i, name in find_other_row(a['evaluations'], b['evaluations'], atol):
        row, other = a['evaluations'][i], b['evaluations'][i]
        text = f'{name} after batch {row["ba"]} differs ({row[name]} and {other[name]})'
        found.append(Symptom(row['ba'], 'after_eval', name, seen=text))
    for i, name in find_other_row(a['history'], b['history'], atol):
        row, other = a['history'][i], b['history'][i]
        text = f'{name} of epoch {row["epoch"]} differs ({row[name]} and {other[name]})'
        end = _find_end_of_row(a, i, record)
        found.append(Symptom(end, 'after_epoch', name, seen=text))
    return min(found, key=lambda symptom: symptom.end, default=None)


def find_other_row(a: Rows, b: Rows, atol: float) -> list[tuple[int, str]]:
    "Return the index of the first two rows that differ, and the column, in a list; empty without any."
    for i, (row, other) in enumerate(zip(a, b, strict=False)):
        name = _find_other_value(row, other, atol)
        if name is not None:
            return [(i, name)]
    return []


def _find_other_value(row: Mapping[str, Any], other: Mapping[str, Any], atol: float) -> str | None:
    "Return the first column in which two rows differ; times, and columns that only one run has, are left out."
    names = [name for name in row if name in other and name != 'time']
    return next((n for n in names if not _are_close(row[n], other[n], atol)), None)


def _find_end_of_row(recorder: Mapping[str, Any], i: int, record: Record) -> int:
    "Return the number of the batch after the epoch of a row of the history."
    n_losses = recorder['iters']  # up to each row of the last fit
    i -= len(recorder['history']) - len(n_losses)
    batches = sorted(record.losses)
    if i < 0 or not n_losses[i]:
        return record.batches.start + 1  # the row is of an earlier fit
    return batches[n_losses[i] - 1] + 1


class CommonCheckpoints:
    "Checkpoints that two runs have after the same batches, compared from the newest on."

    def __init__(self, a: RecordedRun, b: RecordedRun, atol: float) -> None:
        self._atol = atol
        entries = [{(e.info['ba'], e.info['point']): e for e in run.checkpoints} for run in (a, b)]
        self.pairs = {
            key: (entries[0][key], entries[1][key]) for key in entries[0].keys() & entries[1].keys()
        }
        self._compared: dict[tuple[int, str], list[str]] = {}

    def compare(self, key: tuple[int, str]) -> list[str]:
        "Return the names of what differs after a batch."
        if key not in self._compared:
            a, b = (_flatten_state(read_state(entry.path)[0]) for entry in self.pairs[key])
            names = [name for name in a if name in b or not name.startswith('callbacks.')]
            others = [n for n in names if not _are_close(a[n], b.get(n), self._atol)]
            missing = [n for n in b if n not in a and not n.startswith('callbacks.')]
            self._compared[key] = [*others, *missing]
        return self._compared[key]

    def find_equal_before(self, ba: int) -> int:
        "Return the number of the batch of the newest equal checkpoints up to a batch, or -1."
        keys = sorted((key for key in self.pairs if key[0] <= ba), reverse=True)
        return next((key[0] for key in keys if not self.compare(key)), -1)

    def find_difference(self) -> Symptom | None:
        "Return the difference in the first checkpoints after the newest equal ones, or None if the newest are equal."
        first = None
        for key in sorted(self.pairs, reverse=True):
            if not self.compare(key):
                break
            first = key
        if first is None:
            return None
        names = self.compare(first)
        text = f'the checkpoints after batch {first[0]} differ: {", ".join(names[:3])}'
        return Symptom(first[0], f'{first[1]}_checkpoint', names[0], seen=text)


# entries of a checkpoint that are compared, causes first
_COMPARED = (
    'model loss_func buffers loss_buffers optimizer grads frozen generators rng position callbacks'
).split()
_NOT_COMPARED = ('callbacks.recorder.', 'callbacks.checkpoint.')  # compared elsewhere


def _flatten_state(state: Mapping[str, Any]) -> dict[str, Any]:
    "Return tensors and numbers of a checkpoint by their places."
    listed = state.get('nondeterministic_state', {})
    left_out = [f'callbacks.{key}.{name}' for key, names in listed.items() for name in names]
    flat = dict[str, Any]()

    def add(place: str, value: Any) -> None:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            name = f'{place}.{key}'
            if isinstance(part, (Mapping, list, tuple)):
                add(name, part)
            elif name not in left_out and not name.startswith(_NOT_COMPARED):
                flat[name] = part

    for name in _COMPARED:
        add(name, state.get(name) or {})
    return flat


def _are_close(x: Any, y: Any, atol: float) -> bool:
    "Return True for equal digests, numbers and tensors, with NaN equal to itself."
    if isinstance(x, list) and isinstance(y, list):
        pairs = zip_longest(x, y)
        return len(x) == len(y) and all(_are_close(s, t, atol) for s, t in pairs)
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return False
        return torch.allclose(x.double(), y.double(), rtol=0, atol=atol, equal_nan=True)
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return False
    if isinstance(x, float) and isinstance(y, float):
        return x == y or abs(x - y) <= atol or (x != x and y != y)
    return bool(x == y)


# -- events ----------------------------------------------------------------------------------------


@dataclass
class Observed:
    "Quantities at one event: before its handlers, and after each."

    event: str
    batch: int
    before: Values
    after: list[tuple[str, Values]] = field(default_factory=list)  # by the class of the callback
    cancelled_by: str = ''  # class of the callback that has raised a Cancel exception

    @property
    def end(self) -> Values:
        "Quantities after all handlers."
        return self.after[-1][1] if self.after else self.before

    def list_changes(self, what: str) -> list[tuple[str, Any]]:
        "Return the callbacks that have changed a quantity, with its value after it."
        values = [self.before, *(values for _, values in self.after)]
        return [
            (name, now.get(what))
            for (name, now), last in zip(self.after, values, strict=False)
            if not _are_close(now.get(what), last.get(what), 0.0)
        ]


class ObservedTable(WatchedTable):
    "Handler table that records the quantities at each event of the repeated batches."

    def __init__(
        self, learn: Learner, events: list[Observed], begin: int, keep: bool, table: HandlerTable
    ) -> None:
        super().__init__(learn, table)
        self.events = events
        self.begin = begin  # number of the first batch
        self.read = _find_reader(keep)

    @override
    def wrap(self, name: str, entries: list[Entry]) -> list[Entry]:
        watched: list[Entry] = [(partial(self._begin, name), [True], None)]
        for handler, switch, cb in entries:
            call = handler if isinstance(cb, StopBefore) else partial(self._watch, handler, cb)
            watched.append((call, switch, cb))
        return watched

    def _is_repeating(self) -> bool:
        "Return True from the first batch on, once the state before the batches has been restored."
        learn = self.learn
        is_restored = learn.run.resuming is None and learn.run.is_active
        return is_restored and learn.parts.counters.batches >= self.begin

    def _begin(self, name: str) -> None:
        if self._is_repeating():
            values = self._read(name)
            self.events.append(Observed(name, self.learn.time.ba, values))

    def _watch(self, handler: Callable[[], Any], cb: Any) -> None:
        __tracebackhide__ = True
        # without an event, the first batch begins in the middle of one
        event = self.events[-1] if self._is_repeating() and self.events else None
        try:
            handler()
        except CancelException:
            if event is not None:
                event.cancelled_by = name_callback(cb, event.event)
            raise
        finally:
            if event is not None:
                name = name_callback(cb, event.event)
                event.after.append((name, self._read(event.event)))

    def _read(self, event: str) -> Values:
        learn = self.learn
        values = _read_state(learn, self.read)
        if event == 'after_draw':
            values['batch'] = self.read(learn.batch)
        if self.read is digest_tensors:
            loop = learn.__dict__
            values |= {n: _digest_rows(loop[n]) for n in _BATCHES if n in values and n in loop}
        if event == 'after_draw' and learn.training:
            values['order of samples'] = learn.parts.positions.indices(learn)
        return values


def _find_reader(keep: bool) -> Callable[[Any], Any]:
    "Return f(value), which returns the part of a value that is compared."
    return _copy_tensors if keep else digest_tensors


def _read_state(learn: Learner, read: Callable[[Any], Any]) -> dict[str, Any]:
    return read_watched(learn, read) | _read_optimizer(learn, read)


def _digest_rows(batch: Any) -> list[Any]:
    "Return the digest of a batch, and a list of sums of its rows for each tensor."
    return [digest_tensors(batch), *map(_sum_rows, tensors_in(batch))]


def _sum_rows(t: Tensor) -> list[int]:
    "Return a sum of the bits of each row, which differs for rows that differ; empty for a tensor without rows."
    if t.layout is not torch.strided or not t.dim() or not t.numel():
        return []
    flat = t.detach().reshape(len(t), -1).contiguous()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    bits = flat.view(integers.get(t.element_size(), torch.int64)).long()
    g = torch.Generator().manual_seed(0)
    weights = torch.randint(1, 2**62, (bits.shape[1],), generator=g) * 2 + 1
    sums: list[int] = (bits * weights.to(bits.device)).sum(1).tolist()
    return sums


def _copy_tensors(o: Any) -> list[Tensor]:
    return [t.detach().cpu().clone() for t in tensors_in(o)]


def _read_optimizer(learn: Learner, read: Callable[[Any], Any]) -> dict[str, Any]:
    "Return the options of the optimizer's groups, and its state by parameter."
    if learn.opt is None:
        return {}
    names = {id(p): name for name, p in learn.model.named_parameters()}
    found: dict[str, Any] = {}
    for kind, opt in learn.opt.optimizers.items():
        where = f' of {kind}' if len(learn.opt.optimizers) > 1 else ''
        for i, group in enumerate(opt.param_groups):
            options = {k: v for k, v in group.items() if k not in ('params', 'param_names')}
            found |= {f'hyper {k}{where}, group {i}': repr(v) for k, v in options.items()}
        for p, state in opt.state.items():
            if isinstance(p, Tensor):
                name = f'state of {names.get(id(p), "a parameter of the loss")}'
            else:
                name = f'entry {p!r}{where}'
            found[f'optimizer {name}'] = read(encode_value(state))
    return found


class _NoteStates(Callback):
    "Record the state before some batches."

    runs_first = ('before_batch',)
    run_in = 'fit'
    run_valid = False

    def __init__(self, batches: range, keep: bool) -> None:
        self._batches = batches
        self._read = _find_reader(keep)
        self.states: dict[int, Values] = {}

    def before_batch(self) -> None:
        ba = self.learn.parts.counters.batches
        if ba in self._batches:
            self.states[ba] = _read_state(self.learn, self._read)


def _repeat(
    learners: list[Learner], low: int, symptom: Symptom, fit: Fit | None, atol: float
) -> Found | None:
    """Return the first difference that arises from batch `low` on, or None if it does not occur again.

    The generators are preserved: without a checkpoint before the batch, a run begins with the Learner as made."""
    if low >= symptom.end:  # the difference arose in an earlier fit
        return None
    moments = []
    for learn in learners:
        with preserved_rng(), _naming_run(learn):
            moments.append(learn.rewind(low, fit=fit))
    begin = max(low, symptom.end - 2) if symptom.first_loss is not None else None
    if begin is not None:  # usually the batch before the first different loss is the cause
        found = _observe(moments, begin, symptom.end, atol)
        if found is not None and (begin == low or not found.is_from_start):
            return found
    begin = _narrow(moments, low, symptom.end, atol)
    return _observe(moments, begin, min(begin + 2, symptom.end), atol)


@contextmanager
def _naming_run(learn: Learner) -> Iterator[None]:
    "Add a note to a `CheckpointError` that names the repeated run."
    try:
        yield
    except CheckpointError as e:
        add_note(
            e,
            f'while the run in {find_checkpoint_folder(learn)} was repeated: `fit` must be the function that trained '
            'both runs',
        )
        raise


def _narrow(moments: list[Moment], low: int, end: int, atol: float) -> int:
    "Return the number of the last batch before which both runs are equal, by comparing a few batches at a time."
    while end - low > 1:
        points = range(low, end, max(1, (end - low) // _POINTS))
        noted = [_NoteStates(points, atol > 0) for _ in moments]
        for moment, note in zip(moments, noted, strict=True):
            with _naming_run(moment.learn):
                moment.observe(end - moment.ba, [note])
        a, b = (note.states for note in noted)
        equal = [ba for ba in points if not _list_other(a.get(ba, {}), b.get(ba, {}), atol)]
        first = next((ba for ba in points if ba not in equal), end)
        low = max([low, *(ba for ba in equal if ba < first)])
        if points.step == 1:
            break
        end = first
    return low


def _observe(moments: list[Moment], begin: int, end: int, atol: float) -> Found | None:
    "Compare the quantities at each event of the batches from `begin` up to `end`."
    observed = []
    for moment in moments:
        events: list[Observed] = []
        make = partial(ObservedTable, moment.learn, events, begin, atol > 0)
        with replace_tables(moment.learn, make), _naming_run(moment.learn):
            moment.observe(end - moment.ba)
        observed.append(events)
    return _find_first(observed[0], observed[1], atol)


# -- comparison ------------------------------------------------------------------------------------


class Found(NamedTuple):
    "The first fields of a `Difference`."

    batch: int
    event: str
    callback: str
    what: str
    others: list[str]
    is_from_start: bool  # whether the runs differ before the first event
    rows: list[int]  # positions in the batch of the rows that differ
    indices: list[Any] | None  # indices of these rows in the data set


def _find_first(a: list[Observed], b: list[Observed], atol: float) -> Found | None:
    "Return the first difference, with all quantities that differ there."
    names = [[*(o.event for o in observed), 'the end'] for observed in (a, b)]
    indices: list[Any] | None = None  # of the samples of the batch
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x.event == 'after_draw':
            indices = x.before.get('order of samples')
        others = _list_other(x.before, y.before, atol)
        if others:
            rows = _find_rows(x.before, y.before, others[0], indices, atol)
            return Found(x.batch, x.event, '', others[0], others, i == 0, *rows)
        others = _list_other(x.end, y.end, atol)
        if others:
            cause = _find_callback(x, y, others[0], atol)
            rows = _find_rows(x.end, y.end, others[0], indices, atol)
            return Found(x.batch, x.event, cause, others[0], others, False, *rows)
        if names[0][i + 1] != names[1][i + 1]:
            cause = x.cancelled_by or y.cancelled_by
            what = f'event ({names[0][i + 1]} and {names[1][i + 1]})'
            return Found(x.batch, x.event, cause, what, [], False, [], None)
    return None


def _find_rows(
    x: Values, y: Values, what: str, indices: list[Any] | None, atol: float
) -> tuple[list[int], list[Any] | None]:
    "Return positions and indices of the rows that differ; none for a quantity without rows, or of other lengths."
    parts = (x.get(what), y.get(what)) if what in _BATCHES else ([], [])
    rows: set[int] = set()
    for s, t in zip(*parts, strict=False):
        if isinstance(s, str) or isinstance(t, str) or len(s) != len(t):
            continue
        rows |= {i for i, (p, q) in enumerate(zip(s, t, strict=True)) if not _are_close(p, q, atol)}
    found = sorted(rows)
    if not found or indices is None or len(indices) <= found[-1]:
        return found, None
    return found, [indices[i] for i in found]


def _list_other(x: Values, y: Values, atol: float) -> list[str]:
    "Return the quantities that differ, causes first."
    names = [name for name in {**x, **y} if not _are_close(x.get(name), y.get(name), atol)]
    return sorted(names, key=lambda name: _KINDS.index(name.split()[0]))


def _find_callback(x: Observed, y: Observed, what: str, atol: float) -> str:
    "Return the first callback that has changed a quantity in one run, and not in the same way in the other."
    missing = ('', None)
    for s, t in zip_longest(x.list_changes(what), y.list_changes(what), fillvalue=missing):
        if s[0] != t[0] or not _are_close(s[1], t[1], atol):
            return t[0] or s[0]
    return ''
