"""Other steps, samples and branches from a moment of an earlier run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from learnkit import Callback, Checkpoint
from learnkit.core.errors import CheckpointError, OptionError
from tests.helpers.rewinding import BS, EPOCHS, make, train


def test_another_step(tmp_path: Path) -> None:
    train(make(tmp_path))
    again = make(tmp_path)
    moment = again.rewind('13ba')
    before = [p.detach().clone() for p in again.model.parameters()]
    moment.step(lr=0.0)
    assert all(map(torch.equal, before, again.model.parameters()))
    seen: list[Tensor] = []
    loss = moment.step(without=[3, 5], cbs=[Callback(after_loss=lambda cb: seen.append(cb.pred))])
    assert len(seen[0]) == BS - 2 and loss != moment.step()
    with pytest.raises(OptionError, match='no sample'):
        moment.step(without=range(BS))
    with pytest.raises(OptionError, match='number of batches'):
        moment.play('1ep')


def test_playing_on_and_a_branch(tmp_path: Path) -> None:
    losses = train(make(tmp_path))
    again = make(tmp_path)
    moment = again.rewind('13ba')
    assert moment.play('5ba') == losses[13:18]
    old = sorted(f.name for f in (tmp_path / 'checkpoints').glob('*.ckpt'))
    with again.no_bar():
        again.fit(EPOCHS, resume=moment)
    assert list(again.recorder.smooth_loss.raw) == losses
    assert again.path == tmp_path / 'branch-13ba' and list(again.path.rglob('*.ckpt'))
    assert sorted(f.name for f in (tmp_path / 'checkpoints').glob('*.ckpt')) == old
    fixed = make(tmp_path)
    fixed.remove_cbs(Checkpoint)
    fixed.add_cbs(Checkpoint('5ba', folder=tmp_path / 'checkpoints'))
    with pytest.raises(CheckpointError, match='folder of its own'), fixed.no_bar():
        fixed.fit(EPOCHS, resume=fixed.rewind('13ba'))


def test_a_planted_row_is_found(tmp_path: Path) -> None:
    losses = train(make(tmp_path, bad=37))
    again = make(tmp_path, bad=37)
    moment = again.rewind(spike=True)
    assert losses[moment.ba] - losses[moment.ba - 1] == max(b - a for a, b in pairwise(losses))
    samples = moment.samples()
    assert samples[0]['index'] == 37 and samples[0]['share'] == max(s['share'] for s in samples)
    assert sum(s['share'] for s in samples) == pytest.approx(1)
    again.model.eval()
    for sample in samples:
        i = sample['position']
        expected = (again.model(moment.xb[0][i]) - moment.yb[0][i]).square().item()
        assert sample['loss'] == pytest.approx(expected, rel=1e-5)
    assert '37' in samples._repr_html_()
    i = samples[0]['position']
    assert moment.step(without=[i]) < moment.step()
