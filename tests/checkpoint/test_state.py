"""Checkpoints in memory: resuming from every place of a run equals an uninterrupted run."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import (
    EMA,
    Callback,
    DataLoaders,
    Learner,
    accuracy,
)
from learnkit.callbacks import Checkpoint, EarlyStoppingCallback
from learnkit.checkpoint import file, folder
from learnkit.checkpoint.digest import differences
from learnkit.checkpoint.folder import entries
from learnkit.core.errors import CheckpointError, DamagedError
from learnkit.core.file_tensor import FileTensor
from tests.helpers.resuming import Keep, check_every_place, scramble, train_without_stop

pytestmark = pytest.mark.filterwarnings('ignore:microbatch=.* on its own')


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def dls() -> DataLoaders:
    x, y = torch.randn(24, 4), torch.randint(3, (24,))
    return DataLoaders.from_tensors((x, y), (x[:8], y[:8]), bs=4)


def make(*cbs: Any, **kwargs: Any) -> Learner:
    torch.manual_seed(0)
    loss_func = nn.CrossEntropyLoss()
    return Learner(dls(), net(), loss_func, metrics=accuracy, cbs=list(cbs), lr=0.05, **kwargs)


def test_with_iterations_and_evaluations_in_the_middle_of_epochs() -> None:
    def fit(learn: Learner, resume: Any) -> None:
        learn.fit(3, iteration=2, resume=resume)

    def some(kept: list[Any]) -> list[Any]:
        return [s for i, s in enumerate(kept) if i % 6 == 3 or s['loop']['point'] != 'batch']

    kept = check_every_place(lambda: make(eval_every='4ba', microbatch=2), fit, some)
    assert [s['loop']['point'] for s in kept].count('iteration') == 1


def test_a_fit_can_be_longer_than_the_one_of_the_checkpoint() -> None:
    _, kept = train_without_stop(make, lambda learn, r: learn.fit(1))
    end, _ = train_without_stop(make, lambda learn, r: learn.fit(3))
    learn = make()
    learn.add_cb(Keep())
    learn.fit(3, resume=kept[-1])
    found = differences(end, learn.checkpoint_state())
    assert not found, found
    learn = make()
    with pytest.warns(UserWarning, match=r' 1 epochs, .* 3'):
        learn.fit(3, resume=kept[2])


def test_a_stopped_fit_stays_stopped() -> None:
    def stop(cb: Any) -> None:
        if cb.epoch == 1 and cb.iter == 2 and cb.training:
            cb.learn.stop()

    def some(kept: list[Any]) -> list[Any]:
        return kept[-4::2]

    fit = lambda learn, r: learn.fit(4, resume=r)
    check_every_place(lambda: make(Callback(after_batch=stop)), fit, some)
    check_every_place(
        lambda: make(EarlyStoppingCallback(monitor='accuracy', patience=1)),
        lambda learn, r: learn.fit(6, resume=r),
        some,
    )


def test_frozen_layers_and_modes_stay() -> None:
    def freeze(cb: Any) -> None:
        if cb.epoch == 0 and cb.iter == 3 and cb.training:
            cb.model[1].eval()
            cb.model[0].requires_grad_(False)

    check_every_place(lambda: make(Callback(after_batch=freeze)), places=lambda kept: kept[2::4])


def test_a_state_can_be_restored_outside_of_a_fit() -> None:
    end, _ = train_without_stop(lambda: make(EMA()), lambda learn, r: learn.fit(2))
    learn = make(EMA())
    learn.add_cb(Keep())
    learn.load_checkpoint_state(end)
    # of the last epoch
    found = [d for d in differences(end, learn.checkpoint_state()) if '.open.' not in d]
    assert not found, found


def test_what_is_no_state_of_a_fit_is_refused() -> None:
    end, _ = train_without_stop(make, lambda learn, r: learn.fit(1))
    with pytest.raises(CheckpointError, match='not a checkpoint'):
        make().fit(1, resume={'a': 1})
    with pytest.raises(CheckpointError, match='outside of a fit'):
        make().fit(2, resume=end)
    with pytest.raises(CheckpointError, match='in the middle of a run'):
        make(Callback(after_batch=lambda cb: cb.learn.checkpoint_state())).fit(1)
    scramble(0)


def test_fine_tune_resumes_in_either_of_its_fits() -> None:
    def split(model: Any) -> Any:
        return [list(model[:2].parameters()), list(model[2:].parameters())]

    def fit(learn: Learner, resume: Any) -> None:
        learn.fine_tune(2, 0.05, resume=resume)

    kept = check_every_place(lambda: make(EMA(), splitter=split), fit, lambda kept: kept[3::6])
    assert [s['loop']['stage'] for s in kept] == [0] * 7 + [1] * 14
    with pytest.raises(CheckpointError, match='fine_tune'):
        make(splitter=split).fine_tune(
            2, resume=train_without_stop(make, lambda learn, r: learn.fit(1))[1][0]
        )


def test_a_loss_with_its_own_weights() -> None:
    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.Parameter(torch.randn(3))
            self.register_buffer('n', torch.zeros(()))

        def forward(self, pred: Any, targ: Any) -> Any:
            self.n += 1
            return nn.functional.cross_entropy(pred - self.centre, targ) + self.n * 0.01

    def learner() -> Learner:
        learn = make()
        learn.loss_func = Centre()
        learn.opt_func = lambda params, lr: torch.optim.Adam(
            [*params, *learn.loss_func.parameters()], lr
        )
        return learn

    check_every_place(learner, places=lambda kept: kept[1::6])


def test_a_budget_can_be_extended_and_an_early_stop_stays_in_effect() -> None:
    _, kept = train_without_stop(make, lambda learn, r: learn.fit('7ba'))
    learn = make()
    # its epoch had ended with its evaluation, and the next one begins
    learn.fit('9ba', resume=kept[-1])
    assert learn.time.ba == 9 and learn.history[-1]['epoch'] == 2
    stop = [Callback(after_batch=lambda cb: cb.learn.stop())]
    _, kept = train_without_stop(lambda: make(*stop), lambda learn, r: learn.fit(2))
    learn = make()
    with pytest.warns(UserWarning, match='was stopped in epoch 0'):
        learn.fit(5, resume=kept[-1])
    assert learn.time.ba == 1


def momentum(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def buffers_of(state: Any) -> list[torch.Tensor]:
    return [s['momentum_buffer'] for s in state['optimizer']['state'].values()]


def test_a_resumed_fit_keeps_one_copy_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "The optimizer has the momentum that was read, and no weight that was read is kept while the fit runs."
    make(Checkpoint('3ba', tmp_path, keep_last=None), opt_func=momentum).fit(1)
    path = next(e.path for e in entries(tmp_path) if e.info['ba'] == 3)
    read: list[Any] = []
    pointers: list[int] = []
    real = folder.read_state

    def read_and_note(path: Path, deferred: Any) -> Any:
        state, info = real(path, deferred)
        read.extend(map(weakref.ref, state['model'].values()))
        pointers.extend(t.data_ptr() for t in buffers_of(state))
        return state, info

    def look(cb: Any) -> None:
        if cb.train_iter == 4:
            assert [ref for ref in read if ref() is not None] == []
            own = [s['momentum_buffer'].data_ptr() for s in cb.opt.state_dict()['state'].values()]
            assert own == pointers

    monkeypatch.setattr(folder, 'read_state', read_and_note)
    cbs = Callback(before_batch=look), Checkpoint(None, tmp_path)
    with pytest.warns(UserWarning, match='added `callback`'):
        make(*cbs, opt_func=momentum).fit(1, resume=path)
    assert len(read) == 9 and len(pointers) == 6


def run_to_the_end(tmp_path: Path) -> tuple[Any, Path]:
    "Return the state after two epochs, and the path of the checkpoint after batch 3."
    learn = make(Checkpoint('3ba', tmp_path, keep_last=None), opt_func=momentum)
    learn.fit(2)
    return learn.checkpoint_state(), next(e.path for e in entries(tmp_path) if e.info['ba'] == 3)


def test_large_tensors_are_read_when_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Handlers of `before_fit` see the checkpoint's values; what they change is replaced by these values."
    end, path = run_to_the_end(tmp_path)
    saved, _ = file.read_state(path)
    monkeypatch.setattr(file, 'MIN_DEFERRED', 9)
    found = folder.find(path, tmp_path)
    assert found is not None and all(isinstance(t, FileTensor) for t in buffers_of(found[1]))

    def look_and_scramble(cb: Any) -> None:
        assert differences(saved['model'], cb.model.state_dict()) == []
        for p, own in cb.opt.state_dict()['state'].items():
            assert torch.equal(
                own['momentum_buffer'], saved['optimizer']['state'][p]['momentum_buffer']
            )
            own['momentum_buffer'].data.fill_(7)
        for p in cb.model.parameters():
            p.data.fill_(7)

    cbs = Callback(before_fit=look_and_scramble), Checkpoint(None, tmp_path / 'resumed')
    learn = make(*cbs, opt_func=momentum)
    learn.fit(2, resume=path)
    state = learn.checkpoint_state()
    assert differences(state['model'], end['model']) == []
    assert differences(state['optimizer'], end['optimizer']) == []


class Averaged(nn.Linear):
    "Linear layer with a tensor in its extra state."

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.average = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.training:
            self.average = self.average.lerp(out.detach().mean(0), 0.1)
        return out + self.average

    def get_extra_state(self) -> Any:
        return {'averages': [self.average]}

    def set_extra_state(self, state: Any) -> None:
        (self.average,) = state['averages']


class Shared(torch.optim.SGD):
    "SGD that scales by a tensor of its group, and whose states share a tensor."

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.param_groups[0]['scales'] = [torch.ones(3)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        shared = None
        for p in group['params']:
            shared = self.state[p].setdefault('sum', torch.zeros(3) if shared is None else shared)
            self.state[p].setdefault('same', shared).add_(p.grad.mean())
            p.sub_(group['lr'] * (p.grad + shared.mean() * group['scales'][0].mean()))
        group['scales'][0].mul_(0.9)


def test_nested_and_shared_tensors_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Extra state, options and shared states of an optimizer equal an uninterrupted run, for large tensors too."

    def build() -> Learner:
        torch.manual_seed(0)
        data = dls()
        model = Averaged()
        cbs = Checkpoint('3ba', tmp_path, keep_last=None)
        return Learner(data, model, nn.CrossEntropyLoss(), opt_func=Shared, cbs=cbs, lr=0.05)

    monkeypatch.setattr(file, 'MIN_DEFERRED', 9)
    learn = build()
    learn.fit(2)
    end = learn.checkpoint_state()
    learn = build()
    learn.fit(2, resume=next(e.path for e in entries(tmp_path) if e.info['ba'] == 3))
    assert differences(end, learn.checkpoint_state()) == []


@pytest.mark.parametrize('change', ['cut', 'removed', 'replaced'])
def test_a_file_that_changes_before_it_is_loaded_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    "The error names the file, and weights and optimizer are as they were."
    _, path = run_to_the_end(tmp_path)
    other = entries(tmp_path)[0].path
    monkeypatch.setattr(file, 'MIN_DEFERRED', 9)

    def modify(cb: Any) -> None:
        if change == 'cut':
            path.write_bytes(path.read_bytes()[:-9])
        elif change == 'removed':
            path.unlink()
        else:
            other.replace(path)

    learn = make(opt_func=momentum)
    learn.fit(1)
    learn.add_cb(Checkpoint(None, tmp_path / 'resumed'))
    before = {name: t.clone() for name, t in learn.model.state_dict().items()}
    with pytest.raises(DamagedError, match=f'{path.name} .*changed or removed'):
        learn.fit(2, resume=path, cbs=Callback(before_fit=modify))
    assert differences(before, learn.model.state_dict()) == []


def test_training_does_not_change_a_state_that_is_given() -> None:
    _, kept = train_without_stop(
        lambda: make(opt_func=momentum), lambda learn, resume: learn.fit(2, resume=resume)
    )
    given = kept[4]
    before = [t.clone() for t in [*buffers_of(given), *given['model'].values()]]
    make(opt_func=momentum).fit(2, resume=given)
    assert all(map(torch.equal, before, [*buffers_of(given), *given['model'].values()]))
