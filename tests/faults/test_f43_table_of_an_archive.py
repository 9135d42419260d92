"""Row 43: a bit of a weights file's zip table is flipped. The file is refused, or gives the same weights.

The table has no checksum. Readers of archives act on different fields of it: after one flipped bit, torch's reader
returns memory that nothing was written to, although the CRC of every record is right."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from learnkit.checkpoint.torch_file import read_torch_file
from learnkit.core.errors import WeightsError
from tests.faults.file_helpers import saved
from tests.helpers.comparing import same

WEIGHTS = {'a': torch.arange(1.0, 5.0), 'b': torch.full((600,), 2.0)}
ENTRY, LOCAL = b'PK\1\2', b'PK\3\4'
ATTRIBUTES = 38  # offset of the attributes in an entry: DOS in the low byte, Unix in the high ones
DIRECTORY = 0x10


def offsets(content: bytes, magic: bytes) -> Iterator[int]:
    at = content.find(magic)
    while at >= 0:
        yield at
        at = content.find(magic, at + 4)


def count_other_weights(path: Path, bits: Iterable[int]) -> tuple[int, int]:
    "Return how many of the flipped bits were refused by name, and how many gave other weights."
    content = saved(path, WEIGHTS).read_bytes()
    refused = other = 0
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            other += not same(read_torch_file(path), WEIGHTS)
        except WeightsError as e:
            refused += str(path) in str(e)
    return refused, other


def headers(path: Path) -> list[int]:
    "Return the bits of the table, and of each record's own header."
    content = saved(path, WEIGHTS).read_bytes()
    places = [range(at, at + 30) for at in offsets(content, LOCAL)]
    places.append(range(content.index(ENTRY), len(content)))
    return [8 * byte + bit for place in places for byte in place for bit in range(8)]


def test_the_attribute_of_a_directory(tmp_path: Path) -> None:
    "Every CRC is right, and torch alone gives other weights or none."
    path = saved(tmp_path / 'a.pth', WEIGHTS)
    content = path.read_bytes()
    entries = [*offsets(content, ENTRY)]
    data = next(at for at in entries if content[at + 46 :].startswith(b'a/data/1'))
    for at in entries:
        flipped = bytearray(content)
        flipped[at + ATTRIBUTES] ^= DIRECTORY
        path.write_bytes(flipped)
        with ZipFile(path) as archive:
            assert archive.testzip() is None
        if at == data:
            torch.load(path, weights_only=True)
        with pytest.raises(WeightsError, match='is not as it was written'):
            read_torch_file(path)


def test_some_bits(tmp_path: Path) -> None:
    bits = headers(tmp_path / 'a.pth')
    assert count_other_weights(tmp_path / 'a.pth', bits[::29])[1] == 0


@pytest.mark.full
def test_every_bit(tmp_path: Path) -> None:
    bits = headers(tmp_path / 'a.pth')
    refused, other = count_other_weights(tmp_path / 'a.pth', bits)
    print(
        f'row 43: each of the {len(bits)} bits of the table and the headers of a file flipped, '
        f'{refused} refused, {len(bits) - refused - other} without effect, {other} gave other weights'
    )
    assert other == 0
