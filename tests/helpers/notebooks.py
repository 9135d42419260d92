"""Run notebooks in a fresh kernel, and list the errors in their outputs."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.kernel import kernel_env, kernel_name, make_sockets

nbformat = pytest.importorskip('nbformat')


nbclient = pytest.importorskip('nbclient')


# First in every kernel. What is warned of at a line of the notebook or of learnkit is an error, and so is every
# UserWarning; deprecations inside of libraries are not.
SETUP = r"""
import warnings
warnings.filterwarnings('error', module=r'__main__|learnkit\b')
warnings.filterwarnings('error', category=UserWarning)
warnings.filterwarnings('ignore', message='IProgress not found')  # tqdm's, of who imports transformers
import torch
torch.set_num_threads(1)
"""


def code_cells(nb: Any) -> list[Any]:
    return [cell for cell in nb.cells if cell.cell_type == 'code']


def make_client(nb: Any, **options: Any) -> Any:
    "Return a client that runs a notebook in a kernel of its own."
    from traitlets.config import Config

    config = Config({'KernelManager': make_sockets()})
    return nbclient.NotebookClient(
        nb, timeout=600, kernel_name=kernel_name(), config=config, **options
    )


def execute(nb: Any, cwd: Path) -> None:
    "Run every cell in a fresh kernel, in a folder for its files."
    nb.cells.insert(0, nbformat.v4.new_code_cell(SETUP))
    client = make_client(nb, resources={'metadata': {'path': str(cwd)}})
    with warnings.catch_warnings():
        # warnings of the client and its sockets: the kernel is another process
        warnings.simplefilter('ignore')
        client.execute(env=kernel_env(cwd))
    del nb.cells[0]


def faults(nb: Any) -> list[str]:
    "Return outputs that a notebook must not have: errors, and output to stderr such as warnings."
    outputs = [out for cell in code_cells(nb) for out in cell.outputs]
    return [f'{out.ename}: {out.evalue}' for out in outputs if out.output_type == 'error'] + [
        out.text for out in outputs if out.output_type == 'stream' and out.name == 'stderr'
    ]
