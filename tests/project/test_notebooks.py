"""Each notebook of nbs/ runs in a fresh kernel, and its saved outputs match."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.notebooks import code_cells, execute, faults, nbformat

pytest.importorskip('ipykernel')

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / 'nbs').glob('*.ipynb'))
LARGEST = 1_000_000  # bytes of a notebook with its outputs


each_notebook = pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def kinds(cell: Any) -> Counter[tuple[str, ...]]:
    """What a cell shows, without the numbers: the kinds of its outputs, each with its formats or the stream's name.

    What is printed arrives in as many pieces as the machine's speed makes of it, and counts once."""
    found = [
        (out.output_type, *sorted(out.get('data', ())), out.get('name', '')) for out in cell.outputs
    ]
    streams = {kind for kind in found if kind[0] == 'stream'}
    return Counter([*streams, *(kind for kind in found if kind[0] != 'stream')])


@each_notebook
def test_saved_outputs_are_whole(path: Path) -> None:
    nb = read(path)
    nbformat.validate(nb)
    cells = code_cells(nb)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), (
        'saved in the middle of a run'
    )
    assert any(cell.outputs for cell in cells)
    assert not faults(nb)
    assert path.stat().st_size <= LARGEST


@pytest.mark.notebook
@each_notebook
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    saved, run = read(path), read(path)
    for cell in code_cells(run):
        cell.outputs, cell.execution_count = [], None
    execute(run, tmp_path)

    assert not faults(run)
    for before, now in zip(code_cells(saved), code_cells(run), strict=True):
        # a slow machine may show more: the bar of an evaluation that takes long
        assert not kinds(before) - kinds(now), (
            f'not all of the saved outputs came again, of:\n{now.source}'
        )
