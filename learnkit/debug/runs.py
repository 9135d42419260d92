# SPDX-License-Identifier: Apache-2.0
"""Runs in folders of checkpoints: describe them, compare two, and draw one; `python -m learnkit runs` and others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from learnkit.callbacks.plots import draw_panels, make_panels
from learnkit.checkpoint.file import read_state
from learnkit.core.errors import CheckpointError, OptionError, did_you_mean
from learnkit.core.html import format_cell, text_table
from learnkit.core.plotting import color, new_axes, pyplot
from learnkit.core.time import format_seconds
from learnkit.debug.difference import find_other_row
from learnkit.debug.rewind import RecordedRun, list_runs
from learnkit.metrics.base import AvgSmoothLoss

Rows = Sequence[Mapping[str, Any]]
FOLDER = 'checkpoints'  # name of the folder that `Checkpoint` makes below `learn.path`

# -- runs in folders -------------------------------------------------------------------------------


def find_runs(
    folder: str | Path,  # folder with checkpoints, or with such folders at any depth
) -> list[RecordedRun]:
    "Return all runs in a folder and below it, newest first in each folder. Raises `CheckpointError` without runs."
    folders = _list_folders(folder)
    return [run for place in folders for run in list_runs(place)]


def find_run(
    folder: str | Path,  # folder with checkpoints, or the folder above
) -> RecordedRun:
    "Return the newest run in a folder; raise `CheckpointError` if there is none, or only in several folders below."
    folders = _list_folders(folder)
    near = [place for place in (Path(folder), Path(folder, FOLDER)) if place in folders]
    if not near and len(folders) > 1:
        names = ', '.join(map(str, folders[:5]))
        raise CheckpointError(f'{folder} has runs in {len(folders)} folders: pass one of {names}.')
    return list_runs([*near, *folders][0])[0]


def _list_folders(folder: str | Path) -> list[Path]:
    "Return the folders with checkpoints, or raise `CheckpointError`."
    if not Path(folder).is_dir():
        raise CheckpointError(f'{folder} is not a folder: pass the folder of a run.')
    folders = sorted({path.parent for path in Path(folder).rglob('*.ckpt')})
    if not folders:
        raise CheckpointError(
            f'There is no checkpoint in {folder} or below it: train with the callback `Checkpoint()`.'
        )
    return folders


# -- text ------------------------------------------------------------------------------------------


def describe_run(run: RecordedRun) -> str:
    "Return the checkpoints of a run, its history and its end as text."
    callbacks = ', '.join(run.info['callback_names'].values())
    title = f'{run.folder}, from batch {run.first}, callbacks {callbacks}'
    parts = [title, _list_checkpoints(run), format_history(read_history(run)), describe_end(run)]
    return '\n\n'.join(part for part in parts if part)


def _list_checkpoints(run: RecordedRun) -> str:
    "Return a table of the checkpoints, newest first, with the monitored value if there is one."
    monitor = run.info.get('monitor')
    head = ['checkpoint', 'batches', 'epochs', *([monitor] if monitor else [])]
    rows = []
    for entry in run.checkpoints:
        info = entry.info
        row = [entry.path.name, str(info['ba']), f'{info["time"]["ep"]:g}']
        rows.append([*row, *([format_cell(info.get('value'))] if monitor else [])])
    return text_table([head, *rows], right=range(1, len(head)))


def read_history(run: RecordedRun) -> list[dict[str, Any]]:
    "Return the rows of a run; empty without a Recorder. Rows of earlier fits of its Learner are left out."
    recorder = run.read_recorder()
    rows: list[dict[str, Any]] = recorder.get('history', [])
    return [row for row in rows if row['fit'] == recorder['n_fits'] - 1]


def format_history(history: Rows) -> str:
    "Return a history as a table of text; empty without rows."
    names = [
        name for name in dict.fromkeys(name for row in history for name in row) if name != 'fit'
    ]
    rows = [[_format_value(name, row.get(name)) for name in names] for row in history]
    return text_table([names, *rows], right=range(len(names))) if rows else ''


def _format_value(name: str, value: Any) -> str:
    is_time = name == 'time' and value is not None
    return format_seconds(value) if is_time else format_cell(value)


def describe_end(run: RecordedRun) -> str:
    "Return a sentence on how a run ended, as far as its newest checkpoint shows."
    info = run.info
    n = info['time']['ep']
    place = f'after {info["ba"]} batches ({n:g} epoch{"" if n == 1 else "s"})'
    if not run.has_ended():
        return (
            f'The newest checkpoint is within the fit, {place}: the run was killed or interrupted, or is running. '
            '`resume=True` continues it.'
        )
    if not read_state(run.checkpoints[0].path)[0]['loop']['stopping']:
        return f'It ended {place}, its last epoch.'
    by = next((e.info['stopped_by'] for e in run.checkpoints if e.info.get('stopped_by')), '')
    return f'It was stopped {place}{f" by {by}" if by else ""}.'


def compare_histories(a: RecordedRun, b: RecordedRun) -> str:
    "Return the histories of two runs side by side, and a sentence with the first difference."
    runs = {'A': a, 'B': b}
    histories = {name: read_history(run) for name, run in runs.items()}
    titles = [f'{name}: {run.folder}. {describe_end(run)}' for name, run in runs.items()]
    table = _join_histories(histories)
    return '\n\n'.join(['\n'.join(titles), table, _describe_other_row(*histories.values())])


def _join_histories(histories: Mapping[str, Rows]) -> str:
    "Return a table with the columns of several histories next to each other."
    rows = [row for history in histories.values() for row in history]
    names = [n for n in dict.fromkeys(n for row in rows for n in row) if n not in ('fit', 'epoch')]
    head = ['epoch', *(f'{name} {run}' for name in names for run in histories)]
    lines = []
    for epoch in range(max(map(len, histories.values()))):
        line = [str(epoch)]
        for name in names:
            for history in histories.values():
                row = history[epoch] if epoch < len(history) else {}
                line.append(_format_value(name, row.get(name)))
        lines.append(line)
    return text_table([head, *lines], right=range(len(head)))


def _describe_other_row(a: Rows, b: Rows) -> str:
    "Return a sentence with the first value that differs."
    for i, name in find_other_row(a, b, 0.0):
        return f'First difference: {name} of epoch {i} ({a[i][name]!r} and {b[i][name]!r}).'
    n = min(len(a), len(b))
    more = '' if len(a) == len(b) else f' A has {len(a)} rows, B has {len(b)}.'
    return f'The first {n} rows are equal in all columns that both have, except for times.{more}'


# -- pictures --------------------------------------------------------------------------------------


def plot_run(
    run: RecordedRun,
    path: str | Path,  # file to write, PNG by default
) -> Path:
    "Draw the losses by batch and the history of a run into a file. Raises `CheckpointError` without recorded losses."
    recorder = run.read_recorder()
    losses = run.read_record().losses
    if not losses:
        raise CheckpointError(
            f'The run in {run.folder} has recorded no losses: train with `Recorder`, as by default.'
        )
    history = read_history(run)
    panels = make_panels(history, _list_loaders(run), lambda name: True) if history else {}
    axs = draw_panels({'': {}, **panels}, history) if panels else new_axes()
    smooth = AvgSmoothLoss()
    smooth.load_state_dict(recorder['smooth_loss'])
    axs[0].clear()
    axs[0].plot([*losses], [*losses.values()], color=color(0), linewidth=0.5, label='each batch')
    axs[0].plot([*losses], smooth.smooth, color=color(0), label='smoothed')
    axs[0].set(xlabel='batch', ylabel='training loss')
    axs[0].legend()
    path = Path(path).with_suffix(Path(path).suffix or '.png')
    axs.figure.savefig(path, dpi=130)
    pyplot().close(axs.figure)
    return path


def _list_loaders(run: RecordedRun) -> list[str]:
    "Return the names of the validation loaders of a run."
    loop = read_state(run.checkpoints[0].path)[0]['loop']
    return [*loop['evaluations']['evaluated']]


# -- functions by name -----------------------------------------------------------------------------


def load_function(
    name: str,  # 'package.module:function', or 'file.py:function'
) -> Callable[..., Any]:
    """Import a function; raise `OptionError` if there is none of this name.

    >>> load_function('learnkit.demo:digits').__name__
    'digits'
    """
    place, _, function = name.rpartition(':')
    if not place:
        raise OptionError(f'{name!r}: pass `module:function`, or `file.py:function`.')
    module = _load_file(place) if place.endswith('.py') else _import_module(place)
    found = getattr(module, function, None)
    if not callable(found):
        hint = did_you_mean(function, [n for n in vars(module) if callable(vars(module)[n])])
        raise OptionError(f'{place} has no function {function!r}.{hint}')
    result: Callable[..., Any] = found
    return result


def _load_file(path: str) -> ModuleType:
    "Import a file, which may import the modules next to it."
    file = Path(path).resolve()
    if not file.is_file():
        raise OptionError(f'There is no file {path}: pass `file.py:function`.')
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None  # it is a file of Python
    module = sys.modules[file.stem] = module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not f'{name}.'.startswith(f'{e.name}.'):
            raise  # the module itself needs another one
        raise OptionError(
            f'There is no module {name}: pass `module:function`, or `file.py:function`.'
        ) from e
