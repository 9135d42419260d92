"""A class of ksuit is constructed with its options and services."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learnkit import Learner
from learnkit.interop import from_ksuit
from learnkit.testing import synth_learner
from tests.peers.ksuit_callbacks import CallbackBase


def fit(learn: Learner, *args: Any, **kwargs: Any) -> Learner:
    with learn.no_bar(), learn.no_logging():
        learn.fit(*args, **kwargs)
    return learn


@dataclass
class Options:
    every_n_epochs: int
    scale: float = 2.0


class Periodic(CallbackBase):
    def __init__(self, callback_config: Options, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.every_n_epochs, self.scale = callback_config.every_n_epochs, callback_config.scale
        self.sizes = [len(ds) for ds in self.data_container.datasets.values()]
        self.count, self.seen = self.model.trainable_param_count, list[float]()

    def periodic_callback(self, *, update_counter: Any, **_: Any) -> None:
        self.seen.append(self.scale * update_counter.cur_iteration.epoch)
        self.writer.add_scalar('seen', self.seen[-1])


def test_a_class_is_constructed_when_it_is_added(tmp_path: Path) -> None:
    adapter = from_ksuit(Periodic, every_n_epochs=2, name='mine')
    assert adapter.wrapped is None
    assert repr(adapter) == "from_ksuit(Periodic, every_n_epochs=2, name='mine')"
    learn = synth_learner(n_train=3, n_valid=1, cbs=adapter, path=tmp_path)
    cb = adapter.wrapped
    assert (cb.name, cb.every_n_epochs, cb.scale, cb.count) == ('mine', 2, 2.0, 2)
    assert cb.sizes == [48, 16]
    fit(learn, 4)
    assert cb.seen == [4.0, 8.0] and [row.get('seen') for row in learn.history][1::2] == [4.0, 8.0]
    other = synth_learner(n_train=3, path=tmp_path / 'other')
    learn.remove_cb(adapter)
    fit(other.add_cb(adapter), 2)
    assert adapter.wrapped is cb and cb.seen == [4.0, 8.0, 4.0]
    assert cb.model.a is other.model.a and isinstance(cb.model, type(other.model))
