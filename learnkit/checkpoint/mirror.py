# SPDX-License-Identifier: Apache-2.0
"""Copies of checkpoints in a store that outlives the machine, such as S3; fsspec opens its URL.

The store has the same files as the folder, under the same names. A checkpoint of the store is complete if its
`.ckpt`, uploaded last, exists, and if the digests in it, of itself and of the files next to it, are right.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from learnkit.checkpoint.file import shorten_error
from learnkit.checkpoint.folder import (
    OWN_FILES,
    SHARDS,
    SUFFIX,
    Entry,
    find_superfluous,
    parse_number,
    sort_by_score,
)
from learnkit.core.errors import CheckpointError, DamagedError, MissingExtraError, OptionError
from learnkit.core.files import atomic_write
from learnkit.core.optional import describe_missing
from learnkit.core.validation import warn_user

# what a store raises in the thread that trains; the libraries' errors have no common base class, and the cancellation
# of one of their requests is not an `Exception`. In the thread of uploads nothing else can be meant by any exception.
STORE_ERRORS = (Exception, asyncio.CancelledError)
# answers of a store that no waiting changes: no such bucket, no access, a file in place of the folder, invalid
# options, a missing library
REFUSALS = (
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    FileExistsError,
    ValueError,
    TypeError,
    ImportError,
)
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library

RETRY_S = 1.0  # wait after the first failure; it doubles with each further one
MAX_RETRY_S = 15.0
# piece of the wait for the last upload: longer than `MAX_RETRY_S`, and most clusters kill 30 s after SIGTERM
WAIT_S = 20.0


class Mirror:
    """Store with copies of the checkpoints of a folder.

    Raises `OptionError` for an invalid URL, and `MissingExtraError` if the library of its file system is missing.
    """

    def __init__(
        self,
        url: str,  # folder of the store, such as 's3://bucket/run'
    ) -> None:
        from fsspec import get_filesystem_class

        protocol, _, path = str(url).partition('://')
        try:
            if not path.strip('/'):
                raise ValueError('no folder')
            get_filesystem_class(protocol)
        except ValueError as e:
            raise OptionError(
                f"mirror={url!r} ({e}): pass the URL of a folder, such as 's3://bucket/run'."
            ) from None
        except ImportError as e:
            library = getattr(e.__cause__, 'name', None) or protocol
            missing = describe_missing(f'Checkpoint(mirror={url!r})', library)
            raise MissingExtraError(missing, name=library) from e
        self.url = url.rstrip('/')
        self._skipped: set[str] = set()  # names of checkpoints in warnings

    def open(self) -> tuple[Any, str]:
        "Return the file system, which fsspec caches for each thread, and the path of the folder in it."
        from fsspec.core import url_to_fs

        is_local = self.url.startswith(('file:', 'local:'))
        fs, root = url_to_fs(self.url, **({'auto_mkdir': True} if is_local else {}))
        return fs, root.rstrip('/')

    def check(self) -> None:
        """Write a small object to the store, and remove it.

        Raises `CheckpointError` if the store refuses it, as for a bucket that does not exist. A store that does not
        answer raises its own error: it may answer later.
        """
        try:
            fs, root = self.open()
            probe = f'{root}/.probe-{token_hex(4)}'
            fs.pipe_file(probe, b'learnkit')
        except STORE_ERRORS as e:
            if not is_refusal(e):
                raise
            raise CheckpointError(
                f'mirror={self.url!r} cannot be written ({describe_error(e)}). Check the URL, that the bucket exists, '
                'and the credentials; or leave out `mirror`. Nothing was trained.'
            ) from e
        with suppress(Exception):  # a store may refuse to remove objects
            fs.rm_file(probe)

    def list_sizes(self) -> dict[str, int]:
        "Return the sizes in bytes of the files and folders in the store, by name; 0 for a folder."
        fs, root = self.open()
        fs.invalidate_cache()
        try:
            listed = fs.ls(root, detail=True)
        except FileNotFoundError:
            return {}
        return {Path(found['name']).name: int(found.get('size') or 0) for found in listed}

    def entries(
        self,
        folder: Path,  # folder of the local files
        with_info: bool,  # whether to read the headers of the files
    ) -> tuple[list[Entry], dict[str, BaseException]]:
        """Return the checkpoints of the store, with the paths that they have in `folder`, and errors by name.

        A checkpoint that cannot be read is an entry without `info`, and has an error.
        """
        found: list[Entry] = []
        errors: dict[str, BaseException] = {}
        for name, size in self.list_sizes().items():
            number = parse_number(Path(name))
            if not number:
                continue
            info: dict[str, Any] = {}
            if with_info:
                try:
                    info = self._read_info(name, size)
                except (ConnectionError, TimeoutError):
                    raise  # of the store, not of this object
                except STORE_ERRORS as e:
                    errors[name] = e
            found.append(Entry(folder / name, number, info))
        return found, errors

    def _read_info(
        self,
        name: str,
        size: int,  # size of the object, as listed
    ) -> dict[str, Any]:
        """Return the `info` in the header of a checkpoint's file, without reading the rest.

        Raises `DamagedError` for a file without a valid header, and the store's errors.
        """
        fs, root = self.open()
        length = int.from_bytes(fs.cat_file(f'{root}/{name}', start=0, end=8), 'little')
        if not 0 < length <= min(size - 8, MAX_HEADER):
            raise DamagedError(f'it has {size} bytes, and a header of {length}')
        header = fs.cat_file(f'{root}/{name}', start=8, end=8 + length)
        try:
            return dict(json.loads(json.loads(header)['__metadata__']['info']))
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise DamagedError(f'its header cannot be read: {shorten_error(e)}') from None

    def add_entries(
        self,
        local: list[Entry],  # checkpoints of the folder, newest first
        folder: Path,
        which: Any,  # argument of `fit(resume=...)`
    ) -> list[Entry]:
        """Return the checkpoints of the folder and the others of the store, newest first; the folder's come first.

        Checkpoints of the store that cannot be read are named in a warning. If the store does not answer, a warning is
        issued; raises `CheckpointError` if it refuses access, or if the folder is empty, too.
        """
        try:
            self.check()
            stored, errors = self.entries(folder, with_info=which == 'best')
        except CheckpointError:
            raise
        except STORE_ERRORS as e:
            problem = f'{self.url} cannot be read ({describe_error(e)})'
            if not local:
                fix = 'Make it reachable, or train without `resume`'
                raise CheckpointError(f'{problem}, and {folder} has no checkpoint. {fix}.') from e
            warn_user(f'{problem}: the newest checkpoint of {folder} is used.')
            return local
        skipped = self.describe_skipped(errors)
        if skipped:
            warn_user(skipped)
        names = {e.path.name for e in local}
        others = [e for e in stored if e.path.name not in names]
        return sorted([*local, *others], key=lambda e: -e.number)

    def describe_skipped(self, errors: Mapping[str, BaseException]) -> str:
        "Return the warning for checkpoints that `entries` could not read; each is named once, '' if all were."
        new = {name: e for name, e in errors.items() if name not in self._skipped}
        self._skipped.update(new)
        if not new:
            return ''
        named = '\n  '.join(f'{name}: {describe_error(e)}' for name, e in new.items())
        return f'{self.url} has checkpoints that cannot be read. They are skipped:\n  {named}'

    def download(self, path: Path) -> None:
        "Fetch a checkpoint to its path in the folder, the `.ckpt` last. Raises `OSError` if that fails."
        try:
            fs, root = self.open()
            for suffix in (SHARDS, OWN_FILES):
                for stored in fs.find(f'{root}/{path.with_suffix(suffix).name}'):
                    name = stored.removeprefix(f'{root}/')
                    if '..' in Path(name).parts:
                        raise ValueError(f'{name!a} is outside of it')
                    with atomic_write(path.parent / name) as tmp:
                        fs.get_file(stored, str(tmp))
            with atomic_write(path) as tmp:
                fs.get_file(f'{root}/{path.name}', str(tmp))
        except STORE_ERRORS as e:
            self._skipped.add(path.name)  # the caller names it
            raise OSError(f'{self.url} fails ({describe_error(e)})') from e

    def upload(self, path: Path) -> None:
        "Copy a checkpoint to the store, its `.ckpt` last."
        fs, root = self.open()
        folders = [path.with_suffix(suffix) for suffix in (SHARDS, OWN_FILES)]
        files = [file for folder in folders for file in sorted(folder.rglob('*'))]
        for file in [*files, path]:
            if file.is_file():
                fs.put_file(str(file), f'{root}/{file.relative_to(path.parent).as_posix()}')

    def remove(self, name: str) -> None:
        "Remove a checkpoint from the store, its `.ckpt` first."
        fs, root = self.open()
        for suffix in (SUFFIX, SHARDS, OWN_FILES):
            path = f'{root}/{Path(name).with_suffix(suffix)}'
            if fs.exists(path):
                fs.rm(path, recursive=True)

    def sweep(self) -> None:
        "Remove the folders of checkpoints whose upload was interrupted."
        names = self.list_sizes()
        for path in map(Path, names):
            owner = path.with_suffix(SUFFIX)
            is_folder = path.suffix in (SHARDS, OWN_FILES) and parse_number(owner)
            if is_folder and owner.name not in names:
                self.remove(owner.name)


@dataclass
class Uploader:
    """Thread that uploads the newest checkpoint of a run, then its best ones, and removes superfluous ones.

    The thread looks up what is missing in the store after each upload, so nothing queues: while an upload is slow, only
    the newest checkpoint waits. It tries again after failures. The first failure of each kind is a warning, issued by
    `warn` in the thread that trains.
    """

    mirror: Mirror
    folder: Path  # folder of the local files
    run: str  # id of the run, whose checkpoints may be removed
    keep_last: int | None
    keep_best: int
    newest_before: int = 0  # number of the newest checkpoint that was in the store before this fit
    _stored: list[Entry] | None = None  # checkpoints of the store; None before it was read
    _kept: list[Entry] = field(default_factory=list)  # checkpoints of this run in the folder
    _reading: Path | None = None  # file whose upload runs
    _failures: int = 0  # failures in a row
    _messages: dict[str, str] = field(default_factory=dict)  # warnings by type; '' for issued ones
    _is_ending: bool = False  # whether the thread ends when nothing is missing
    _closed: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None  # None: the store has refused access

    def start(self, kept: Iterable[Entry]) -> None:
        """Look up what the store has, and begin to upload what the run has kept so far.

        Raises `CheckpointError` if the store refuses access.
        """
        try:
            self.mirror.check()
            self._read_store()
        except CheckpointError:
            raise
        except STORE_ERRORS as e:
            self._note_failure(e)
        self.warn()
        self.push(kept)
        self._thread = threading.Thread(target=self._run, name='checkpoint-mirror', daemon=True)
        self._thread.start()

    def push(self, kept: Iterable[Entry]) -> Path | None:
        "Set the checkpoints that the folder keeps; return the file that is being read and must not be removed yet."
        with self._changed:
            self._kept = sorted(kept, key=lambda e: e.number)
            self._changed.notify()
            return self._reading

    def warn(self) -> None:
        "Issue the warnings of the failures since the last call."
        for kind, text in list(self._messages.items()):
            if text:
                self._messages[kind] = ''
                warn_user(text)

    def finish(self) -> bool:
        """Wait up to `WAIT_S` for the uploads, and return True if they are done, or if the store fails.

        A slow upload is waited for by calling the method again.
        """
        if self._thread is None:
            return True
        self._end()
        self._thread.join(WAIT_S)
        is_failing = self._failures > 0 and self._reading is None
        if self._thread.is_alive() and not is_failing:
            return False
        self.close()
        self.warn()
        missing = self._find_missing()
        if missing is not None:
            warn_user(
                f'{self.mirror.url} lacks {missing.path.name}: uploads fail. The file is in {self.folder}: resume '
                'there, or copy it to the mirror.'
            )
        return True

    def close(self) -> None:
        "End the thread, after the request that runs."
        self._closed.set()
        self._end()

    def _end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._upload_next()
                self._remove_superfluous()
                self._failures = 0
            except BaseException as e:  # no exception in this thread asks the program to end
                self._note_failure(e)
                wait_s = RETRY_S * 2 ** min(self._failures - 1, 10)
                self._closed.wait(min(wait_s, MAX_RETRY_S))

    def _wait_for_work(self) -> bool:
        "Wait until a checkpoint is missing in the store; return False when the thread has to end."
        with self._changed:
            self._changed.wait_for(lambda: self._is_ending or self._find_missing())
            return self._find_missing() is not None and not self._closed.is_set()

    def _find_missing(self) -> Entry | None:
        "Return the newest checkpoint, or else one of the best, that the store lacks."
        names = {e.path.name for e in self._stored or ()}
        for e in [*self._kept[-1:], *sort_by_score(self._kept)[: self.keep_best]]:
            if e.path.name not in names and e.number > self.newest_before:
                return e
        return None

    def _read_store(self) -> None:
        stored, errors = self.mirror.entries(self.folder, self.keep_last is not None)
        # a damaged file is named by a resume, and does not concern uploads
        denied = {name: e for name, e in errors.items() if not isinstance(e, DamagedError)}
        skipped = self.mirror.describe_skipped(denied)
        if skipped:
            self._messages['skipped'] = skipped
        self.mirror.sweep()
        self.newest_before = max((e.number for e in stored), default=0)
        self._stored = stored

    def _upload_next(self) -> None:
        if self._stored is None:
            self._read_store()
        with self._changed:
            missing = self._find_missing()
            self._reading = None if missing is None else missing.path
        try:
            if missing is not None:
                self.mirror.upload(missing.path)
                self._stored = [*(self._stored or ()), missing]
        finally:
            self._reading = None

    def _remove_superfluous(self) -> None:
        own = [e for e in self._stored or () if e.info.get('run') == self.run]
        kept = {e.path for e in self._kept}  # or the thread would upload them again
        for path in find_superfluous(own, self.keep_last, self.keep_best):
            if path not in kept:
                self.mirror.remove(path.name)
                self._stored = [e for e in self._stored or () if e.path != path]

    def _note_failure(self, error: BaseException) -> None:
        self._failures += 1
        text = (
            f'{self.mirror.url} fails ({describe_error(error)}). Checkpoints stay in {self.folder}; uploads are '
            'retried.'
        )
        self._messages.setdefault(type(error).__name__, text)


def is_refusal(error: BaseException) -> bool:
    """Return True for an error that no waiting changes: see `REFUSALS`, and missing credentials.

    >>> is_refusal(PermissionError('denied')), is_refusal(TimeoutError('no answer'))
    (True, False)
    """
    # the class of the libraries' errors for credentials differs, and so does its base class
    names = [cls.__name__ for cls in type(error).__mro__]
    return isinstance(error, REFUSALS) or any('Credential' in name for name in names)


def describe_error(error: BaseException) -> str:
    "Return type and message of a store's error, on one line."
    return f'{type(error).__name__}: {shorten_error(error)}'
