"""What a bench returns, and how it is called.

    python -m tests.peers.rows NAME FILE    # in NAME's environment: write the rows of NAME_bench as JSON
    python -m tests.peers.rows wild:LIBRARY FILE    # the rows of users' code for a library

A bench is a module with a function `rows()` that returns a list of `Row`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EQUAL = 'equal'
TOO_FAR = 'differ'
LIMITS = 1e-5, 1e-3  # absolute; coarse, so that every machine prints the same page


@dataclass
class Row:
    "A line of the table: one callback, or one thing that is done with the package."

    callback: str
    # runs in a learnkit Learner as its package ships it; None: was not run
    runs: bool | None
    # what it logs has the same keys as in the package's own trainer; None: was not compared
    keys: bool | None
    # `EQUAL`, within one of `LIMITS`, or `TOO_FAR`: weights, steps and values
    numbers: str
    # what differs, and why
    why: str = ''
    # the part of the package's table in which the line stands
    part: str = 'Callbacks'
    # what users' code relies on: names of tests in tests/interop
    behaviors: list[str] = field(default_factory=list)


def compare_numbers(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> str:
    "Return `EQUAL`, or the first of `LIMITS` within which all tensors of the same name are."
    import torch

    if a.keys() != b.keys():
        return TOO_FAR
    furthest = 0.0
    for name in a:
        x, y = a[name].detach().double().cpu(), b[name].detach().double().cpu()
        if x.shape != y.shape or not torch.equal(x.isnan(), y.isnan()):
            return TOO_FAR
        difference = (x - y).nan_to_num().abs().max().item() if x.numel() else 0.0
        furthest = max(furthest, difference)
    if not furthest:
        return EQUAL
    return next((f'within {limit:g}' for limit in LIMITS if furthest < limit), TOO_FAR)


@contextlib.contextmanager
def quiet_folder() -> Iterator[Path]:
    "Work in an empty folder, without what is printed."
    with (
        TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield Path(folder)


def snippets(guide: Path) -> Iterator[tuple[str, str]]:
    "Yield the title of each section of a guide, and the code on its left."
    title = ''
    for cell in json.loads(guide.read_text('utf-8'))['cells']:
        text = ''.join(cell['source'])
        heading = re.search(r'^## (.*)', text, re.MULTILINE)
        title = heading[1] if heading else title
        blocks = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
        if cell['cell_type'] == 'markdown' and blocks:
            yield title, blocks[0]


def import_torchvision() -> None:
    """Import torchvision if it is installed, also beside a torch for which it was not compiled.

    Its import then fails at two compiled operators, which nothing here calls: they are declared, and the import is
    repeated. Where they are compiled, a second declaration would end the process."""
    import torch

    try:
        import torchvision
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition('.')[0] == 'torchvision']:
            del sys.modules[name]
        signature = '(Tensor dets, Tensor scores, float iou_threshold) -> Tensor'
        for operator in ('nms', 'qnms'):
            torch.library.define(f'torchvision::{operator}', signature)
        import torchvision  # noqa: F401


def main(name: str, file: str) -> None:
    "Write the rows of a bench as JSON."
    os.environ.setdefault('MPLBACKEND', 'Agg')
    warnings.simplefilter('ignore')
    import torch

    torch.set_num_threads(1)
    bench, *library = name.split(':')
    rows = import_module(f'tests.peers.{bench}_bench').rows(*library)
    Path(file).write_text(json.dumps([asdict(row) for row in rows]), 'utf-8')


if __name__ == '__main__':
    main(*sys.argv[1:])
