# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints: file names, finding a checkpoint to resume, selecting and removing files.

00012-ep3-ba1200.ckpt     the checkpoint, written last
00012-ep3-ba1200.parts/   shards of each rank (`learnkit.checkpoint.dcp`)
00012-ep3-ba1200.files/   files of callbacks, one folder each (`Callback.save_to_checkpoint`)
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fastcore.basics import noop

from learnkit.checkpoint.file import damaged_error, read_info, read_state
from learnkit.core.errors import CheckpointError, DamagedError, did_you_mean
from learnkit.core.files import as_local_path, flush_file, flush_folder, identify_version
from learnkit.core.validation import warn_user
from learnkit.core.watched import can_be_best
from learnkit.engine.callback import Callback
from learnkit.engine.resumed_run import CheckpointWriter
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.learner import Learner

# suffixes of a checkpoint's file, and of the folders of shards and of callbacks next to it
SUFFIX = '.ckpt'
SHARDS = '.parts'
OWN_FILES = '.files'
DEFERRED = ('model', 'loss_func', 'optimizer')  # entries that are read when they are loaded
_NAME = re.compile(r'([0-9]+)-.*' + re.escape(SUFFIX))

# digests of files that several checkpoints share, by device, inode, size and time
_shared_digests: dict[tuple[int, ...], str] = {}

# path of a checkpoint's file, its state, and the file's `info`
Found = tuple[Path, Mapping[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    "File of a checkpoint."

    path: Path
    number: int  # increasing with time, over all runs of a folder
    info: dict[str, Any] = field(default_factory=dict)  # the file's `info`; may be empty

    @property
    def run(self) -> tuple[Any, ...]:
        "The run that wrote the file, its monitored name and mode; scores of equal runs are comparable."
        return tuple(self.info.get(k) for k in ('run', 'monitor', 'mode'))

    @property
    def score(self) -> float | None:
        "The monitored value with its sign such that lower is better, or None."
        value = self.info.get('value')
        if not isinstance(value, (int, float)) or not can_be_best(value):
            return None
        return -value if self.info.get('mode') == 'max' else value


class Store(Protocol):
    "Copies of a folder's checkpoints, such as `learnkit.checkpoint.mirror.Mirror`."

    def add_entries(self, local: list[Entry], folder: Path, which: Any) -> list[Entry]: ...

    def download(self, path: Path) -> None: ...


def parse_number(path: Path) -> int:
    "Return a checkpoint's number; 0 for other files."
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def entries(folder: Path) -> list[Entry]:
    "Return the checkpoints of a folder, newest first; their content is not verified."
    numbers = {path: parse_number(path) for path in folder.glob(f'*{SUFFIX}')}
    checkpoints = [Entry(path, n, _read_info(path)) for path, n in numbers.items() if n]
    return sorted(checkpoints, key=lambda e: -e.number)


def _read_info(path: Path) -> dict[str, Any]:
    with suppress(CheckpointError, OSError):
        return read_info(path)
    return {}


def next_path(
    folder: Path,
    epoch: int,  # number of finished epochs
    ba: int,  # number of finished batches
    after: int = 0,  # number of the newest checkpoint elsewhere
) -> Path:
    "Return the path of the next checkpoint, named by its number, epochs and batches."
    number = max([after, *map(parse_number, folder.glob(f'*{SUFFIX}'))]) + 1
    return folder / f'{number:05}-ep{epoch}-ba{ba}{SUFFIX}'


def find_superfluous(
    checkpoints: Iterable[Entry],  # checkpoints of one run
    keep_last: int | None,  # number of newest checkpoints to keep; None: all
    keep_best: int,  # number of best checkpoints to keep in addition
) -> list[Path]:
    """Return the files that can be removed.

    >>> es = [Entry(Path(f'{i}'), i, {'value': v}) for i, v in enumerate([3., 1., 2., float('nan')])]
    >>> [path.name for path in find_superfluous(es, keep_last=1, keep_best=1)]
    ['0', '2']
    """
    if keep_last is None:
        return []
    checkpoints = sorted(checkpoints, key=lambda e: e.number)
    kept = {e.path for e in checkpoints[-keep_last:]}
    kept |= {e.path for e in sort_by_score(checkpoints)[:keep_best]}
    return [e.path for e in checkpoints if e.path not in kept]


def sort_by_score(checkpoints: Iterable[Entry]) -> list[Entry]:
    """Return the checkpoints with a monitored value, best first; of equal ones, the earlier first.

    Only the checkpoints of the latest run with a monitored value are returned.
    """
    scored = [e for e in checkpoints if e.score is not None]
    if not scored:
        return []
    latest_run = max(scored, key=lambda e: e.number).run
    comparable = [e for e in scored if e.run == latest_run]
    return sorted(comparable, key=lambda e: (e.score, e.number))


def find(
    which: Any,  # True, 'latest', 'best', or the path of a checkpoint or of a folder of checkpoints
    folder: Path,  # folder to search
    mirror: Store | None = None,  # store from which newer checkpoints are fetched into the folder
) -> Found | None:
    """Find, verify and load a checkpoint; large tensors of the entries `DEFERRED` stay in its file.

    'best' is the best checkpoint of the latest run. Checkpoints that are damaged or cannot be read are skipped, with a
    warning that names them. With `which=True` None is returned if no checkpoint exists. Raises `CheckpointError` for
    any other checkpoint that does not exist or cannot be read, and if no checkpoint of a folder can be read.
    """
    if isinstance(which, (str, Path)) and which not in ('latest', 'best'):
        return _load_path(as_local_path(which), folder)
    if which is not True and not isinstance(which, str):
        raise CheckpointError(
            f"resume={which!r}: pass True, 'latest', 'best', the path of a checkpoint, or a state "
            'from `learn.checkpoint_state()`.'
        )
    return _find_undamaged(folder, which, mirror)


def _find_undamaged(folder: Path, which: Any, mirror: Store | None = None) -> Found | None:
    checkpoints = entries(folder)
    if mirror is not None:
        checkpoints = mirror.add_entries(checkpoints, folder, which)
    candidates = sort_by_score(checkpoints) if which == 'best' else checkpoints
    if not candidates and which is True:
        return None
    if not candidates:
        hint = ' The callback `Checkpoint()` writes them to its `folder`.'
        if checkpoints:
            hint = " None has a monitored value: use `Checkpoint(monitor=...)`, or 'latest'."
        raise CheckpointError(f'There is no checkpoint in {folder.absolute()}.{hint}')
    errors: list[str] = []
    for e in candidates:
        try:
            if mirror is not None and not e.path.exists():
                mirror.download(e.path)
            found = e.path, *load_state(e.path, DEFERRED)
        except (DamagedError, OSError) as error:
            errors.append(_describe_error(error, e.path))
            continue
        if errors:
            summary = f'Checkpoints that cannot be read were skipped; {e.path.name} is used.'
            warn_user('\n  '.join([summary, *errors]))
        return found
    summary = (
        f'No checkpoint in {folder.absolute()} can be read. To start afresh, leave out `resume`, or '
        'use another folder.'
    )
    raise CheckpointError('\n  '.join([summary, *errors]))


def _describe_error(error: Exception, path: Path) -> str:
    if isinstance(error, DamagedError):
        return f'{error}'
    return f'{path} cannot be read: {getattr(error, "strerror", None) or error}.'


def load_state(
    path: Path,
    deferred: Collection[str] = (),  # entries whose large tensors stay in the file
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    "Load a checkpoint, and check the files next to its file."
    state, info = read_state(path, deferred)
    check_files(path, state)
    return state, info


def _load_path(path: Path, folder: Path) -> Found | None:
    if not os.path.lexists(path) and os.path.lexists(folder / path):
        path = folder / path
    if path.is_dir():
        return _find_undamaged(path, 'latest')
    if not os.path.lexists(path):
        names = [e.path.name for e in entries(folder)]
        suggestion = did_you_mean(path.name, ['latest', 'best', *names])
        raise CheckpointError(f'There is no checkpoint {path}.{suggestion}')
    try:
        return path, *load_state(path, DEFERRED)
    except DamagedError as e:
        raise DamagedError(
            f'{e} `resume={str(path.parent)!r}` resumes from the newest undamaged one there.'
        ) from None
    except OSError as e:
        raise CheckpointError(f'{_describe_error(e, path)} Nothing was loaded.') from e


# -- files next to a checkpoint's file -------------------------------------------------------------


def describe_file(path: Path) -> list[Any]:
    "Return size and digest of a file."
    with path.open('rb') as f:
        return [path.stat().st_size, hashlib.file_digest(f, 'sha256').hexdigest()]


def describe_shared_file(file: Path) -> list[Any]:
    "Return size and digest of a file; a file that checkpoints share is read once."
    found = file.stat()
    if found.st_nlink == 1:
        return describe_file(file)
    key = identify_version(found)
    if key not in _shared_digests:
        _shared_digests[key] = describe_file(file)[1]
    return [found.st_size, _shared_digests[key]]


def file_has_size(path: Path, size: int) -> bool:
    "Return True if a file exists and has the given size in bytes."
    return path.is_file() and path.stat().st_size == size


def check_files(
    path: Path,  # file of the checkpoint
    state: Mapping[str, Any],  # its state, with size and digest of the files, by their paths
) -> None:
    "Raise `DamagedError` if a file in the folders next to a checkpoint's file is missing or damaged."
    shards = state.get('parts', {'files': {}})['files']
    for suffix, files in ((SHARDS, shards), (OWN_FILES, state.get('files', {}))):
        folder = path.with_suffix(suffix)
        if files and not folder.is_dir():
            what = f'the folder {folder.name} next to it is missing. Copy the folder together with the file'
            raise damaged_error(path, what)
        for name, (size, digest) in files.items():
            file = folder / name
            if not file_has_size(file, size) or describe_file(file)[1] != digest:
                what = (
                    f'{ascii(f"{folder.name}/{name}")[:120]} is missing, or its bytes have changed'
                )
                raise damaged_error(path, what)


def has_own_files(cb: Any) -> bool:
    "Return True for a callback that writes files into a checkpoint."
    return (
        isinstance(cb, Callback) and type(cb).save_to_checkpoint is not Callback.save_to_checkpoint
    )


def write_own_files(
    learn: Learner,
    path: Path,  # the file that the checkpoint will have
) -> dict[str, list[Any]]:
    """Let callbacks write their files. Return size and SHA-256 of each file, by its path in the folder.

    An interrupted write leaves a folder without a checkpoint's file. `sweep_folders` removes it.
    """
    callbacks = learn.parts.callbacks
    writers = [cb for cb in callbacks if has_own_files(cb)]
    if not writers:
        return {}
    folder = path.with_suffix(OWN_FILES)
    shutil.rmtree(folder, ignore_errors=True)
    for cb in writers:
        own = folder / callbacks.keys[id(cb)]
        own.mkdir(parents=True)
        cb.save_to_checkpoint(own)
    files = [file for file in sorted(folder.rglob('*')) if file.is_file()]
    for file in files:
        flush_file(file)
        flush_folder(file.parent)
    return {file.relative_to(folder).as_posix(): describe_shared_file(file) for file in files}


def read_own_files(
    learn: Learner,
    path: Path,  # the checkpoint's file
) -> None:
    "Let callbacks read their files. Callbacks without `save_to_checkpoint` get the folder of the checkpoints."
    for cb in learn.cbs:
        read = getattr(cb, 'resume_from_checkpoint', None)
        if read is None:
            continue
        if not has_own_files(cb):
            read(path.parent, learn.model)
            continue
        own = path.with_suffix(OWN_FILES) / learn.parts.callbacks.keys[id(cb)]
        if own.is_dir():  # the callback may be newer than the checkpoint
            read(own, learn.model)


def find_other_files(learn: Learner) -> list[str]:
    """Return the callbacks with files that no checkpoint holds, each with the first file's name.

    These are callbacks without `save_to_checkpoint` that have an attribute that is a `Path`, an open file, or the name
    of an existing file; and loggers that write to a folder. What a service keeps is not lost.
    """
    found = []
    for cb in learn.cbs:
        is_kept = has_own_files(cb) or trait_of(cb, 'logs_to_service')
        if is_kept or isinstance(cb, CheckpointWriter):
            continue
        own = getattr(cb, 'wrapped', cb)  # of a callback of another library
        values = list(getattr(own, '__dict__', {}).values())
        if trait_of(cb, 'writes_files'):
            values.append((trait_of(cb, 'where') or noop)())
        names = [name for name in map(_find_file_name, values) if name]
        if names:
            found.append(f'{type(own).__name__} ({names[0]})')
    return found


def _find_file_name(value: Any) -> str:
    "Return the name of a file: a path, an open file, or a string that names an existing file; '' for other values."
    if isinstance(value, Path):
        return str(value)
    name = value.name if isinstance(value, io.IOBase) and hasattr(value, 'name') else value
    return name if isinstance(name, str) and os.path.isfile(name) else ''


# -- removing --------------------------------------------------------------------------------------


def remove_checkpoint(path: Path) -> None:
    "Remove a checkpoint's file, and the folders that belong to it."
    path.unlink(missing_ok=True)
    for suffix in (SHARDS, OWN_FILES):
        shutil.rmtree(path.with_suffix(suffix), ignore_errors=True)


def sweep_folders(folder: Path) -> list[Path]:
    "Remove and return the folders without a checkpoint's file. The caller must hold the lock of `folder`."
    stale = [
        p
        for p in sorted(folder.iterdir())
        if p.suffix in (SHARDS, OWN_FILES)
        and p.is_dir()
        and not p.is_symlink()
        and re.match(r'\d+-', p.name)
        and not p.with_suffix(SUFFIX).exists()
    ]
    for p in stale:
        shutil.rmtree(p, ignore_errors=True)
    return stale
