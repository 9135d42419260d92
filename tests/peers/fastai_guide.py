"""Run the code of fastai that the guide shows, in fastai and, without a change, in learnkit on fastai's loaders."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.environments import ROOT
from tests.peers import fastai_data as data
from tests.peers.rows import Row, quiet_folder, snippets

GUIDE = ROOT / 'nbs' / 'from_fastai.ipynb'
PART = "fastai's code in the guide"
FASTAI = """
from functools import partial
import numpy as np
import torchmetrics
from fastai.vision.all import *
defaults.cpus = 0  # no worker processes: the loaders of the snippets would start hundreds
"""
# the data stay fastai's: learnkit has no `from_dsets` and `test_dl`
LEARNKIT = f"""{FASTAI}
from learnkit.all import *
from fastai.data.all import DataLoader, DataLoaders
"""
# the section whose code is for both packages at once, and what it starts from; a small network takes the place of
# resnet18, whose checkpoints take long to write
WITH_FASTAI = "With fastai's data and models"
BOTH = """
import learnkit
from fastai.vision.all import *
from tests.peers.fastai_vision import small_net as resnet18
files = get_image_files(dls.path)
"""
WHY = {'Several processes': 'write `learn.distributed()`'}


def set_up() -> str:
    "Return the guide's first code cell, without its imports."
    cells = json.loads(GUIDE.read_text('utf-8'))['cells']
    first = next(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code')
    lines = [line for line in first.splitlines() if 'learnkit' not in line]
    return '\n'.join(lines)


def run_all(imports: str) -> dict[str, Exception | None]:
    "Run the snippets in order with these names, and return the error of each, or None."
    names: dict[str, Any] = {'__name__': 'guide'}
    errors: dict[str, Exception | None] = {}
    with quiet_folder():
        exec(f'{imports}\n{set_up()}', names)
        for title, code in snippets(GUIDE):
            if title == WITH_FASTAI:
                continue
            errors[title] = None
            try:
                exec(code, names)
            except Exception as error:
                errors[title] = error
    return errors


def run_with_fastai() -> None:
    "Run the section that trains fastai's model on fastai's data in a learnkit Learner."
    code = dict(snippets(GUIDE))[WITH_FASTAI]
    with quiet_folder() as folder:
        exec(f'{BOTH}\n{code}', {'__name__': 'guide', 'dls': data.pictures(folder)})


def guide_rows() -> list[Row]:
    "Return a row for each section; raise the error of a section that fails in fastai."
    for title, error in run_all(FASTAI).items():
        if error is not None:
            error.add_note(f"in fastai's code of the section {title!r} of {GUIDE.name}")
            raise error
    run_with_fastai()
    rows = [
        Row(title, error is None, None, '', WHY.get(title, str(error or '')[:200]), PART)
        for title, error in run_all(LEARNKIT).items()
    ]
    return [*rows, Row(WITH_FASTAI, True, None, '', '', PART)]


if __name__ == '__main__':
    for row in guide_rows():
        print(row)
