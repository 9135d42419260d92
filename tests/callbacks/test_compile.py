"""Compiled training: equal numbers, the uncompiled step where it is needed, and the reason in a message."""

import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import (
    SGD,
    Adam,
    Callback,
    CancelStepException,
    DataLoaders,
    Learner,
    TrainEvalCallback,
)
from learnkit.core.errors import LossError, OptionError
from tests.helpers.compiling import (
    Backend,
    compiled,
    distance,
    fit_both,
    learner,
    mlp,
    needs_whole_step,
)

pytestmark = needs_whole_step

has_compiler = os.environ.get('CXX') or shutil.which('g++') or shutil.which('clang++')
needs_compiler = pytest.mark.skipif(not has_compiler, reason='needs a C++ compiler')


def test_options_that_torch_does_not_have_are_refused() -> None:
    for step in (False, True):
        for name in ('loss', 'optimizer', 'metrics'):
            with pytest.raises(TypeError, match=f"'{name}'. .* `Learner.dls, model, loss_func"):
                learner().compile(step=step, **{name: 'mse'})
        with pytest.raises(TypeError, match='Did you mean `fullgraph`'):
            learner().compile(step=step, fullgraf=True)
    with pytest.raises(OptionError, match="`mode='reduce-overhead'`"):
        learner().compile('reduce-overhead')  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- same numbers


def schedule(cb: Any) -> None:
    cb.opt.set_hypers(
        lr=0.01 * (1 + cb.pct_train), mom=0.9 - 0.1 * cb.pct_train, wd=0.01 * (2 - cb.pct_train)
    )


OPTIMIZERS = {
    'sgd': partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01),
    'nesterov': partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    'decoupled': partial(SGD, mom=0.9, wd=0.01),
    'adam': partial(torch.optim.Adam, weight_decay=0.01),
    'adamw': torch.optim.AdamW,
    'learnkit': Adam,
}


IN_SHORT = ('nesterov', 'decoupled', 'adamw')  # each option of the others at least once


@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.full) for name in OPTIMIZERS],
)
def test_same_weights_under_a_schedule_without_recompiling(name: str) -> None:
    def make() -> Any:
        return learner(opt_func=OPTIMIZERS[name], cbs=Callback(before_batch=schedule))

    plain, learn, backend = fit_both(make, 4)
    assert learn.opt.n_steps == plain.opt.n_steps == learn.time.st == 40 and learn.train_iter == 40
    assert backend.calls == 39 and backend.graphs == 1
    assert distance(plain, learn) < 1e-6

    assert learn.recorder.hps == plain.recorder.hps and len(set(learn.recorder.lrs)) == 40
    expected = torch.stack([*plain.recorder.losses])
    assert torch.allclose(torch.stack([*learn.recorder.losses]), expected, rtol=1e-5)

    ours, theirs = learn.opt.state_dict(), plain.opt.state_dict()
    assert ours['param_groups'] == theirs['param_groups']
    assert ours['state'].keys() == theirs['state'].keys()
    for i, state in theirs['state'].items():
        assert state.keys() == ours['state'][i].keys()
        for key, value in state.items():
            assert torch.allclose(value, ours['state'][i][key], rtol=1e-4, atol=1e-7)


def with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(16, 1),
    )


@needs_compiler
@pytest.mark.parametrize(
    'n',
    [
        80,
        pytest.param(84, marks=pytest.mark.full),  # the last batch is smaller: a second compilation
    ],
)
def test_inductor_gives_the_same_weights_and_dropout(n: int) -> None:
    from torch._inductor import config as inductor

    def make() -> Any:
        cbs = Callback(before_batch=schedule)
        return learner(with_dropout, opt_func=torch.optim.AdamW, n=n, cbs=cbs)

    plain, learn = make(), make().compile(step=True)
    # half the time: no processes, no trials
    with inductor.patch({'compile_threads': 1, 'cpp.vec_isa_ok': True}):
        for one in (plain, learn):
            torch.manual_seed(1)
            one.fit(9)
    assert learn.opt.n_steps == 9 * math.ceil(n / 8) and distance(plain, learn) < 1e-6
    assert learn.explain_step().startswith('The compiled step runs')


# ------------------------------------------------------------------------ when the ordinary runs


class Clip(Callback):
    def before_step(self) -> None:
        nn.utils.clip_grad_norm_(self.learn.model.parameters(), 0.1)


class Look(Callback):
    def after_loss(self) -> None: ...


def test_a_handler_inside_the_passes_needs_the_ordinary_step() -> None:
    look = Look()
    plain, learn, backend = fit_both(lambda: learner(cbs=Look()))
    assert distance(plain, learn) == 0 and backend.calls == 0
    found = learn.explain_step()
    assert found.startswith('The ordinary step runs: Look.after_loss has to be called.')
    assert 'partial(torch.optim.SGD, fused=True)' in found

    learn.remove_cb(Look)
    learn.fit(1)
    assert backend.calls == 9 and learn.explain_step().startswith('The compiled step runs')
    with learn.added_cbs(look):
        learn.fit(1)
    assert backend.calls == 9
    learn.fit(1)
    assert backend.calls == 19


def test_a_handler_of_the_optimizers_step_leaves_the_passes_compiled() -> None:
    plain, learn, backend = fit_both(lambda: learner(cbs=Clip()))
    assert distance(plain, learn) < 1e-6 and backend.calls == 19 and backend.graphs == 1
    found = learn.explain_step()
    assert found.startswith('Forward and backward run compiled for batches of the shapes')
    assert 'Clip.before_step has to be called' in found
    assert 'partial(torch.optim.SGD, fused=True)' in found
    for one in (plain, learn):
        one.remove_cb(Clip)
        one.fit(1)
        with one.added_cbs(Clip()):
            one.fit(1)
    # the first batch without the callback; both kinds of code remain
    assert distance(plain, learn) < 1e-6 and backend.calls == 38 and backend.graphs == 2


class OwnStep(Learner):
    def _step(self) -> None:
        super()._step()


class OwnBatch(Learner):
    def train_batch(self) -> None:
        self.optimize(self.compute_loss(self.forward(self.model, self.x)))


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        ({'opt_func': torch.optim.LBFGS}, 'an optimizer with a closure holds the seam `step`'),
        ({'make_model': lambda: nn.DataParallel(mlp())}, 'the model is a DataParallel'),
        ({'cls': OwnBatch}, 'OwnBatch has its own `train_batch`'),
    ],
)
def test_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    # the second batch would be compiled
    plain, learn, backend = fit_both(lambda: learner(n=24, **options), 1)
    assert reason in learn.explain_step()
    assert learn.explain_step().startswith('The ordinary step runs: ')
    assert backend.graphs == 0 and distance(plain, learn) == 0


def make_five(groups: Any, lr: float) -> Any:
    return [torch.optim.SGD([p], lr) for group in groups for p in [group]]


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        ({'opt_func': torch.optim.RMSprop}, 'RMSprop is none of SGD, DecoupledSGD, Adam, AdamW'),
        (
            {'make_model': lambda: nn.Linear(8, 1, bias=False), 'opt_func': torch.optim.Muon},
            'Muon is none of',
        ),
        ({'opt_func': partial(torch.optim.Adam, amsgrad=True)}, 'amsgrad of Adam is set'),
        (
            {'opt_func': lambda ps, lr: torch.optim.Adam(ps, torch.tensor(lr))},
            'of Adam is a tensor',
        ),
        ({'opt_func': make_five}, 'there are 5 optimizers'),
        ({'cls': OwnStep}, 'OwnStep has its own `_step`'),
    ],
)
def test_the_passes_are_compiled_where_the_optimizers_step_is_not(
    options: dict[str, Any], reason: str
) -> None:
    plain, learn, backend = fit_both(lambda: learner(**options))
    found = learn.explain_step()
    assert found.startswith('Forward and backward run compiled') and reason in found
    # an own method of the loop is checked up to the first step
    assert backend.graphs == 1 and backend.calls >= 18
    assert learn.opt.n_steps == plain.opt.n_steps == 20 and distance(plain, learn) < 1e-6


def hook_module(learn: Any) -> Any:
    return learn.model[0].register_forward_hook(lambda *args: None)


def hook_parameter(learn: Any) -> Any:
    return learn.model[0].weight.register_hook(lambda grad: 2 * grad)


def hook_accumulated(learn: Any) -> Any:
    def double(p: Tensor) -> None:
        p.grad = 2 * p.grad

    return learn.model[0].weight.register_post_accumulate_grad_hook(double)


HOOKS: dict[Callable[[Any], Any], str] = {
    hook_module: 'module 0 has hooks',
    hook_parameter: '0.weight has hooks',
    hook_accumulated: '0.weight has hooks',
}


def test_hooks_are_noticed_when_they_come_and_go() -> None:
    def add(cb: Any) -> None:
        if cb.iter == 5:
            cb.learn.handle = hook(cb.learn)

    plain, (learn, backend) = learner(), compiled(learner())
    for one in (plain, learn):
        one.fit(1)
    assert backend.calls == 9
    for hook, reason in HOOKS.items():
        calls = backend.calls
        for one in (plain, learn):
            one.fit(1, cbs=Callback(before_batch=add))
            reason_text = learn.explain_step()
            one.handle.remove()
        assert backend.calls == calls + 5 and reason in reason_text, hook
        assert distance(plain, learn) < 1e-6, hook
        for one in (plain, learn):
            one.fit(1)
        assert backend.calls == calls + 14, hook  # the first batch found that the hook was gone


def test_a_hook_of_the_optimizer_leaves_the_passes_compiled() -> None:
    seen: list[int] = []
    learn, backend = compiled(learner())
    learn.fit(1)

    def add(cb: Any) -> None:
        if cb.iter == 5:
            handles.append(
                cb.learn.opt.opt.register_step_post_hook(lambda *args: seen.append(cb.iter))
            )

    handles: list[Any] = []
    learn.fit(1, cbs=Callback(before_batch=add))
    assert seen == [5, 6, 7, 8, 9] and 'SGD has hooks' in learn.explain_step()
    assert backend.calls == 9 + 9 and backend.graphs == 2
    handles[0].remove()
    learn.fit(1)
    assert len(seen) == 5 and backend.calls == 28 and backend.graphs == 2
    assert learn.explain_step().startswith('The compiled step runs')


def test_a_torch_scheduler_may_step() -> None:
    def start(cb: Any) -> None:
        cb.learn.sched = torch.optim.lr_scheduler.ExponentialLR(cb.learn.opt.opt, 0.9)

    def advance(cb: Any) -> None:
        cb.learn.sched.step()

    make = lambda: learner(cbs=Callback(before_train=start, after_batch=advance))
    plain, learn, backend = fit_both(make, 1)
    assert backend.calls == 9 and distance(plain, learn) < 1e-6
    assert learn.recorder.lrs[-1] == plain.recorder.lrs[-1] < 5e-3


#  parameters, gradients, optimizer states


def test_ordinary_steps_in_between_are_counted() -> None:
    def cancel(cb: Any) -> None:
        raise CancelStepException

    def make() -> Any:
        return learner(opt_func=torch.optim.Adam)

    plain, (learn, backend) = make(), compiled(make())
    for one in (plain, learn):
        one.fit(1)
        one.fit(1, cbs=Callback(before_step=lambda cb: cancel(cb) if cb.iter % 2 else None))
        one.fit(1)
    assert distance(plain, learn) < 1e-6
    assert learn.opt.n_steps == plain.opt.n_steps == 25
    assert backend.calls >= 18


# -------------------------------------------------------------------------------- models and losses


class Moody(nn.Module):
    "Branches on its data, which torch cannot compile."

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * 2 if out.sum() > 0 else out


def test_what_cannot_be_compiled_runs_as_usual() -> None:
    plain, learn, backend = fit_both(lambda: learner(Moody))
    assert distance(plain, learn) == 0 and backend.calls == 0 and learn.opt.n_steps == 20
    assert 'Unsupported' in learn.explain_step() and 'ata-dependent' in learn.explain_step()


class Nested(nn.Module):
    "Returns tuples within a tuple, as an LSTM does."

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        return out, (out.sigmoid(), [out.tanh()])


def test_an_output_of_tuples_in_a_tuple() -> None:
    plain, learn, backend = fit_both(
        lambda: learner(Nested, lambda pred, y: (pred[0] - y).square().mean() + pred[1][0].mean())
    )
    assert distance(plain, learn) < 1e-6 and backend.calls == 19


class Counter(Moody):
    "Multiplies by the number of its calls, which would be compiled each time."

    n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        out: Tensor = self.inner(x)
        return out * (1 + 0.01 * self.n_calls)


def test_a_step_that_changes_at_every_batch_is_given_up() -> None:
    plain, learn, backend = fit_both(lambda: learner(Counter))
    assert distance(plain, learn) < 1e-6 and learn.model.n_calls == 20
    assert backend.graphs == backend.calls == 4
    text = learn.explain_step()
    assert text.startswith('The ordinary step runs') and 'model.n_calls == 4' in text


def test_errors_of_model_and_data_come_out_as_usual() -> None:
    x = torch.randn(8, 8)
    good, bad = (x, x[:, :1]), (x[:, :3], x[:, :1])
    learn, backend = compiled(learner(batches=[good] * 4 + [bad]))
    with pytest.raises(RuntimeError, match='mat1 and mat2') as raised:
        learn.fit(1)
    assert type(raised.value) is RuntimeError
    assert raised.value.__context__ is None
    assert backend.calls == 3
    learn.dls = DataLoaders([good] * 4)
    learn.fit(1)
    assert backend.calls == 7 and learn.explain_step().startswith('The compiled step runs')

    x, y = torch.randn(2, 8, 8)
    learn, _ = compiled(
        learner(lambda: nn.Linear(8, 8), lambda pred, y: (pred - y) ** 2, batches=[(x, y)] * 3)
    )
    with pytest.raises(LossError):
        learn.fit(1)


# ------------------------------------------------------------------------------------- shapes, time


def test_dynamic_compiles_for_all_shapes() -> None:
    batches = [(x := torch.randn(n, 8), x[:, :1]) for n in range(8, 18)]
    plain = learner(batches=batches)
    learn, backend = compiled(learner(batches=batches), dynamic=True)
    for one in (plain, learn):
        one.fit(1)
    assert distance(plain, learn) < 1e-6
    assert backend.graphs == 1 and backend.calls == 9


# ----------------------------------------------------------------------------------- around compile


def test_compiling_the_model_keeps_keys_and_survives_new_callbacks() -> None:
    backend = Backend()
    plain, learn = learner(), learner()
    keys = [*learn.model.state_dict()]
    assert learn.compile(backend=backend) is learn and [*learn.model.state_dict()] == keys
    found = learn.explain_step()
    assert found == 'The ordinary step runs: `learn.compile(step=True)` was not called.'
    learn.fit(1)
    graphs = backend.graphs
    learn.fit(1, cbs=[Clip(), Callback(after_pred=lambda cb: None), TrainEvalCallback()])
    assert backend.graphs == graphs == 1
    plain.fit(1)
    plain.fit(1, cbs=[Clip(), TrainEvalCallback()])
    assert distance(plain, learn) < 1e-6


def test_the_first_step_is_not_compiled_and_bad_options_are_refused_at_once() -> None:
    learn = learner().compile(step=True, backend='eager')
    found = learn.explain_step()
    assert found == 'The ordinary step runs: compiling comes after the next training batch.'
    with pytest.raises(RuntimeError, match='fastest'):
        learner().compile(step=True, mode='fastest')
    with pytest.raises(TypeError, match='modus'):
        learner().compile(step=True, modus='default')


#  CUDA


# torch captures an empty graph first
@pytest.mark.filterwarnings('ignore:The CUDA Graph is empty')
@pytest.mark.cuda
@pytest.mark.parametrize('opt_func', [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam])
def test_one_graph_on_a_gpu_gives_the_same_weights(opt_func: Any) -> None:
    x = torch.randn(64, 8)

    def make() -> Any:
        batches = [(x.cuda(), x[:, :1].cuda())] * 50
        cbs = Callback(before_batch=schedule_lr)
        return learner(lambda: mlp().cuda(), batches=batches, opt_func=opt_func, cbs=cbs)

    plain, learn = make(), make().compile(step=True)
    plain.fit(2)
    learn.fit(2)
    assert distance(plain, learn) < 1e-5 and learn.explain_step().startswith('The compiled')
    assert len({float(loss) for loss in learn.recorder.losses}) > 90


def schedule_lr(cb: Any) -> None:
    cb.opt.set_hypers(lr=0.01 * (1 + cb.pct_train))


def test_a_hook_on_the_loss_runs() -> None:
    learn, _ = compiled(learner(loss_func=nn.MSELoss()))
    learn.fit(2)
    seen: list[int] = []
    handle = learn.loss_func.register_forward_hook(lambda *args: seen.append(1))
    learn.fit(1)
    handle.remove()
    assert len(seen) == 10
