"""A URL where a folder or file of this machine is expected."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import Checkpoint, CSVLogger, Learner, OptionError, SaveModelCallback, WandbLogger
from learnkit.inference.gather import GatherPredsCallback
from learnkit.testing import synth_learner

URL = 's3://bucket/run'
BATCHES = [(torch.zeros(2, 1), torch.zeros(2, 1))]

# calls that take a folder or a file
CALLS: dict[str, Callable[[Learner], Any]] = {
    'Checkpoint(folder=)': lambda learn: Checkpoint(folder=URL),
    'CSVLogger': lambda learn: CSVLogger(f'{URL}/metrics.csv'),
    'WandbLogger': lambda learn: WandbLogger(folder=URL),
    'SaveModelCallback': lambda _: synth_learner().fit(
        1, cbs=SaveModelCallback(fname=f'{URL}/model')
    ),
    'GatherPredsCallback': lambda learn: GatherPredsCallback(save_preds=URL),
    'Learner(path=)': lambda learn: Learner(BATCHES, torch.nn.Linear(1, 1), path=URL),
    'save': lambda learn: learn.save(f'{URL}/model'),
    'export': lambda learn: learn.export(f'{URL}/net'),
    'report': lambda learn: learn.report(f'{URL}/report.html'),
    'get_preds(sink=folder)': lambda learn: learn.get_preds(sink=URL),
    'fit(resume=)': lambda learn: learn.fit(1, resume=URL, cbs=Checkpoint()),
}


@pytest.mark.parametrize('name', CALLS)
def test_a_url_is_no_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    learn = synth_learner(default_cbs=False)
    with pytest.raises(OptionError, match=r's3:.*is a URL'):
        CALLS[name](learn)
    assert os.listdir(tmp_path) == []
