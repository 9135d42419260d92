"""Optimizers of users with traits that torch's lack: trained, checkpointed and resumed as in a plain loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from learnkit import Checkpoint, Learner, OptionError
from learnkit.checkpoint.compare import learn_digest
from learnkit.checkpoint.optimizer_state import decode_optimizer, encode_optimizer
from learnkit.core.errors import CheckpointError, OptimizerError, WeightsError
from learnkit.distributed.compare import list_optimizer_tensors
from learnkit.optim.wrapper import OptimWrapper
from tests.helpers.comparing import same
from tests.helpers.own_optimizers import (
    N_BATCHES,
    TRAITS,
    Clearing,
    Counting,
    Factored,
    Options,
    Own,
    Saving,
    SinglePrecision,
    Wrapping,
    learner,
    weights,
    weights_by_hand,
)

BF16 = torch.bfloat16


def resume(opt_func: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Learner:
    "Return a new Learner whose fit was resumed from the third batch of another."
    learner(opt_func, folder, dtype).fit(1, cbs=Checkpoint(every='3ba'))
    path = next(iter(sorted((folder / 'checkpoints').glob('*ba3.ckpt'))))
    learn = learner(opt_func, folder, dtype)
    learn.fit(1, resume=path, cbs=Checkpoint(every='3ba'))
    return learn


def reload(opt_func: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Learner:
    "Return a new Learner that was trained for an epoch from the weights and the optimizer of another."
    learn = learner(opt_func, folder, dtype)
    learn.fit(1)
    learn.save('a', with_opt=True)
    learn = learner(opt_func, folder, dtype)
    learn.load('a', with_opt=True)
    learn.fit(1)
    return learn


@pytest.mark.parametrize('opt_func', TRAITS)
@pytest.mark.parametrize('dtype', [torch.float32, BF16])
def test_a_resumed_run_is_the_plain_loop(tmp_path: Path, opt_func: Any, dtype: torch.dtype) -> None:
    learn = resume(opt_func, tmp_path, dtype)
    assert torch.equal(weights(learn.model), weights_by_hand(opt_func, dtype=dtype))
    assert learn.time.ba == N_BATCHES
    learn = reload(opt_func, tmp_path, dtype)
    assert torch.equal(weights(learn.model), weights_by_hand(opt_func, 2, dtype))


def test_a_state_in_memory_is_copied() -> None:
    for opt_func in TRAITS:
        learn = learner(opt_func)
        learn.fit(1)
        state = learn.checkpoint_state()
        before = learn_digest(learn)
        other = learner(opt_func)
        other.load_checkpoint_state(state)
        assert learn_digest(other) == before
        raw = learn.opt.state_dict()
        other.opt.load_state_dict(raw)
        other.fit(1)
        assert learn_digest(learn) != learn_digest(other)
        assert same(encode_optimizer(learn.opt.state_dict()), encode_optimizer(raw))


def test_several_optimizers_keep_their_entries(tmp_path: Path) -> None:
    def two(params: Any, lr: float) -> Any:
        ps = list(params)
        return {'a': Counting(ps[:2], lr), 'b': Wrapping(ps[2:], lr)}

    learn = reload(two, tmp_path)
    assert learn.opt['a'].state['k'] == 2 * N_BATCHES
    plain = learner(two, tmp_path)
    plain.fit(2)
    assert torch.equal(weights(learn.model), weights(plain.model))


def test_entries_outlive_dropped_parameters() -> None:
    learn = learner(Counting)
    learn.fit(1)
    learn.model.add_module('last', nn.Linear(1, 1))
    del learn.model[0]
    learn.model.insert(0, nn.Linear(3, 4))
    learn.fit(1)
    state = learn.opt.opt.state
    assert state['n'] == 2 * N_BATCHES and state['k'] == 2 * N_BATCHES
    assert set(state) - {'n', 'k'} == set(learn.model.parameters())


def test_entries_are_compared_between_ranks() -> None:
    learn = learner(Counting)
    learn.fit(1)
    tensors = list_optimizer_tensors(learn)
    assert tensors["entry 'k' of the optimizer"] is learn.opt.state['k']
    assert len(tensors) == 1 + len(list(learn.model.parameters()))


# -- dtypes ------------------------------------------------------------------------------------------


def test_a_state_keeps_its_dtype_and_adam_its_counter() -> None:
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    state = {'mean': torch.full((3,), 0.1), 'step': torch.tensor(3.0), 'n': torch.tensor([2**60])}
    for opt, other in ((SinglePrecision([p]), SinglePrecision([p])), (Saving([p]), Saving([p]))):
        opt.state[p] = dict(state)
        wrapper = OptimWrapper(opt=other)
        wrapper.load_state_dict(opt.state_dict())
        loaded = wrapper.state[p]
        assert torch.equal(loaded['mean'], state['mean']) and loaded['mean'].dtype == torch.float32
        assert loaded['step'] == 3
        assert loaded['n'].item() == 2**60 and loaded['n'].dtype == torch.int64


def test_integers_that_an_optimizer_decodes_are_left_to_it() -> None:
    class Quantized(SinglePrecision):
        "Saves its average as bytes."

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for state in self.state.values():
                state['mean'] = state['mean'].to(BF16) / 100

    p = nn.Parameter(torch.ones(3, dtype=BF16))
    opt = Quantized([p])
    opt.state[p] = {'mean': torch.tensor([50, 25, 75], dtype=torch.uint8)}
    wrapper = OptimWrapper(opt=Quantized([p]))
    wrapper.load_state_dict(opt.state_dict())
    assert wrapper.state[p]['mean'].tolist() == pytest.approx([0.5, 0.25, 0.75], abs=0.01)


def test_a_step_of_a_fused_optimizer_is_single_precision() -> None:
    p = nn.Parameter(torch.ones(3))
    single = torch.optim.AdamW([p], fused=True)
    state = {'step': torch.tensor(3.0, dtype=torch.float64)}
    state |= {name: torch.ones(3) for name in ('exp_avg', 'exp_avg_sq')}
    wrapper = OptimWrapper(opt=single)
    wrapper.load_state_dict({**single.state_dict(), 'state': {0: state}})
    assert wrapper.state[p]['step'].dtype == torch.float32
    p.grad = torch.ones(3)
    wrapper.step()


def test_states_of_converted_weights_are_converted(tmp_path: Path) -> None:
    learn = learner(torch.optim.Adam, tmp_path)
    learn.fit(1)
    learn.save('a', with_opt=True)
    other = learner(torch.optim.Adam, tmp_path, BF16)
    with pytest.raises(WeightsError, match='dtype'):
        other.load('a')
    other.load('a', strict=False)
    assert {s['exp_avg'].dtype for s in other.opt.state.values()} == {BF16}
    other.fit(1)


# -- options and states that no file can hold --------------------------------------------------------


def test_options_that_are_not_data_are_those_of_the_new_optimizer(tmp_path: Path) -> None:
    learn = learner(Options, tmp_path)
    learn.create_opt()
    schedule = learn.opt.param_groups[0]['schedule']
    learn.load(resume(Options, tmp_path).save('a'), with_opt=True)
    [group] = learn.opt.param_groups
    assert group['schedule'] is schedule and group['function'] is torch.tanh
    assert group['momentum_dtype'] is torch.float64
    assert type(group['eps']) is np.float32 and type(group['whole']) is np.int64
    [group] = encode_optimizer(learn.opt.state_dict())['param_groups']
    assert {'schedule', 'function'}.isdisjoint(group) and group['name'] == 'own'


class Ramp:
    "A schedule that counts."

    def __init__(self) -> None:
        self.n = 0


class Ramped(Own):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        torch.optim.Optimizer.__init__(self, params, {'lr': lr, 'ramp': Ramp()})

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        group['ramp'].n += 1
        return p.grad


def test_an_option_that_changes_and_is_not_saved_is_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"Ramped.param_groups\[0\]\['ramp'\]"):
        learner(Ramped, tmp_path).fit(1, cbs=Checkpoint(every='3ba'))


class WithObject(Own):
    def scale(self, p: Any, state: Any, group: Any) -> Any:
        state['ramp'] = Ramp()
        return p.grad


def test_an_object_in_a_state_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"\['state'\]\[0\]\['ramp'\] is a Ramp"):
        learner(WithObject, tmp_path).fit(1, cbs=Checkpoint(every='3ba'))


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    learn = learner(Factored, tmp_path)
    learn.fit(1)
    before = learn_digest(learn)
    broken: list[Callable[[Any], Any]] = [
        lambda sd: {'base': sd},
        lambda sd: {**sd, 'own_layout': {}},
        lambda sd: {**sd, 'param_groups': sd['param_groups'] * 2},
    ]
    for change in broken:
        with pytest.raises(OptimizerError, match='Nothing was loaded'):
            learn.opt.load_state_dict(change(learn.opt.state_dict()))
    assert learn_digest(learn) == before
    other = learner(Wrapping)
    other.create_opt()
    with pytest.raises(OptimizerError, match='layout of another optimizer'):
        other.opt.load_state_dict(learn.opt.state_dict())


def test_an_unknown_kind_in_a_file_is_refused() -> None:
    learn = learner(Factored)
    learn.fit(1)
    state = learn.checkpoint_state()
    state['optimizer']['state'][0]['exp_avg_sq'] = {'__kind__': 'nothing', 'of': 1}
    before = learn_digest(learn)
    with pytest.raises(CheckpointError, match='cannot be resumed: optimizer'):
        learn.load_checkpoint_state(state)
    assert learn_digest(learn) == before


def test_encoded_states_are_plain_and_decode_to_themselves() -> None:
    for opt_func in TRAITS:
        learn = learner(opt_func)
        learn.fit(1)
        state = learn.opt.state_dict()
        encoded = encode_optimizer(state)
        assert same(encode_optimizer(decode_optimizer(encoded)), encoded)


# -- zero_grad ---------------------------------------------------------------------------------------


def test_zero_grad_of_an_optimizer_is_called() -> None:
    learn = learner(Clearing)
    learn.fit(1)
    assert learn.opt.opt._n_cleared == N_BATCHES + 1  # also when the fit begins
    assert all(p.grad is None for p in learn.model.parameters())


def test_zero_grad_that_was_set_on_an_optimizer_is_called() -> None:
    learn = learner(torch.optim.SGD)
    learn.create_opt()
    calls: list[bool] = []
    opt = learn.opt.opt
    original = opt.zero_grad
    opt.zero_grad = lambda: calls.append(True) or original()
    learn.fit(1)
    assert len(calls) == N_BATCHES + 1
    learn.opt.zero_grad(only=0)
    assert len(calls) == N_BATCHES + 2


def test_the_method_of_torch_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch.optim.Optimizer, 'zero_grad', lambda *a, **k: calls.append(True))
    learn = learner(torch.optim.SGD)
    learn.fit(1)
    assert not calls and all(p.grad is None for p in learn.model.parameters())


class Alternating(Learner):
    def train_batch(self) -> None:
        for name in ('a', 'b', 'b'):
            self.optimize(self.compute_loss(self.forward(self.model, self.x)), only=name)


def test_zero_grad_of_one_of_several_optimizers_is_called() -> None:
    def two(params: Any, lr: float) -> Any:
        ps = list(params)
        return {'a': Clearing(ps[:2], lr), 'b': Clearing(ps[2:], lr)}

    learn = learner(two)
    learn.__class__ = Alternating
    learn.fit(1)
    assert learn.opt['a']._n_cleared == N_BATCHES + 1
    assert learn.opt['b']._n_cleared == 2 * N_BATCHES + 1


class ClearingLBFGS(torch.optim.LBFGS):
    _n_cleared = n_calls = 0

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        def count() -> Any:
            self.n_calls += 1
            return closure()

        return super().step(count)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._n_cleared += 1
        super().zero_grad(set_to_none)


def test_zero_grad_is_called_by_closures() -> None:
    learn = learner(ClearingLBFGS)
    learn.fit(1)
    opt = learn.opt.opt
    # the first evaluation of each step is that of the loop, which is not repeated
    assert opt._n_cleared == (opt.n_calls - N_BATCHES) + N_BATCHES + 1


def test_the_state_in_a_checkpoint_is_loaded_with_its_weights(tmp_path: Path) -> None:
    for opt_func in TRAITS:
        folder = tmp_path / opt_func.__name__  # type: ignore[attr-defined]
        learn = learner(opt_func, folder, BF16)
        learn.fit(1, cbs=Checkpoint())
        [path] = (folder / 'checkpoints').glob('*.ckpt')
        other = learner(opt_func, folder, BF16)
        other.load(path, with_opt=True)
        assert same(
            encode_optimizer(other.opt.state_dict()), encode_optimizer(learn.opt.state_dict())
        )
