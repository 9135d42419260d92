"""A paused fit: its batches, samples and layers, and that looking does not move it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from learnkit import Learner
from learnkit.core.errors import FitError
from tests.faults.fault_helpers import digest, make_learner, rows, start_again


def make() -> Learner:
    learn = make_learner()
    learn.remove_cb(learn.progress)
    learn.logger = lambda row: None
    start_again(learn)
    return learn


def end_of(learn: Learner) -> tuple[Any, ...]:
    return digest(learn), rows(learn), learn.time.ba


def test_looking_does_not_move_the_fit() -> None:
    straight = make()
    straight.fit_one_cycle(3, 0.05)
    learn = make()
    learn.fit_one_cycle(3, 0.05, pause_at='4ba')
    paused = learn.paused
    assert paused is not None and 'after batch 1 of 3 of epoch 1, 4ba' in repr(learn)
    assert 'learn.resume()' in learn._repr_html_()
    paused.samples()
    paused.samples(last=True)
    paused.layers()
    paused.show()
    paused.show(last=True)
    learn.validate()
    learn.get_preds(0)
    learn.predict(torch.zeros(3))
    learn.summary()
    learn.lr_find(num_it=6, show_plot=False)
    assert learn.paused is not None and learn.time.ba == 4
    x = paused.batch[0]
    assert not torch.equal(x, paused.last_batch[0]) and paused.time.ba == 4
    learn.resume()
    assert end_of(learn) == end_of(straight)


def test_samples_and_layers() -> None:
    learn = make()
    learn.fit(2, pause_at='1ba')
    assert learn.paused is not None
    found = learn.paused.samples()
    x, y = learn.paused.batch
    learn.model.eval()
    with torch.no_grad():
        losses = ((learn.model(x) - y) ** 2).flatten()
    for row in found:
        assert row['loss'] == pytest.approx(losses[row['position']].item(), abs=1e-5)
    layers = learn.paused.layers()
    assert [row['layer'] for row in layers] == ['0', '1', '2', '3']
    assert all(row['activation'] and row['activation_before'] for row in layers)


def test_samples_have_their_index_in_the_data_set() -> None:
    learn = make()
    learn.fit(2, pause_at='4ba')
    assert learn.paused is not None
    data = learn.dls.train.tensors[0]
    for last, batch in ((False, learn.paused.batch), (True, learn.paused.last_batch)):
        for row in learn.paused.samples(last):
            assert torch.equal(data[row['index']], batch[0][row['position']])
    learn.resume()
    assert learn.time.ba == 6


def test_at_the_end_of_an_epoch_there_is_no_next_batch() -> None:
    learn = make()
    learn.fit(2, pause_at='1ep')
    assert learn.paused is not None and learn.paused.batch is None
    with pytest.raises(FitError, match='next batch'):
        learn.paused.samples()
    learn.resume()
    assert len(learn.history) == 2
