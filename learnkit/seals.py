"""The seal at the end of a checkpoint's file: what the file is about, and a digest of every byte before it.

    <the file's own bytes><JSON><length of the JSON, 8 bytes, little-endian><SHA-256 of all this, 32><MAGIC, 16>

What reads zip archives looks for their end from behind, and so reads a sealed archive as before."""
from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any, BinaryIO

from learnkit.errors import CheckpointError, DamagedError

__all__ = ['FORMAT', 'seal', 'read_info', 'body_size', 'verify']

FORMAT = 1                   # of the checkpoints that this version writes
MAGIC = b'learnkit-seal-01'
MAX_INFO = 60_000            # bytes of JSON: zip readers look for the archive's end in the last 64 kB alone

_LENGTH, _DIGEST = 8, 32
_AFTER = _LENGTH + _DIGEST + len(MAGIC)  # what stands behind the JSON
_CHUNK = 1 << 20


def seal(
    path: str | Path,       # a file that was written, not sealed yet
    info: dict[str, Any],   # what can be known of it without torch; JSON's types, and floats that are no numbers
) -> None:
    """Append the seal to a file. `info` gets the format's number, as `'format'`, unless it has one.

    Raises `CheckpointError` for an `info` that is too long or no JSON; the file is unchanged then.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, 'a')
    ...     _ = path.write_text('the content')
    ...     seal(path, {'epoch': 3})
    ...     verify(path)
    {'format': 1, 'epoch': 3}
    """
    try: text = json.dumps({'format': FORMAT, **info}, separators=(',', ':')).encode()
    except (TypeError, ValueError, RecursionError) as e:
        raise CheckpointError(f'What is written beside a checkpoint has to be JSON: {e}.') from None
    if len(text) > MAX_INFO:
        raise CheckpointError(f'{len(text):,} bytes of JSON cannot be written beside a checkpoint, {MAX_INFO:,} can.')

    with Path(path).open('r+b') as f:
        digest = hashlib.file_digest(f, 'sha256')  # leaves `f` at its end
        tail = text + len(text).to_bytes(_LENGTH, 'little')
        digest.update(tail)
        f.write(tail + digest.digest() + MAGIC)


def read_info(path: str | Path) -> dict[str, Any]:
    """Return what the seal says, without looking whether it is true: for listing a folder.

    Raises `FileNotFoundError`, and `DamagedError` where there is no seal."""
    with _opened(path) as f: return _parsed(_tail(f, path)[0], path)


def body_size(path: str | Path) -> int:
    "Return the number of bytes before the seal. Raises as `read_info` does."
    with _opened(path) as f: return _tail(f, path)[2]


def verify(path: str | Path) -> dict[str, Any]:
    """Read every byte of a sealed file, and return what the seal says.

    Raises `FileNotFoundError`, `DamagedError` for what is not as it was written, and `CheckpointError` for a format
    that this version does not know yet. Other threads go on meanwhile. A digest tells damage, not malice: whoever makes
    a file can make its seal.
    """
    with _opened(path) as f:
        text, digest, body = _tail(f, path)
        if _sha256(f, body + len(text) + _LENGTH) != digest:
            raise _damaged(path, 'its digest differs: bytes have changed since it was written')
    info = _parsed(text, path)
    _check_format(info, path)
    return info


def _opened(path: str | Path) -> BinaryIO:
    mode = (path := Path(path)).stat().st_mode
    if stat.S_ISDIR(mode): raise _damaged(path, 'it is a folder')
    if not stat.S_ISREG(mode): raise _damaged(path, 'it is no regular file')  # opening a pipe would wait for ever
    return path.open('rb', buffering=0)


def _tail(f: BinaryIO, path: str | Path) -> tuple[bytes, bytes, int]:
    "Return the JSON, the digest, and the number of bytes before them."
    size = f.seek(0, 2)
    if not size: raise _damaged(path, 'it is empty')
    f.seek(max(0, size - MAX_INFO - _AFTER))
    tail = f.read()
    if not tail.endswith(MAGIC):
        raise _damaged(path, 'it has no seal at its end: it was cut short, or is another kind of file')
    end = len(tail) - _AFTER
    length = int.from_bytes(tail[max(0, end):][:_LENGTH], 'little')
    if length > end: raise _damaged(path, 'its seal cannot be read')
    return tail[end - length:end], tail[end + _LENGTH:][:_DIGEST], size - _AFTER - length


def _sha256(f: BinaryIO, n_bytes: int) -> bytes:
    "Return the digest of the first bytes of a file."
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    f.seek(0)
    while n_bytes and (n := f.readinto(buffer[:n_bytes])):  # type: ignore[attr-defined]  # not of every BinaryIO
        digest.update(buffer[:n])
        n_bytes -= n
    return digest.digest()


def _parsed(text: bytes, path: str | Path) -> dict[str, Any]:
    try: info = json.loads(text.decode())
    except (ValueError, RecursionError): info = None
    if not isinstance(info, dict): raise _damaged(path, 'its seal cannot be read')
    return info


def _check_format(info: dict[str, Any], path: str | Path) -> None:
    found = info.get('format')
    if type(found) is not int or found < 0: raise _damaged(path, 'its seal names no format')
    if found > FORMAT:
        raise CheckpointError(f'{path} has format {found}, and this version of learnkit reads up to {FORMAT}: '
                              'update learnkit.')


def _damaged(path: str | Path, what: str) -> DamagedError:
    return DamagedError(f'{path} is no whole checkpoint: {what}. Nothing was loaded.')
