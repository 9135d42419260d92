"""What the tests of checkpoints' files share: a small state as real ones are, and files tampered with."""

import hashlib
import json
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor, nn

from learnkit.checkpoint.file import write_state
from learnkit.core.random import capture_rng

INFO = {'number': 12, 'epoch': 3, 'batches': 1200, 'value': 0.25}


def make_state(seed: int = 0) -> dict[str, Any]:
    "Return the state of a model with tied weights after three Adam steps, with RNGs, callbacks and history."
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
    )
    model[3].weight = model[2].weight
    optimizer = torch.optim.Adam(
        [{'params': model[:3].parameters()}, {'params': model[4].parameters(), 'lr': 0.1}]
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()
    history = [{'epoch': i, 'train_loss': 0.5 / (i + 1), 'valid_loss': None} for i in range(3)]
    return {
        'model': model.state_dict(),
        'optimizer': optimizer.state_dict(),
        'rng': capture_rng(),
        'grads': {'0.weight': model[0].weight.grad.to(torch.bfloat16), 'empty': torch.zeros(0, 3)},
        'loop': {
            'epoch': 3,
            'pct_train': 0.3,
            'names': ('a', 'ü', ''),
            'none': None,
            'big': 2**127,
            'z': 1 - 2j,
        },
        'callbacks': {
            'ema': {
                'shadow': {'w': torch.randn(8, 3, 2, 2).to(memory_format=torch.channels_last)},
                'n': 7,
            },
            'recorder': {'history': history, 'losses': torch.rand(100)},
            'raw': {'b': b'\0\xff', 7: [[]]},
        },
    }


def same(a: Any, b: Any) -> bool:
    "Return True if two states are equal bit for bit; any mapping counts as a dict."
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.stride() == b.stride()
            and a.contiguous()
            .flatten()
            .view(torch.uint8)
            .equal(b.contiguous().flatten().view(torch.uint8))
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and [*a] == [*b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def write(path: Path, state: Any = None) -> Path:
    "Save a state as the package does."
    write_state(path, make_state() if state is None else state, INFO)
    return path


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    "Return the header of a file, as JSON, and its data."
    content = path.read_bytes()
    stop = 8 + int.from_bytes(content[:8], 'little')
    return json.loads(content[8:stop]), content[stop:]


def forged(
    path: Path,
    header: dict[str, Any] | bytes,
    data: bytes = b'',
    length: int | None = None,  # that is said of the header
) -> Path:
    "Write a file with any header and data and a correct digest, as an attacker can."
    text = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(',', ':')).encode()
    )
    content = (len(text) if length is None else length).to_bytes(8, 'little') + text + data
    at = content.find(b'"sha256":"') + 10
    blank = content[:at] + b'0' * 64 + content[at + 64 :]
    path.write_bytes(blank[:at] + hashlib.sha256(blank).hexdigest().encode() + blank[at + 64 :])
    return path


def with_metadata(path: Path, **changes: str) -> Path:
    "Replace a file's metadata, with a correct digest."
    header, data = split(path)
    header['__metadata__'] |= changes
    return forged(path, header, data)


def with_state(path: Path, text: str) -> Path:
    "Write a checkpoint of four floats, `w`, with any JSON as its state."
    return with_metadata(write(path, {'w': torch.arange(4.0)}), state=text)


def members(path: Path) -> dict[str, bytes]:
    "Return the records of an archive by their full names."
    with ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rebuilt(
    path: Path,
    change: Callable[[dict[str, bytes]], Any],  # f(records) may return other ones, also as pairs
    method: int = ZIP_STORED,
) -> Path:
    "Write an archive with changed records."
    records: Any = members(path)
    records = change(records) or records
    with ZipFile(path, 'w', method) as archive:
        for name, data in records.items() if isinstance(records, dict) else records:
            archive.writestr(name, data)
        for info in archive.infolist():  # torch writes neither a system nor permissions
            info.create_system = info.external_attr = 0
    return path


def saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def fork(f: Callable[[], Any]) -> int:
    "Run `f` in a forked child, and return the exit code, which is 0 unless `f` raises."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # of threads, which do nothing here
        if pid := os.fork():
            return pid
    status = 1
    try:
        f()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def result_of(f: Callable[[], Any]) -> Any:
    "Return the result of `f` in a child as JSON; the child has its own limits, peaks and locks."
    reader, writer = os.pipe()
    pid = fork(lambda: os.write(writer, json.dumps(f()).encode()))
    os.close(writer)
    with open(reader, 'rb') as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise RuntimeError(f'the child ended with {status}')
    return json.loads(text)
