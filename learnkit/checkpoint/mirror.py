# SPDX-License-Identifier: Apache-2.0
"""Copies of checkpoints in a store that outlives the machine, such as S3; fsspec opens its URL.

The store has the same files as the folder, under the same names. A checkpoint of the store is whole if its `.ckpt` is
there, which is uploaded last, and if the digests in it, of itself and of the files next to it, are right.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from learnkit.checkpoint.file import damaged_error, shorten_error
from learnkit.checkpoint.folder import (
    OWN_FILES,
    PARTS,
    SUFFIX,
    Entry,
    find_superfluous,
    parse_number,
    sort_by_score,
)
from learnkit.core.errors import CheckpointError, MissingExtraError, OptionError
from learnkit.core.files import atomic_write
from learnkit.core.optional import describe_missing
from learnkit.core.validation import warn_user

RETRY_S = 1.0  # wait after the first failure; it doubles with each further one
MAX_RETRY_S = 60.0
# how long the end of a fit waits for a store that fails; most clusters kill 30 s after SIGTERM
WAIT_S = 20.0


class Mirror:
    """Store with copies of the checkpoints of a folder.

    Raises `OptionError` for an invalid URL, and `MissingExtraError` if the library of its file system is missing.
    """

    def __init__(
        self,
        url: str,  # folder of the store, such as 's3://bucket/run'
    ) -> None:
        protocol, separator, path = str(url).partition('://')
        if not isinstance(url, str) or not separator or not path.strip('/'):
            raise OptionError(
                f"mirror={url!r}: give the URL of a folder, such as 's3://bucket/run'."
            )
        from fsspec import get_filesystem_class

        try:
            get_filesystem_class(protocol)
        except ValueError:
            raise OptionError(
                f"mirror={url!r}: fsspec has no file system {protocol!r}. Give a URL such as 's3://bucket/run'."
            ) from None
        except ImportError as e:
            library = getattr(e.__cause__, 'name', None) or protocol
            missing = describe_missing(f'Checkpoint(mirror={url!r})', library)
            raise MissingExtraError(missing, name=library) from e
        self.url = url.rstrip('/')

    def open(self) -> tuple[Any, str]:
        "Return the file system, which fsspec caches for each thread, and the path of the folder in it."
        from fsspec.core import url_to_fs

        is_local = self.url.startswith(('file:', 'local:'))
        fs, root = url_to_fs(self.url, **({'auto_mkdir': True} if is_local else {}))
        return fs, root.rstrip('/')

    def list_names(self) -> list[str]:
        "Return the names of files and folders in the store."
        fs, root = self.open()
        fs.invalidate_cache()
        with suppress(FileNotFoundError):
            return [path.rstrip('/').rpartition('/')[2] for path in fs.ls(root, detail=False)]
        return []

    def entries(
        self,
        folder: Path,  # folder of the local files
        with_info: bool,  # whether to read the headers of the files
    ) -> list[Entry]:
        "Return the checkpoints of the store, newest first, with the paths that they have in `folder`."
        numbers = {name: parse_number(Path(name)) for name in self.list_names()}
        found = [
            Entry(folder / name, n, self._read_info(name) if with_info else {})
            for name, n in numbers.items()
            if n
        ]
        return sorted(found, key=lambda e: -e.number)

    def _read_info(self, name: str) -> dict[str, Any]:
        "Return the `info` in the header of a checkpoint's file, without reading the rest; {} for a damaged file."
        fs, root = self.open()
        path = f'{root}/{name}'
        size = int.from_bytes(fs.cat_file(path, start=0, end=8), 'little')
        try:
            header = json.loads(fs.cat_file(path, start=8, end=8 + size))
            return dict(json.loads(header['__metadata__']['info']))
        except (ValueError, KeyError, TypeError):
            return {}

    def add_entries(
        self,
        local: list[Entry],  # checkpoints of the folder, newest first
        folder: Path,
        which: Any,  # argument of `fit(resume=...)`
    ) -> list[Entry]:
        """Return the checkpoints of the folder and the others of the store, newest first; the folder's come first.

        If the store cannot be read, a warning is issued; raises `CheckpointError` if the folder is empty, too.
        """
        try:
            stored = self.entries(folder, with_info=which == 'best')
        except Exception as e:  # the libraries' errors have no common base class
            problem = f'{self.url} cannot be read ({describe_error(e)})'
            if not local:
                fix = 'Make it reachable, or train without `resume`'
                raise CheckpointError(f'{problem}, and {folder} has no checkpoint. {fix}.') from e
            warn_user(f'{problem}: the newest checkpoint of {folder} is used.')
            return local
        names = {e.path.name for e in local}
        others = [e for e in stored if e.path.name not in names]
        return sorted([*local, *others], key=lambda e: -e.number)

    def download(self, path: Path) -> None:
        "Fetch a checkpoint to its path in the folder, the `.ckpt` last. Raises `OSError` if that fails."
        try:
            fs, root = self.open()
            for suffix in (PARTS, OWN_FILES):
                for stored in fs.find(f'{root}/{path.with_suffix(suffix).name}'):
                    name = stored.removeprefix(f'{root}/')
                    if '..' in Path(name).parts:
                        raise damaged_error(path, f'it has a file {name!a}')
                    with atomic_write(path.parent / name) as tmp:
                        fs.get_file(stored, str(tmp))
            with atomic_write(path) as tmp:
                fs.get_file(f'{root}/{path.name}', str(tmp))
        except CheckpointError:
            raise
        except Exception as e:
            raise OSError(f'{self.url} fails ({describe_error(e)})') from e

    def upload(self, path: Path) -> None:
        "Copy a checkpoint to the store, its `.ckpt` last."
        fs, root = self.open()
        folders = [path.with_suffix(suffix) for suffix in (PARTS, OWN_FILES)]
        files = [file for folder in folders for file in sorted(folder.rglob('*'))]
        for file in [*files, path]:
            if file.is_file():
                fs.put_file(str(file), f'{root}/{file.relative_to(path.parent).as_posix()}')

    def remove(self, name: str) -> None:
        "Remove a checkpoint from the store, its `.ckpt` first."
        fs, root = self.open()
        with suppress(FileNotFoundError):
            fs.rm_file(f'{root}/{name}')
        for suffix in (PARTS, OWN_FILES):
            folder = f'{root}/{Path(name).with_suffix(suffix)}'
            if fs.exists(folder):
                fs.rm(folder, recursive=True)

    def sweep(self) -> None:
        "Remove the folders of checkpoints whose upload was interrupted."
        names = self.list_names()
        folders = [Path(n) for n in names if Path(n).suffix in (PARTS, OWN_FILES)]
        for folder in folders:
            name = folder.with_suffix(SUFFIX).name
            if parse_number(Path(name)) and name not in names:
                self.remove(name)


class Uploader:
    """Thread that uploads the newest checkpoint of a run, then its best ones, and removes superfluous ones.

    The thread looks up what is missing in the store after each upload, so nothing queues: while an upload is slow, only
    the newest checkpoint waits. It tries again after failures. The first failure of each kind is a warning, issued by
    `warn` in the thread that trains.
    """

    def __init__(
        self,
        mirror: Mirror,
        folder: Path,  # folder of the local files
        run: str,  # id of the run, whose checkpoints may be removed
        keep_last: int | None,
        keep_best: int,
    ) -> None:
        self.mirror = mirror
        self.folder = folder
        self.run = run
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.newest_before = (
            0  # number of the newest checkpoint that was in the store before this fit
        )
        self._stored: list[Entry] | None = None  # checkpoints of the store; None before it was read
        self._kept: list[Entry] = []  # checkpoints of this run in the folder
        self._reading: Path | None = None  # file whose upload runs
        self._is_busy = False
        self._deadline: float | None = (
            None  # time from which a failing store is no longer waited for
        )
        self._is_closed = False
        self._failures = 0  # failures in a row
        self._messages: dict[str, str] = {}  # warnings by the type of error; '' for issued ones
        self._changed = threading.Condition()
        self._hurry = threading.Event()  # ends a wait between tries
        self._thread = threading.Thread(target=self._run, name='checkpoint-mirror', daemon=True)

    def start(self, kept: Iterable[Entry]) -> None:
        "Look up what the store has, and begin to upload what the run has kept so far."
        try:
            self._read_store()
        except Exception as e:
            self._note_failure(e)
        self.warn()
        self.push(kept)
        self._thread.start()

    def push(self, kept: Iterable[Entry]) -> Path | None:
        "Set the checkpoints that the folder keeps; return the file that is being read and must not be removed yet."
        with self._changed:
            self._kept = sorted(kept, key=lambda e: e.number)
            self._changed.notify_all()
            return self._reading

    def warn(self) -> None:
        "Issue the warnings of the failures since the last call."
        for kind, text in list(self._messages.items()):
            if text:
                self._messages[kind] = ''
                warn_user(text)

    def finish(self) -> bool:
        """Wait up to `WAIT_S` for the uploads. Return True if they are done, or if the store has failed for so long.

        The thread has ended then. A slow upload without failures is waited for by calling the method again.
        """
        with self._changed:
            if self._deadline is None:
                self._deadline = monotonic() + WAIT_S
                self._failures = 0
                self._hurry.set()
            if not self._changed.wait_for(self._is_done, WAIT_S):
                return False
            missing = self._find_missing()
        self.close()
        self.warn()
        if missing is not None:
            warn_user(
                f'{self.mirror.url} lacks {missing.path.name}, as uploads fail. The file is in {self.folder}: resume '
                'there, or copy it to the mirror.'
            )
        return True

    def _is_done(self) -> bool:
        is_late = self._deadline is not None and monotonic() >= self._deadline
        if is_late and self._failures and self._reading is None:
            return True
        return not self._is_busy and self._find_missing() is None

    def close(self) -> None:
        "End the thread, after the request that runs."
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._hurry.set()
        if not self._is_busy:
            self._thread.join()

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._upload_next()
                self._remove_superfluous()
            except Exception as e:  # the libraries' errors have no common base class
                self._note_failure(e)
                self._hurry.wait(min(RETRY_S * 2 ** (self._failures - 1), MAX_RETRY_S))
                self._hurry.clear()
            else:
                self._failures = 0

    def _wait_for_work(self) -> bool:
        "Wait until a checkpoint is missing in the store; return False when the thread has to end."
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or self._find_missing())
            self._is_busy = True
            return not self._is_closed

    def _find_missing(self) -> Entry | None:
        "Return the newest checkpoint, or else one of the best, that the store lacks."
        names = {e.path.name for e in self._stored or ()}
        for e in [*self._kept[-1:], *sort_by_score(self._kept)[: self.keep_best]]:
            if e.path.name not in names and e.number > self.newest_before:
                return e
        return None

    def _read_store(self) -> None:
        self.mirror.sweep()
        stored = self.mirror.entries(self.folder, with_info=self.keep_last is not None)
        self.newest_before = max((e.number for e in stored), default=0)
        self._stored = stored

    def _upload_next(self) -> None:
        if self._stored is None:
            self._read_store()
        with self._changed:
            missing = self._find_missing()
            self._reading = None if missing is None else missing.path
        if missing is None:
            return
        try:
            self.mirror.upload(missing.path)
            self._stored = [*(self._stored or ()), missing]
        finally:
            self._reading = None

    def _remove_superfluous(self) -> None:
        stored = self._stored or []
        own = [e for e in stored if e.info.get('run') == self.run]
        kept = {e.path for e in self._kept}  # or the thread would upload them again
        for path in find_superfluous(own, self.keep_last, self.keep_best):
            if path not in kept:
                self.mirror.remove(path.name)
                self._stored = [e for e in self._stored or () if e.path != path]

    def _note_failure(self, error: Exception) -> None:
        with self._changed:
            self._failures += 1
            self._changed.notify_all()
        text = (
            f'{self.mirror.url} fails ({describe_error(error)}). Checkpoints stay in {self.folder}; uploads are '
            'retried.'
        )
        self._messages.setdefault(type(error).__name__, text)


def describe_error(error: Exception) -> str:
    "Return type and message of a store's error, on one line."
    return f'{type(error).__name__}: {shorten_error(error)}'
