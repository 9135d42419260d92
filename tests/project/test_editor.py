"""Types that Pyright infers in a user's script, and the errors that it finds."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

from learnkit import Callback, DataLoaders, F1Score, FocalLoss, Lamb, Learner, accuracy


class Noise(Callback):
    run_valid = False

    def __init__(self, size: float = 0.1) -> None:
        self.size = size

    def before_batch(self) -> None:
        self.learn.xb = (self.x + self.size * torch.randn_like(self.x),)

    def after_loss(self) -> None:
        reveal_type((self.loss, self.epoch, self.n_epoch, self.training, self.fitting))
        reveal_type((self.model, self.opt, self.time, self.world, self.xb))

    def after_epoch(self) -> None:
        reveal_type(self.history[-1])
        self.learn.log('size', self.size)
        self.learn.stop()


def stop_early(cb: Callback) -> None:
    if cb.history[-1]['accuracy'] > 0.9:
        cb.learn.stop()


dls = DataLoaders.from_tensors((torch.rand(8, 3), torch.randint(2, (8,))), bs=4)
cbs = [Noise(), Callback(after_epoch=stop_early, order=60)]
learn = Learner(dls, nn.Linear(3, 2), F.cross_entropy, metrics=accuracy, cbs=cbs)
reveal_type((learn, learn.fit(1), learn.fit_one_cycle(1, 0.1), learn.validate()))
reveal_type((learn.history[-1], learn.history[1:], learn.recorder, learn.time))
reveal_type((learn.to_bf16(), learn.add_cb(Noise()), learn.predict(torch.rand(3))))
with learn.no_bar() as quiet:
    reveal_type(quiet)
reveal_type((F1Score(), FocalLoss(), learn.opt.hypers[-1]['lr']))
learn.opt.hypers[0]['lr'] = 0.1
learn.noise.size = 0.2
learn.validate()['accuracy']
learn.fit(1).validate()  # a mistake: fit returns None
Callback(after_epoch=stop_early, order='60')  # a mistake
"""
REVEALED = [
    'tuple[Tensor, int, int | None, bool, bool]',
    'tuple[Module, OptimWrapper, Timestamp, Comm, tuple[Any, ...]]',
    'dict[str, Any]',
    'tuple[Learner, None, None, Values]',
    'tuple[dict[str, Any], list[dict[str, Any]], Recorder, Timestamp]',
    'tuple[Learner, Learner, tuple[Any, ...]]',
    'Learner',
    'tuple[F1Score, FocalLoss, Any]',
]


def test_pyright_knows_the_types_of_a_users_script(tmp_path: Path) -> None:
    pyright = shutil.which('pyright')
    if pyright is None:
        pytest.skip('pyright is not installed: pip install pyright[nodejs]')
    (tmp_path / 'user.py').write_text(SCRIPT)
    settings = {'extraPaths': [str(ROOT)], 'typeCheckingMode': 'standard'}
    (tmp_path / 'pyrightconfig.json').write_text(json.dumps(settings))
    command = [pyright, '--outputjson', '--pythonpath', sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)['generalDiagnostics']
    revealed = [one['message'] for one in found if one['severity'] == 'information']
    assert [text.split(' is "')[1].removesuffix('"') for text in revealed] == REVEALED
    lines = SCRIPT.split('\n')
    errors = [one for one in found if one['severity'] == 'error']
    assert len(errors) == 2, errors
    assert all('# a mistake' in lines[one['range']['start']['line']] for one in errors)
