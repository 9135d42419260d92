"""A folder of checkpoints: how they are called, which of them is meant, and which may go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learnkit.checkpoint.file import read_info, read_state
from learnkit.checkpoint.own_files import check_own_files
from learnkit.core.errors import CheckpointError, DamagedError, did_you_mean
from learnkit.core.validation import warn_user

__all__ = ['Entry', 'Found', 'entries', 'find', 'next_path', 'number_of', 'superfluous']

SUFFIX = '.ckpt'
_NAME = re.compile(r'([0-9]+)-.*' + re.escape(SUFFIX))

# a checkpoint's file, its state, and what the file says
Found = tuple[Path, Mapping[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    "A checkpoint's file."

    path: Path
    number: int  # later ones have higher numbers, over all runs of a folder
    info: dict[str, Any] = field(default_factory=dict)  # the file's own information; may be empty

    @property
    def run(self) -> tuple[Any, ...]:
        "Which run it is of, and what its value is of."
        return tuple(self.info.get(k) for k in ('run', 'monitor', 'mode'))

    @property
    def score(self) -> float | None:
        "The monitored value, so that lower is better; None where there is none."
        value = self.info.get('value')
        if not isinstance(value, (int, float)) or value != value:
            return None
        return -value if self.info.get('mode') == 'max' else value


def number_of(path: Path) -> int:
    "Return a checkpoint's number; 0 for other files."
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def entries(folder: Path) -> list[Entry]:
    "Return the checkpoints of a folder, newest first; what is in them is not verified."
    found = [(path, n) for path in folder.glob(f'*{SUFFIX}') if (n := number_of(path))]
    return sorted((Entry(path, n, _info(path)) for path, n in found), key=lambda e: -e.number)


def _info(path: Path) -> dict[str, Any]:
    try:
        return read_info(path)
    except (CheckpointError, OSError):
        return {}


def next_path(
    folder: Path,
    epoch: int,  # how many epochs are finished
    ba: int,  # and how many batches
) -> Path:
    "Return the name of the next checkpoint: its number, and where it was taken."
    number = max(map(number_of, folder.glob(f'*{SUFFIX}')), default=0) + 1
    return folder / f'{number:05}-ep{epoch}-ba{ba}{SUFFIX}'


def superfluous(
    there: Iterable[Entry],  # the checkpoints of one run
    keep_last: int | None,  # how many of the newest stay; None: all
    keep_best: int,  # how many of the best stay besides
) -> list[Path]:
    """Return the files that may go.

    >>> es = [Entry(Path(f'{i}'), i, {'value': v}) for i, v in enumerate([3., 1., 2., float('nan')])]
    >>> [path.name for path in superfluous(es, keep_last=1, keep_best=1)]
    ['0', '2']
    """
    if keep_last is None:
        return []
    there = sorted(there, key=lambda e: e.number)
    kept = {e.path for e in there[-keep_last:]}
    kept |= {e.path for e in best_first(there)[:keep_best]}
    return [e.path for e in there if e.path not in kept]


def best_first(there: Iterable[Entry]) -> list[Entry]:
    """Return those with a monitored value, the best first; of equal ones the earlier.

    Those of one run and one value are compared alone: of the latest that has one."""
    scored = [(e.run, score, e.number, e) for e in there if (score := e.score) is not None]
    latest = max(scored, key=lambda s: s[2], default=(None,))[0]
    return [e for run, *_, e in sorted(scored, key=lambda s: s[1:3]) if run == latest]


def find(
    which: Any,  # True or 'latest', 'best', or the path of a checkpoint or of a folder of them
    folder: Path,  # where they are looked for
    digests: bool = True,  # compare the digests of a checkpoint's other files, not only sizes
) -> Found | None:
    """Return the checkpoint that is meant, verified and loaded.

    The best is that of the latest run. Damaged ones are skipped with a warning that names them. None is returned where
    True is asked for and there is none yet; all else that is not there, or where all are damaged, is a
    `CheckpointError`.
    """
    if isinstance(which, (str, Path)) and which not in ('latest', 'best'):
        return _at_path(Path(which), folder, digests)
    if which is not True and not isinstance(which, str):
        raise CheckpointError(
            f"resume={which!r}: give True, 'latest', 'best', the path of a checkpoint, or a state "
            'from `learn.checkpoint_state()`.'
        )
    return _first_whole(folder, which, digests)


def _first_whole(folder: Path, which: Any, digests: bool) -> Found | None:
    there = entries(folder)
    candidates = best_first(there) if which == 'best' else there
    if not candidates and which is True:
        return None
    if not candidates:
        raise CheckpointError(
            f'There is no checkpoint in {folder.absolute()}.{_why_none(there, which)}'
        )
    wrong: list[str] = []
    for e in candidates:
        try:
            state, info = load_state(e.path, digests)
        except (DamagedError, FileNotFoundError) as error:
            wrong.append(f'{error}')  # removed since it was listed
        else:
            if wrong:
                warn_user(
                    '\n  '.join(
                        [f'Damaged checkpoints were skipped; {e.path.name} is used.', *wrong]
                    )
                )
            return e.path, state, info
    every = 'Every checkpoint with a monitored value' if which == 'best' else 'Every checkpoint'
    raise CheckpointError(
        '\n  '.join(
            [
                f'{every} in {folder.absolute()} is damaged. To start afresh, leave out '
                '`resume`, or use another folder.',
                *wrong,
            ]
        )
    )


def load_state(path: Path, digests: bool = True) -> tuple[Mapping[str, Any], dict[str, Any]]:
    "Load a checkpoint, and look at the files beside it."
    state, info = read_state(path)
    if 'parts' in state:
        from learnkit.checkpoint.dcp import check_parts  # of checkpoints with such files alone

        check_parts(path, state['parts'], digests)
    check_own_files(path, state.get('files', {}), digests)
    return state, info


def _why_none(there: list[Entry], which: Any) -> str:
    if which == 'best' and there:
        return " None has a monitored value: use `Checkpoint(monitor=...)`, or 'latest'."
    return ' `Checkpoint()` among the callbacks writes them; its `folder` says where.'


def _at_path(path: Path, folder: Path, digests: bool) -> Found:
    if not path.exists() and (folder / path).exists():
        path = folder / path
    if path.is_dir():
        found = _first_whole(path, 'latest', digests)
        assert found is not None  # an error otherwise
        return found
    if not path.exists():
        near = did_you_mean(path.name, ['latest', 'best', *(e.path.name for e in entries(folder))])
        raise CheckpointError(f'There is no checkpoint {path}.{near}')
    try:
        return path, *load_state(path, digests)
    except DamagedError as e:
        raise DamagedError(
            f'{e} `resume={str(path.parent)!r}` goes on from the newest whole one there.'
        ) from None
