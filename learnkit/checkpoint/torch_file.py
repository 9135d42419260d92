"""Read files of `torch.save` (`.pth`) by `torch.load(weights_only=True)`, after a check of the archive's checksums."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from learnkit.core.errors import WeightsError

__all__ = ['read_torch_file', 'find_damage']

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
    _check_kind(path)
    try:
        # torch accepts pairs, which its type annotation lacks
        with safe_globals(_SAFE_GLOBALS):  # type: ignore[arg-type]
            # `mmap=False` overrides torch's configuration: a mapped file that is cut short ends the process
            return torch.load(path, map_location=device or 'cpu', weights_only=True, mmap=False)
    except Exception as e:  # arbitrary bytes raise almost any type of error
        unsafe = _list_unsafe_names(path) if isinstance(e, UnpicklingError) else []
        if unsafe:
            # without torch's message, which explains how to run the code
            raise WeightsError(_explain_unsafe(path, unsafe)) from None
        reason = next(iter(str(e).splitlines()), '') or type(e).__name__
        if isinstance(e, UnpicklingError):
            reason = 'its pickle holds more than plain weights'
        raise WeightsError(
            f'{path} cannot be read as weights: {reason}. Nothing was loaded.'
        ) from None


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


def _check_kind(path: Path) -> None:
    "Raise `WeightsError` for a file that `torch.save` did not write."
    kind = ''
    names = []
    if is_zipfile(path):
        with ZipFile(path) as archive:
            names = archive.namelist()
    elif not _starts_with_pickle(path):
        kind = "no file of torch's: it holds no saved weights."
    if any(n.endswith('/models/model.json') for n in names):
        kind = (
            'a program that `learn.export` wrote, and no weights: run it by `torch.export.load(path).module()(x)`, '
            'if you trust it. What loads here is written by `learn.save` or `learn.save_learner`.'
        )
    if any('/code/' in n for n in names):
        kind = 'a TorchScript program, and no weights: run it by `torch.jit.load`.'
    if kind:
        raise WeightsError(f'{path} is {kind} Nothing was loaded.')


def _starts_with_pickle(path: Path) -> bool:
    with path.open('rb') as f:
        return f.read(1) == b'\x80'


def _list_unsafe_names(path: Path) -> list[str]:
    "Return the names of functions and classes that a pickle would call, without running the pickle."
    with safe_globals(_SAFE_GLOBALS):  # type: ignore[arg-type]  # as above
        try:
            names = get_unsafe_globals_in_checkpoint(path)
        except Exception:
            return []  # an old or a broken file: the caller has the error already
    return sorted(ascii(name[:80])[1:-1] for name in names)


def _explain_unsafe(path: Path, names: list[str]) -> str:
    listed_names = ', '.join(names[:5]) + (', ...' if len(names) > 5 else '')
    text = (
        f'{path} holds more than weights: loading it would run code ({listed_names}). '
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
