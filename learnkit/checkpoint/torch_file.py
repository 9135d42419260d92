# SPDX-License-Identifier: Apache-2.0
"""Read files of `torch.save` (`.pth`) by `torch.load(weights_only=True)`, after a check of the archive's checksums."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import ZipFile

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from learnkit.checkpoint.file import shorten_error
from learnkit.core.errors import WeightsError

_FOLDER = 0x10  # attribute of a record for which torch's reader returns uninitialized memory


class _Inert:
    "Placeholder for objects in fastai's files that are not tensors, so that none of their code runs."

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_SAFE_GLOBALS = [
    (_Inert, name)
    for name in (
        'fastcore.foundation.L',
        'numpy.dtype',
        'numpy.core.multiarray.scalar',
        'numpy._core.multiarray.scalar',
    )
]


def read_torch_file(
    path: Path,  # file written by any version of `torch.save`
    device: torch.device | str | None = None,  # device of the tensors; None: the CPU
) -> Any:
    """Return the content of a file.

    Raises `WeightsError` for a file that is damaged, that holds something else, or that would run code.
    """
    problem = find_damage(path)
    if problem:
        raise WeightsError(f'{path} is damaged: {problem}. Nothing was loaded.')
    try:
        # torch accepts pairs, which its type annotation lacks
        with safe_globals(_SAFE_GLOBALS):  # type: ignore[arg-type]
            # `mmap=False` overrides torch's configuration: a mapped file that is cut short ends the process
            return torch.load(path, map_location=device or 'cpu', weights_only=True, mmap=False)
    except Exception as e:  # arbitrary bytes raise almost any type of error
        # torch's own message explains how to run the code
        reason = 'it is damaged' if isinstance(e, UnpicklingError) else shorten_error(e)
        message = f'{path} cannot be read as weights: {reason}. Nothing was loaded.'
        names = _list_unsafe_names(path)
        raise WeightsError(_explain_unsafe(path, names) if names else message) from None


def find_damage(path: str | Path) -> str | None:
    """Return a description of what is wrong with an archive of `torch.save`, or None if it is undamaged.

    Every byte of a record is read and compared with its checksum. Files in another format, for
    example of torch before 1.6, have no checksums and count as undamaged.
    """
    with Path(path).open('rb') as f:
        start = f.read(2)
        if not start:
            return 'it is empty'
        if start != b'PK':
            return None
        try:
            with ZipFile(f) as archive:
                marked = [i.filename for i in archive.infolist() if i.external_attr & _FOLDER]
                bad = archive.testzip() or next(iter(marked), None)
        except Exception as e:  # arbitrary bytes raise almost any type of error
            return f'{e}'.lower()
    return f'record {bad!a} is not as it was written' if bad else None


def _list_unsafe_names(path: Path) -> list[str]:
    "Return the names of functions and classes that a pickle would call, without running the pickle."
    try:
        with safe_globals(_SAFE_GLOBALS):  # type: ignore[arg-type]  # as above
            return sorted(ascii(n[:80])[1:-1] for n in get_unsafe_globals_in_checkpoint(path))
    except Exception:
        return []  # an old or a broken file: the caller has the error already


def _explain_unsafe(path: Path, names: list[str]) -> str:
    text = (
        f'{path} holds more than weights: loading it would run code ({", ".join(names[:5])}). '
        'Nothing was loaded.'
    )
    if any(n.startswith('fastai.') for n in names):
        return (
            f"{text} It looks like a Learner that fastai's `learn.export` pickled. With fastai, load it and write "
            "`torch.save(learn.model.state_dict(), 'weights.pth')`; that file loads here."
        )
    if any(n.startswith('torch.nn.') for n in names):
        return f'{text} It looks like a whole pickled model: save `model.state_dict()` instead.'
    return text
