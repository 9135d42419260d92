"""The state before any batch of an earlier run, and its loss, again; and what is refused."""

import itertools
import random
import subprocess
import sys
from copy import deepcopy
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import (
    Callback,
    Checkpoint,
    CSVLogger,
    DataLoaders,
    GradientAccumulation,
    Learner,
    MixedPrecision,
    MixUp,
)
from learnkit.core.errors import CancelBatchException, CheckpointError, OptionError
from learnkit.debug.rewind import find_spike
from learnkit.testing import learn_digest
from tests.faults.fault_helpers import others_in_full
from tests.helpers.ranks import run_ranks
from tests.helpers.rewinding import BATCHES, EPOCHS, Record, describe, make, train

CASES: dict[str, dict[str, Any]] = {
    'plain': {},
    'accumulation': {'cbs': lambda: [GradientAccumulation(16)]},
    'bf16': {'cbs': lambda: [MixedPrecision('bf16')]},
    'mixup': {'cbs': lambda: [MixUp()]},
    'microbatch': {'microbatch': 3},
    'workers': {'workers': 2},
    'logger': {'cbs': lambda: [CSVLogger()]},
}


PLACES = (16, 11, 7, BATCHES - 1)


@pytest.mark.parametrize(
    ('name', 'places'),
    others_in_full(
        itertools.product(CASES, [PLACES[:2], PLACES]),
        lambda name, places: (places == PLACES) == (name == 'plain'),
    ),
    ids=str,
)
def test_the_state_and_the_loss_of_any_batch(
    name: str, places: tuple[int, ...], tmp_path: Path
) -> None:
    options = dict(CASES[name])
    cbs = options.pop('cbs', list)
    record = Record()
    losses = train(make(tmp_path, *cbs(), record, **options))
    files = {f: f.stat().st_mtime_ns for f in tmp_path.rglob('*') if f.is_file()}
    again = make(tmp_path, *cbs(), Record(), **options)
    for ba in places:
        moment = again.rewind(f'{ba}ba')
        assert again.time.ba == moment.ba == ba
        assert describe(again) == record.digests[ba]
        assert moment.indices == record.indices[ba]
        assert moment.step() == losses[ba] == moment.step()
    assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob('*') if f.is_file()} == files


def test_other_units_and_before_the_first_checkpoint(tmp_path: Path) -> None:
    losses = train(make(tmp_path))
    assert make(tmp_path).rewind(2).step() == losses[2]
    assert make(tmp_path).rewind(0).play('9ba') == losses[:9]
    again = make(tmp_path)
    for to, ba in (('1ep', 8), ('72sp', 9), ('10st', 10)):
        assert again.rewind(to).ba == ba
    with pytest.raises(
        CheckpointError, match='no checkpoint before 3ba, and this Learner has trained'
    ):
        again.rewind('3ba')
    with pytest.raises(CheckpointError, match='ends before 99ba'):
        again.rewind('99ba')


def test_a_later_fit_of_the_same_learner(tmp_path: Path) -> None:
    learn = make(tmp_path)
    losses = train(learn) + train(learn)
    for ba in (2, 13, BATCHES, BATCHES + 13):
        if ba == BATCHES:  # the first checkpoint of the second fit comes later
            with pytest.raises(
                CheckpointError, match=f'began at batch {BATCHES} has no checkpoint'
            ):
                make(tmp_path).rewind(ba)
        else:
            assert make(tmp_path).rewind(ba).step() == losses[ba]


def test_the_largest_jump() -> None:
    assert find_spike({3: 1.0, 4: 2.0, 5: float('nan'), 6: 9.0}).value == 5
    with pytest.warns(UserWarning, match='no batch stands out.* at batch 4: loss 1 -> 1, 0 times'):
        assert find_spike({3: 1.0, 4: 1.0, 5: 1.0}).value == 4
    noisy = [5.0 + 2.0 * (-1) ** i for i in range(50)]  # jumps of 4
    quiet = [1.0 + 0.1 * (-1) ** i for i in range(50)]
    quiet[30] += 3.0
    assert find_spike(dict(enumerate(noisy + quiet))).value == 80
    with pytest.raises(CheckpointError, match='no losses'):
        find_spike({3: 1.0})


def test_a_run_that_cannot_be_repeated_is_refused_by_name(tmp_path: Path) -> None:
    train(make(tmp_path, MixUp()))
    with pytest.raises(CheckpointError, match='had the callbacks mix_up'):
        make(tmp_path).rewind('13ba')
    other = make(tmp_path, MixUp(), seed=1)
    with pytest.raises(CheckpointError, match=r'batch 1\d has the loss'):
        other.rewind('19ba')
    with pytest.warns(UserWarning, match='cannot be repeated exactly'):
        assert other.rewind('19ba', exact=False).ba == 19
    with pytest.raises(CheckpointError, match='no run to rewind'):
        make(tmp_path / 'empty').rewind('3ba')
    with pytest.raises(OptionError, match='Pass a time'):
        make(tmp_path).rewind()


def test_a_batch_that_was_skipped_has_no_loss(tmp_path: Path) -> None:
    def skip(cb: Any) -> None:
        if cb.learn.train_iter == 6:
            raise CancelBatchException

    losses = train(make(tmp_path, Callback(before_batch=skip)))
    again = make(tmp_path, Callback(before_batch=skip))
    assert isnan(again.rewind(6).step())
    assert again.rewind(7).step() == losses[6]  # the loss after the skipped one
    assert again.rewind(13).play(3) == losses[12:15]
    numbered = dict(zip([i for i in range(BATCHES) if i != 6], losses, strict=True))
    with pytest.warns(UserWarning, match='no batch stands out'):
        spike = make(tmp_path, Callback(before_batch=skip)).rewind(spike=True)
    with pytest.warns(UserWarning, match='no batch stands out'):
        assert spike.ba == find_spike(numbered).value
    i = [*numbered].index(spike.ba)
    assert (spike.jump.before, spike.jump.after) == (losses[i - 1], losses[i])
    assert f'{losses[i - 1]:.4g} -> {losses[i]:.4g}, ' in repr(spike)
    with pytest.raises(CheckpointError, match=r'batch 6 has the loss .*, and had no loss'):
        make(tmp_path, Callback()).rewind('9ba')


def test_batches_after_the_newest_checkpoint_are_refused(tmp_path: Path) -> None:
    train(make(tmp_path))
    for file in (tmp_path / 'checkpoints').glob('*.ckpt'):
        if int(file.stem.rpartition('ba')[2]) > 15:  # as after a kill
            file.unlink()
    again = make(tmp_path)
    moment = again.rewind(15)
    with pytest.raises(CheckpointError, match='no loss of batch 15'):
        moment.step()
    with pytest.raises(CheckpointError, match='no loss of batch 15'):
        again.rewind(17)
    with pytest.warns(UserWarning, match='no loss of batch 15'):
        moment = again.rewind(17, exact=False)
    with pytest.warns(UserWarning, match='no loss of batch 17'):
        assert moment.step() > 0


def test_another_number_of_epochs_is_refused(tmp_path: Path) -> None:
    train(make(tmp_path))
    with (
        pytest.warns(UserWarning, match='fit of 3 epochs'),
        pytest.raises(CheckpointError, match='trained 3 epochs, and `fit` trains 5 epochs'),
    ):
        make(tmp_path).rewind(13, fit=lambda learn, **kw: learn.fit(5, **kw))


class Count(nn.Module):
    "Line that counts its passes in an attribute that no checkpoint holds."

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += self.training
        out: Tensor = self.line(x) * (1 + self.n / 100)
        return out


def make_counting(path: Path) -> Learner:
    learn = make(path)
    learn.model = Count()
    return learn


def test_lost_state_is_refused_before_the_first_checkpoint_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r'model\.n'):
        train(make_counting(tmp_path))
    for ba in (3, 13):
        with pytest.raises(CheckpointError, match=r'model\.n'):
            make_counting(tmp_path).rewind(ba)


def test_lazy_layers_before_the_first_checkpoint_are_refused(tmp_path: Path) -> None:
    def make_lazy() -> Learner:
        learn = make(tmp_path)
        torch.manual_seed(0)
        learn.model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 1))
        return learn

    losses = train(make_lazy())
    with pytest.raises(CheckpointError, match='rewind to batch 5 or a later one'):
        make_lazy().rewind(3)
    moment = make_lazy().rewind(5)
    assert [moment.step() for _ in range(3)] == [losses[5]] * 3


def test_an_evaluation_in_a_callback_loses_nothing(tmp_path: Path) -> None:
    def evaluate(cb: Any) -> None:
        if cb.learn.training and cb.learn.train_iter == 2:
            cb.learn.validate()

    losses = train(make(tmp_path, Callback(before_batch=evaluate)))
    assert make(tmp_path, Callback(before_batch=evaluate)).rewind(13).step() == losses[13]


def test_a_fit_after_a_rewind_does_not_write_into_the_run(tmp_path: Path) -> None:
    losses = train(make(tmp_path))
    again = make(tmp_path)
    again.rewind(13)
    before = learn_digest(again)
    for fit in (
        lambda: again.fit(1),
        lambda: again.fit_one_cycle(1, 0.1),
        lambda: again.fine_tune(1),
    ):
        with pytest.raises(CheckpointError, match='resume=moment'):
            fit()
        assert learn_digest(again) == before
    moment = again.rewind(13)
    with again.no_bar():
        again.fit(EPOCHS, resume=moment)
        again.fit(1)  # in the folder of the branch
    assert make(tmp_path).rewind(13).step() == losses[13]
    other = make(tmp_path)
    other.rewind(13)
    with other.no_bar():
        other.fit(EPOCHS, resume=True)  # the run itself
        other.fit(1)
    assert len(list((tmp_path / 'checkpoints').glob('*.ckpt'))) > 5


@pytest.mark.dist
def test_a_run_of_two_processes_in_one(tmp_path: Path) -> None:
    def make_exact(*cbs: Any) -> Learner:
        learn = make(tmp_path, *cbs)
        learn.model[2].p = 0.0  # dropout draws for each process
        return learn

    class Keep(Callback):
        run_valid = False
        order = -100

        def __init__(self) -> None:
            self.states: dict[int, dict[str, Any]] = {}

        def before_batch(self) -> None:
            self.states[self.learn.time.ba] = deepcopy(dict(self.learn.model.state_dict()))

    def job(rank: int) -> Any:
        learn = make_exact(keep := Keep())
        with learn.no_bar(), learn.distributed('ddp', batch_size='global'):
            learn.fit(EPOCHS)
        return keep.states, learn.recorder.smooth_loss.raw

    (states, losses), _ = run_ranks(job, 2)
    with pytest.warns(UserWarning, match='2 processes'):
        moment = make_exact(Keep()).rewind('13ba')
    for name, value in moment.learn.model.state_dict().items():
        assert torch.allclose(value, states[13][name], atol=1e-6, rtol=0)
    assert moment.step() == pytest.approx(losses[13], rel=1e-5)


# -- as promised -----------------------------------------------------------------------------------

FAR = 10_000  # steps

SCRIPT = """
import sys
from pathlib import Path
from tests.debug.test_rewind import make_far
from tests.helpers.rewinding import Record, describe
learn = make_far(Path(sys.argv[1]), Record([]))
moment = learn.rewind(int(sys.argv[2]))
print(learn.time.ba, describe(learn), repr(moment.step()))
"""


def make_far(path: Path, *cbs: Any) -> Learner:
    "Make the Learner of a long run."
    torch.manual_seed(0)
    x = torch.randn(8000, 4)
    dls = DataLoaders.from_tensors((x, x.sum(1, keepdim=True)), bs=16, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    checkpoint = Checkpoint('500ba', keep_last=None)
    return Learner(dls, model, nn.MSELoss(), path=path, cbs=[checkpoint, *cbs])


@pytest.mark.full
def test_twenty_steps_of_ten_thousand_in_new_processes(tmp_path: Path) -> None:
    steps = sorted(random.Random(0).sample(range(FAR), 20))
    record = Record(steps)
    learn = make_far(tmp_path, record)
    with learn.no_bar():
        learn.fit(FAR // 500)
    losses = learn.recorder.smooth_loss.raw
    equal = 0
    for ba in steps:
        command = [sys.executable, '-c', SCRIPT, str(tmp_path), str(ba)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        equal += out.split() == [str(ba), record.digests[ba], repr(losses[ba])]
    print(f'rewind: {equal} of {len(steps)} states and losses equal, bit for bit')
    assert equal == len(steps)


@pytest.mark.full
def test_twenty_rows_of_fifty_thousand(tmp_path: Path) -> None:
    places: list[int] = []
    for seed in range(20):
        bad = random.Random(seed).randrange(50_000)

        def make_planted(path: Path, seed: int = seed, bad: int = bad) -> Learner:
            torch.manual_seed(seed)
            x = torch.randn(50_000, 16)
            y = x[:, :4].sum(1, keepdim=True) + 0.1 * torch.randn(50_000, 1)
            y[bad] = 20.0
            dls = DataLoaders.from_tensors((x, y), bs=64, shuffle=True)
            model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
            return Learner(dls, model, nn.MSELoss(), path=path, cbs=Checkpoint('200ba'))

        folder = tmp_path / str(seed)
        with make_planted(folder).no_bar() as learn:
            learn.fit(1)
        samples = make_planted(folder).rewind(spike=True).samples()
        indices = [row['index'] for row in samples]
        places.append(indices.index(bad) if bad in indices else -1)
    print(f'samples: the planted row is first in {places.count(0)} of 20; places {places}')
    assert places.count(0) >= 19
