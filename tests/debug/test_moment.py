"""Other steps, samples and branches from a moment of an earlier run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from learnkit import Callback, Checkpoint, Learner, MixUp
from learnkit.core.errors import CheckpointError, OptionError
from learnkit.testing import learn_digest
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
    html = str(samples._repr_html_())
    assert '37' in html and '<img' not in html
    assert list(moment.show().columns)[:2] == ['x[0]', 'x[1]']
    i = samples[0]['position']
    assert moment.step(without=[i]) < moment.step()


def test_samples_and_layers_leave_the_learner_where_it_stands(tmp_path: Path) -> None:
    losses = train(make(tmp_path, MixUp()))
    again = make(tmp_path, MixUp())
    moment = again.rewind('13ba')
    before = learn_digest(again)
    samples = moment.samples()
    layers = moment.layers()
    assert learn_digest(again) == before
    assert len(samples) == BS and sorted(row['index'] for row in samples) == sorted(
        moment.indices or []
    )
    assert moment.step() == losses[13]
    last = again.rewind('12ba').layers()
    assert [row['layer'] for row in layers] == ['0', '1', '2', '3']
    for row, earlier in zip(layers, last, strict=True):
        assert row['activation'] > 0 and (row['gradient'] is not None) == (row['layer'] in '03')
        for name in ('activation', 'gradient'):
            assert row[f'{name}_before'] == earlier[name]
    assert again.rewind('10ba').layers()[0]['gradient_before'] > 0  # the batch of a checkpoint
    first = make(tmp_path, MixUp()).rewind(0).layers()
    assert first[0]['gradient'] > 0 and first[0]['gradient_before'] is None


def test_samples_of_an_own_batch_are_refused(tmp_path: Path) -> None:
    class Own(Learner):
        def train_batch(self) -> None:
            self.optimize(self.compute_loss(self.forward(self.model, self.x)))

    train(make(tmp_path, kind=Own))
    moment = make(tmp_path, kind=Own).rewind('6ba')
    assert moment.layers()[0]['gradient'] > 0
    with pytest.raises(OptionError, match='in its own way'):
        moment.samples()
