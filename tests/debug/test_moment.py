"""Other steps, samples and branches from a moment of an earlier run."""

from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from learnkit import (
    EMA,
    Callback,
    Checkpoint,
    CSVLogger,
    DataLoaders,
    Learner,
    MixUp,
    ReduceLROnPlateau,
    SaveModelCallback,
    ShortEpochCallback,
)
from learnkit.core.errors import CheckpointError, OptionError
from learnkit.testing import learn_digest, synth_learner
from tests.faults.run_helpers import quiet
from tests.helpers.rewinding import BS, EPOCHS, describe, make, train


def split(model: nn.Module) -> list[list[nn.Parameter]]:
    first, *others = model.children()
    return [[*first.parameters()], [p for layer in others for p in layer.parameters()]]


def fine_tune(learn: Learner, **options: Any) -> None:
    learn.fine_tune(2, 0.01, freeze_epochs=2, **options)


class After(Callback):
    "Keep a digest of the state after each batch, and the loss."

    order = 9_000
    run_valid = False

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}
        self.losses: dict[int, float] = {}

    def batch_checkpoint(self) -> None:
        ba = self.learn.time.ba - 1
        self.digests[ba] = describe(self.learn)
        self.losses[ba] = self.learn.loss.item()


def set_loss(cb: Any) -> None:
    if cb.learn.epoch == 0:
        cb.learn.loss_func = nn.L1Loss()


def weigh_by_count(cb: Any) -> None:
    "Weigh the training losses by a count in an attribute that the first batch makes."
    if cb.training:
        cb.n = vars(cb).get('n', 0) + 1
        cb.learn.loss_grad = cb.learn.loss_grad * (1 + cb.n / 10)


PROGRAMS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], Any, tuple[int, ...]]] = {
    'plain': (list, {}, None, (3, 6, 13, 20)),
    'frozen': (list, {'splitter': split}, fine_tune, (3, 7, 13, 15, 21, 30)),
    'best weights': (lambda: [SaveModelCallback()], {}, None, (6, 13, 23)),
    'mixup': (lambda: [MixUp()], {}, None, (3, 13)),
    'average': (lambda: [EMA(0.9)], {}, None, (6, 13)),
    'rate by epoch': (lambda: [ReduceLROnPlateau(patience=1, min_delta=9)], {}, None, (7, 15, 23)),
    'a new attribute': (lambda: [Callback(after_loss=weigh_by_count)], {}, None, (2, 3, 13)),
    'loss in epoch 1': (lambda: [Callback(after_epoch=set_loss)], {}, None, (8, 9)),
}


# within the first pass of frozen layers and after it; where an attribute or a loss is new, and after
IN_SHORT = {'frozen': (7, 21), 'a new attribute': (2, 13), 'loss in epoch 1': (8, 9)}


def look_three_times(name: str, batches: Iterable[int], tmp_path: Path) -> None:
    cbs, options, fit, _ = PROGRAMS[name]
    run = make(tmp_path, *cbs(), after := After(), **options)
    with run.no_bar(), run.no_logging(), redirect_stdout(StringIO()):
        run.fit(EPOCHS) if fit is None else fit(run)
    for ba in batches:
        again = make(tmp_path, *cbs(), After(), **options)
        moment = again.rewind(ba, fit=fit)
        for _ in range(3):
            assert moment.step() == after.losses[ba]
            assert describe(again) == after.digests[ba]
        moment.step(lr=1.0)
        moment.step(without=[0])
        assert moment.play(2)[0] == after.losses[ba]
        moment.layers()
        assert moment.step() == after.losses[ba] and describe(again) == after.digests[ba]


@pytest.mark.parametrize('name', PROGRAMS)
def test_three_looks_at_some_moments(name: str, tmp_path: Path) -> None:
    *_, batches = PROGRAMS[name]
    look_three_times(name, IN_SHORT.get(name, batches[1:2]), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize('name', PROGRAMS)
def test_three_looks_at_each_moment(name: str, tmp_path: Path) -> None:
    *_, batches = PROGRAMS[name]
    look_three_times(name, batches, tmp_path)


def test_a_look_at_another_loss_function_is_refused(tmp_path: Path) -> None:
    losses = train(make(tmp_path, Callback(after_epoch=set_loss)))
    moment = make(tmp_path, Callback(after_epoch=set_loss)).rewind(10)  # a checkpoint, in epoch 1
    plain = make(tmp_path / 'plain')
    for look in (
        moment.step,
        lambda: moment.play(3),
        lambda: moment.step(without=[1]),
        moment.samples,
        moment.layers,
    ):
        with pytest.raises(CheckpointError, match=f'batch 10 .* had the loss {losses[10]}'):
            look()
    assert type(plain.loss_func) is type(moment.learn.loss_func)


def test_callbacks_of_the_fit_that_write_files_take_no_part(tmp_path: Path) -> None:
    def fit(learn: Learner, **options: Any) -> None:
        folder = tmp_path / 'run'
        saver = Checkpoint('5ba', folder, keep_last=None, background=False)
        learn.fit(EPOCHS, cbs=[saver, SaveModelCallback(), CSVLogger()], **options)

    def list_files() -> list[Any]:
        found = [path for path in tmp_path.rglob('*') if path.is_file()]
        return sorted((path, path.stat().st_mtime_ns) for path in found)

    with redirect_stdout(StringIO()):
        run = make(tmp_path, after := After())
        run.remove_cbs(Checkpoint)
        fit(run)
        again = make(tmp_path, After())
        again.remove_cbs(Checkpoint)
        before = list_files()
        moment = again.rewind(13, fit=fit, folder=tmp_path / 'run')
        for _ in range(2):
            assert moment.step() == after.losses[13]
            assert len(moment.samples()) == BS and moment.layers()
    assert list_files() == before


class Drifting(Dataset[tuple[Tensor, Tensor]]):
    "Samples that change with the number of reads, which no checkpoint holds."

    def __init__(self) -> None:
        self.x = torch.randn(64, 4)
        self._reads = iter(range(10_000))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = self.x[i] + next(self._reads) / 1000
        return x, x.sum(0, keepdim=True)


def test_another_batch_is_refused_in_each_look(tmp_path: Path) -> None:
    def make_drifting() -> Learner:
        learn = make(tmp_path)
        learn.dls = DataLoaders(DataLoader(Drifting(), BS))
        learn.remove_cbs(Checkpoint)
        learn.add_cb(Checkpoint('5ba', keep_last=None, rehearse=False))
        return learn

    with make_drifting().no_bar() as run:
        run.fit(1)
    losses = run.recorder.smooth_loss.raw
    moment = make_drifting().rewind(3)
    with pytest.raises(CheckpointError, match='batch 3 is not the same batch'):
        moment.step()
    assert moment.losses == dict(enumerate(losses[:3]))
    with (
        pytest.warns(UserWarning, match='batch 3 is not the same batch'),
        pytest.warns(UserWarning, match='batch 3 has the loss'),
    ):
        make_drifting().rewind(3, exact=False).step()


def test_samples_are_left_out_by_position_or_index(tmp_path: Path) -> None:
    train(make(tmp_path))
    moment = make(tmp_path).rewind('13ba')
    assert moment.indices is not None
    seen: list[Tensor] = []
    look = Callback(before_pred=lambda cb: seen.append(cb.x))
    by_position = moment.step(without=[np.int64(2), torch.tensor(5)], cbs=[look])
    by_index = moment.step(without_indices=[moment.indices[i] for i in (2, 5)], cbs=[look])
    assert by_position == by_index
    expected = moment.xb[0][[0, 1, 3, 4, 6, 7]]
    assert all(torch.equal(x, expected) for x in seen) and len(seen) == 2
    other = next(i for i in range(64) if i not in moment.indices)
    for options, error in (
        ({'without': [-1]}, r'without=\[-1\].* from 0 to 7'),
        ({'without': [99]}, r'without=\[99\]'),
        ({'without': [1.0]}, r'without=\[1\.0\]'),
        ({'without_indices': [other]}, rf'without_indices=\[{other}\]'),
        ({'without_indices': [-1]}, r'without_indices=\[-1\]'),
    ):
        with pytest.raises(OptionError, match=error):
            moment.step(**options)


def test_a_branch_saves_its_own_best_weights(tmp_path: Path) -> None:
    with redirect_stdout(StringIO()):
        train(make(tmp_path, SaveModelCallback()))
        again = make(tmp_path, SaveModelCallback())
        with again.no_bar():
            again.fit(EPOCHS, resume=again.rewind('13ba'))
    assert (tmp_path / 'branch-13ba' / 'models' / 'model.pth').is_file()


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
    with pytest.raises(CheckpointError, match='its own folder'), fixed.no_bar():
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


def test_the_last_batch_of_a_shortened_epoch_has_its_loss(tmp_path: Path) -> None:
    "The callback that ends the epoch does so after the batch, before other callbacks see it."
    losses: list[float] = []

    def make() -> Learner:
        torch.manual_seed(0)
        cbs = [Checkpoint('1ep', keep_last=None, rehearse=False), ShortEpochCallback(0.6)]
        return quiet(synth_learner(n_train=5, path=tmp_path, cbs=cbs))

    learn = make()
    keep = Callback(before_step=lambda cb: losses.append(cb.loss.item()))
    keep.needed_to_rewind = False
    learn.fit(2, cbs=keep)
    assert len(losses) == 8  # 4 of 5 batches in each epoch
    moment = make().rewind(3, fit=lambda learn, **options: learn.fit(2, **options))
    assert moment.step() == losses[3]


def test_samples_of_an_own_batch_are_refused(tmp_path: Path) -> None:
    class Own(Learner):
        def train_batch(self) -> None:
            self.optimize(self.compute_loss(self.forward(self.model, self.x)))

    train(make(tmp_path, kind=Own))
    moment = make(tmp_path, kind=Own).rewind('6ba')
    assert moment.layers()[0]['gradient'] > 0
    with pytest.raises(OptionError, match='in its own way'):
        moment.samples()
