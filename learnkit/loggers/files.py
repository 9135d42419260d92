# SPDX-License-Identifier: Apache-2.0
"""Log to CSV files and files of JSON lines; each call writes whole lines to the operating system."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typing_extensions import override

from learnkit.core.errors import OptionError
from learnkit.core.files import as_local_path, atomic_write, check_file
from learnkit.core.time import Time
from learnkit.core.validation import warn_user
from learnkit.loggers.base import Logger, Rows
from learnkit.loggers.values import encode_png

_ELSEWHERE = 'To log, pass another `fname`, or move that file away.'


def read_log(
    path: str | Path,  # path of a file of `CSVLogger` or `JSONLinesLogger`
) -> list[dict[str, Any]]:
    """Return a log as one dict per step, with `step` and the logged values; `pandas.DataFrame` accepts the list.

    The unfinished last line of a killed process is skipped. Raises `OptionError` for a file that is not a log.
    """
    path = Path(path)
    rows = _find_logger_class(path).parse(path, _read_lines(path))
    return [row for row in rows if 'step' in row]


class _FileLogger(Logger):
    "Logger that writes lines to one file, and images and text to folders next to it."

    append: bool
    _suffixes: tuple[str, ...]

    def __init__(self, fname: str | Path, every: str | Time, append: bool) -> None:
        super().__init__(every)
        if as_local_path(fname).suffix not in self._suffixes:
            ends = ' or '.join(self._suffixes)
            raise OptionError(f'{fname!r}: {type(self).__name__} writes files that end in {ends}.')
        self.fname = fname
        self.append = append

    @override
    def where(self) -> Path:
        "Return the path of the file."
        return Path(os.path.realpath(self.learn.path / self.fname))

    def read_log(self) -> Any:
        """Return the log as a pandas DataFrame, with one row per step.

        Raises `OptionError` for a file of another format.
        """
        import pandas as pd

        return pd.DataFrame(read_log(self.where()))

    @override
    def check(self) -> None:
        path = self.where()
        check_file(path)
        if path.exists():
            self.parse(path, _read_lines(path, first_only=True))

    @override
    def open(self, keep: int | None) -> tuple[Any, int]:
        "Open the file to append after its last whole line, or after the last step to keep; drop the rest of the file."
        path = self.where()
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_new_log and not self.append:
            path.unlink(missing_ok=True)
        elif self._is_new_log and self.learn.run.starts_over and path.exists():
            before = path.with_name(f'{path.stem}-before{path.suffix}')
            path.replace(before)
            warn_user(f'{path} was of a run that no checkpoint continues: it is now {before.name}.')
        text = _read_lines(path) if path.exists() else ''
        rows = self.parse(path, text)
        kept = rows if keep is None else self._take_until(rows, keep)
        self._read_columns()
        if path.exists():
            with atomic_write(path) as tmp:
                tmp.write_text(self._format_file(kept), 'utf-8', newline='')
        return path, max((row['step'] for row in kept if 'step' in row), default=-1)

    @override
    def save_to_checkpoint(self, folder: Path) -> None:
        "Copy the log, which a resume on another machine continues."
        path = self.where()
        if path.exists():
            shutil.copyfile(path, folder / path.name)

    @override
    def resume_from_checkpoint(self, folder: Path, model: Any) -> None:
        "Restore a log that is missing here, or ends before the checkpoint."
        path = self.where()
        stored = folder / path.name
        if not (self.learn.world.is_first and stored.exists()):
            return
        if path.exists() and path.stat().st_size >= stored.stat().st_size:
            return
        with atomic_write(path) as tmp:
            shutil.copyfile(stored, tmp)

    def _take_until(self, rows: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
        "Return the rows up to a step, and the configuration after this step if the fit does not log it again."
        ends = [i + 1 for i, row in enumerate(rows) if row.get('step', step + 1) <= step]
        end = max(ends, default=0)
        has_params = not self._is_new_fit and any('params' in row for row in rows[end : end + 1])
        return rows[: end + has_params]

    @override
    def flush(self) -> None:
        if not self._handle.exists():
            return
        with self._handle.open('ab') as f:
            os.fsync(f.fileno())

    @override
    def write(self, rows: Rows) -> None:
        self._append([{'step': step, **values} for step, values in rows])

    def _append(self, rows: list[dict[str, Any]]) -> None:
        with self._handle.open('ab', buffering=0) as f:
            f.write(self._format_lines(rows).encode())  # one call, so that whole lines are written

    @override
    def log_images(self, step: int, name: str, images: Any) -> None:
        "Write `<file>.images/<name>-<step>-<i>.png`."
        for i, image in enumerate(images):
            self._make_path('images', f'{name}-{step}-{i}.png').write_bytes(encode_png(image))

    @override
    def log_text(self, step: int, name: str, text: str) -> None:
        "Write `<file>.texts/<name>-<step>.txt`."
        self._make_path('texts', f'{name}-{step}.txt').write_text(text, 'utf-8')

    def _make_path(self, kind: str, name: str) -> Path:
        "Return the path of a file in the folder of one kind of content, and create the folder."
        path = self.where()
        folder = path.with_name(f'{path.name}.{kind}')
        folder.mkdir(exist_ok=True)
        return folder / re.sub(r'[^\w.=+-]', '_', name)

    @staticmethod
    def parse(path: Path, text: str) -> list[dict[str, Any]]:
        "Return the rows of whole lines; raise `OptionError` for lines of another format."
        raise NotImplementedError

    def _read_columns(self) -> None:
        "Read the header of an existing file, if the format has one."

    def _format_lines(self, rows: list[dict[str, Any]]) -> str:
        "Return the lines of some rows."
        raise NotImplementedError

    def _format_file(self, rows: list[dict[str, Any]]) -> str:
        "Return the content of a file with these rows."
        return self._format_lines(rows)


class CSVLogger(_FileLogger):
    """Log to a CSV file: one row per step, and one column per name in the order of first appearance.

    A new name rewrites the file with one more column; all other rows are appended. The
    configuration is in `<file>.params.json`, images and text in `<file>.images/` and
    `<file>.texts/`. `read_log` reads the file.

    The log continues an existing file and its steps. `append=False` replaces the file at the first
    fit, unless a run is resumed. After a resume from an earlier checkpoint, the rows after that
    checkpoint are dropped. Raises `OptionError`, before training, for a path that cannot be written
    and for an existing file of another format.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=CSVLogger(every='5ba'))
    ...     with learn.no_bar(), learn: learn.fit(1)
    ...     for row in read_log(f'{folder}/metrics.csv'): print(*row)
    step loss lr mom
    step loss lr mom valid_loss epoch/epoch epoch/train_loss epoch/time
    """

    _suffixes = ('.csv',)

    def __init__(
        self,
        fname: str | Path = 'metrics.csv',  # path below `learn.path`, or an absolute path
        every: str | Time = '10ba',  # interval of losses and hyperparameters, as in `Logger`
        append: bool = True,  # whether to append to an existing file; False: replace it
    ) -> None:
        super().__init__(fname, every, append)
        self._columns: list[str] = []

    @override
    def log_params(self, params: dict[str, Any]) -> None:
        path = self.where()
        with atomic_write(path.with_name(f'{path.name}.params.json')) as tmp:
            tmp.write_text(json.dumps(params, indent=1), 'utf-8')

    @override
    def _append(self, rows: list[dict[str, Any]]) -> None:
        new = list(dict.fromkeys(name for row in rows for name in row if name not in self._columns))
        if not new:
            return super()._append(rows)
        path = self._handle
        before = self.parse(path, _read_lines(path)) if path.exists() else []
        self._columns += new
        with atomic_write(path) as tmp:
            tmp.write_text(self._format_file([*before, *rows]), 'utf-8', newline='')

    @override
    def _read_columns(self) -> None:
        path = self.where()
        header = _read_lines(path, first_only=True) if path.exists() else ''
        self._columns = next(csv.reader([header]))

    @override
    def _format_lines(self, rows: list[dict[str, Any]]) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator='\n')
        for row in rows:
            writer.writerow([row.get(name, '') for name in self._columns])
        return out.getvalue()

    @override
    def _format_file(self, rows: list[dict[str, Any]]) -> str:
        header = {name: name for name in self._columns}
        return self._format_lines([header, *rows]) if header else ''

    @staticmethod
    @override
    def parse(path: Path, text: str) -> list[dict[str, Any]]:
        reader = csv.reader(io.StringIO(text, newline=''))
        header = next(reader, ['step'])
        if header[:1] != ['step']:
            raise OptionError(
                f'{path} is not a log of CSVLogger: its first column is not `step`. {_ELSEWHERE}'
            )
        rows = []
        for row in reader:
            cells = zip(header, row, strict=False)
            rows.append({name: _as_number(cell) for name, cell in cells if cell != ''})
        return rows


class JSONLinesLogger(_FileLogger):
    """Log to a file of JSON lines: `{"step": 10, "loss": 0.5, ...}`, and `{"params": {...}}` for each fit.

    Values that are not finite are written as `NaN` or `Infinity`, which Python and pandas read.
    Images and text are in `<file>.images/` and `<file>.texts/`. Existing files and resumed runs are
    handled as by `CSVLogger`.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=JSONLinesLogger())
    ...     with learn.no_bar(), learn: learn.fit(2)
    ...     [row['step'] for row in read_log(f'{folder}/metrics.jsonl')]
    [10, 20]
    """

    _suffixes = ('.jsonl',)

    def __init__(
        self,
        fname: str | Path = 'metrics.jsonl',  # path below `learn.path`, or an absolute path
        every: str | Time = '10ba',  # interval of losses and hyperparameters, as in `Logger`
        append: bool = True,  # whether to append to an existing file; False: replace it
    ) -> None:
        super().__init__(fname, every, append)

    @override
    def log_params(self, params: dict[str, Any]) -> None:
        self._append([{'params': params}])

    @override
    def _format_lines(self, rows: Iterable[dict[str, Any]]) -> str:
        return ''.join(f'{json.dumps(row)}\n' for row in rows)

    @staticmethod
    @override
    def parse(path: Path, text: str) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in text.splitlines()]
        except ValueError as e:
            raise OptionError(f'{path} is not a log of JSONLinesLogger: {e}. {_ELSEWHERE}') from e


def _find_logger_class(path: Path) -> type[_FileLogger]:
    for cls in (CSVLogger, JSONLinesLogger):
        if path.suffix in cls._suffixes:
            return cls
    raise OptionError(f'{path} is not a log: logs end in .csv or .jsonl.')


def _read_lines(path: Path, first_only: bool = False) -> str:
    "Return the lines of a file that end in a newline, or its first line."
    with path.open('rb') as f:
        data = f.readline() if first_only else f.read()
    return data[: data.rfind(b'\n') + 1].decode('utf-8', 'replace')


def _as_number(text: str) -> Any:
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text
