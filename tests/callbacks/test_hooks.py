"""Hooks: the values they receive, when they are registered, and their removal."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import (
    Callback,
    Learner,
    TimeError,
)
from learnkit.callbacks.hooks import (
    Hook,
    HookCallback,
    flatten_model,
    has_params,
    hook_outputs,
)
from learnkit.core.errors import OptionError
from learnkit.testing import RegModel
from tests.helpers.compiling import needs_whole_step
from tests.helpers.learners import quiet_synth_learner


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))


def n_hooks(model: nn.Module) -> int:
    kinds = '_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks'
    return sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)


def quiet(*cbs: Any, model: nn.Module | None = None, **kwargs: Any) -> Learner:
    return quiet_synth_learner(*cbs, model=model or net(), has_bar=False, **kwargs)


class Shapes(HookCallback):
    "Record the shape of each output with its batch number and `training`."

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[tuple[int, bool, tuple[int, ...]]] = []

    def hook(self, m: nn.Module, inp: Any, out: Any) -> Any:
        self.seen.append((self.train_iter, self.training, tuple(out.shape)))
        return out.mean()


# -- hooks by hand


def test_a_hook_sees_inputs_and_output_until_it_is_removed() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    with Hook(layer, lambda m, i, o: (m, i, o)) as h:
        assert h.stored is None and h.hooked
        out = layer(x)
    m, (seen,), stored = h.stored
    assert m is layer and torch.equal(seen, x) and torch.equal(stored, out)
    assert not stored.requires_grad and out.requires_grad and not h.hooked and h.removed
    layer(torch.zeros(1, 3))
    assert torch.equal(h.stored[2], out) and n_hooks(layer) == 0
    h.remove()


def test_a_hook_is_removed_after_an_exception_and_does_not_change_the_output() -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(ZeroDivisionError), Hook(layer, lambda m, i, o: 1 / 0):
        layer(torch.zeros(1, 3))
    assert n_hooks(layer) == 0
    with Hook(layer, lambda m, i, o: torch.zeros(7)):
        assert layer(torch.zeros(1, 3)).shape == (1, 2)


def test_inputs_given_by_name_come_after_those_by_position() -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return x * by

    m = Scale()
    with Hook(m, lambda m, i, o: [t.item() for t in i]) as h:
        m(torch.tensor(2.0), by=torch.tensor(3.0))
    assert h.stored == [2.0, 3.0]


def test_backward_hooks_store_the_gradients_of_outputs() -> None:
    model, x = net(), torch.randn(5, 1)
    with hook_outputs(model, grad=True) as hooks:
        (model(x) ** 2).sum().backward()
    out = 2 * model(x).detach()
    assert isinstance(model[0], nn.Linear) and isinstance(model[2], nn.Linear)
    through = out @ model[2].weight.detach()
    assert torch.allclose(hooks.stored[2][0], out) and torch.allclose(hooks.stored[1][0], through)
    assert torch.allclose(hooks.stored[0][0], through * (model[0](x) > 0))
    assert n_hooks(model) == 0


def test_backward_hooks_go_with_in_place_modules_and_outputs_without_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.LSTM(3, 4))
    with hook_outputs(model, grad=True) as hooks:
        out, _ = model(torch.randn(5, 2))
        out.sum().backward()
    outputs, hidden, cell = hooks.stored[2]
    assert torch.equal(outputs, torch.ones(5, 4)) and hidden is None and cell is None
    after, before = hooks.stored[1][0], hooks.stored[0][0]
    assert before.shape == after.shape == (5, 3)
    assert torch.equal(before, after * (before != 0))
    assert before.any()


def test_layers_are_leaves_and_owners_of_parameters() -> None:
    mha = nn.MultiheadAttention(4, 2)
    assert flatten_model(mha) == [mha, mha.out_proj]
    shared = nn.Linear(2, 2)
    assert flatten_model(nn.Sequential(shared, relu := nn.ReLU(), shared)) == [shared, relu]
    assert has_params(shared) and not has_params(nn.ReLU())


# -- the callback


def test_hooks_are_there_in_training_and_evaluation_and_gone_afterwards() -> None:
    learn = quiet(cb := Shapes(), n_train=2, n_valid=1)
    learn.fit(1)
    assert cb.seen == [
        (0, True, (16, 3)),
        (0, True, (16, 1)),
        (1, True, (16, 3)),
        (1, True, (16, 1)),
        (2, False, (16, 3)),
        (2, False, (16, 1)),
    ]
    assert cb.layer_names == ['0', '2'] and cb.modules == [learn.model[0], learn.model[2]]
    assert n_hooks(learn.model) == 0 and cb.hooks is not None
    x = learn.dls.valid.tensors[0][:16]
    assert cb.hooks.stored[1].item() == pytest.approx(learn.model(x).mean().item())
    learn.fit(1)
    assert len(cb.seen) == 12 and n_hooks(learn.model) == 0


@pytest.mark.parametrize(
    ('every', 'batches'),
    [
        (2, [0, 2, 4, 6]),
        ('3ba', [0, 3, 6]),
    ],
)
def test_every_hooks_only_some_batches_of_training(every: Any, batches: list[int]) -> None:
    counts: list[int] = []
    cb = Shapes(every=every, modules='0')
    watcher = Callback(before_batch=lambda cb: counts.append(n_hooks(cb.learn.model)))
    learn = quiet(cb, watcher, n_train=4)
    learn.fit(2)
    assert [i for i, training, _ in cb.seen if training] == batches and len(cb.seen) == len(batches)
    assert sum(counts) == len(batches) and set(counts) == {0, 1}
    cb.seen.clear()
    learn.fit(1)
    assert cb.seen[0][0] == 0, 'the first batch of each fit is hooked'


class Trouble(Exception):
    pass


EVENTS = (
    'before_fit before_epoch before_train before_draw before_batch before_pred after_pred '
    'after_loss before_backward after_backward before_step after_step after_batch after_train '
    'before_validate after_validate after_epoch after_fit cleanup'
).split()


@pytest.mark.parametrize('every', [None, 1])
@pytest.mark.parametrize('event', EVENTS)
def test_no_hook_is_left_after_an_exception_in_any_event(event: str, every: int | None) -> None:
    for error in (Trouble, KeyboardInterrupt):

        def fail(cb: Callback, error: type[BaseException] = error) -> None:
            raise error

        cb = Shapes(every=every)
        learn = quiet(cb, n_train=2)
        with pytest.raises(error):
            learn.fit(1, cbs=Callback(**{event: fail}))
        assert n_hooks(learn.model) == 0 and (cb.hooks is None or event == 'cleanup')
        learn.fit(1)
        assert n_hooks(learn.model) == 0 and cb.hooks is not None


def test_modules_are_given_as_modules_or_names() -> None:
    model = nn.Sequential()
    model.add_module('body', net())
    model.add_module('head', nn.Linear(1, 1))
    foreign = nn.Linear(1, 1)
    for given, names in (
        ('body.1', ['body.1']),
        ([model.head, 'body'], ['head', 'body']),
        (model.body, ['body.0', 'body.1', 'body.2']),
        (foreign, ['Linear']),
        (RegModel(), ['RegModel']),
    ):
        cb = HookCallback(given)
        quiet(cb, model=model).fit(1)
        assert cb.layer_names == names
    cb = HookCallback(include_paramless=True)
    quiet(cb, model=model).fit(1)
    assert cb.layer_names == ['body.0', 'body.1', 'body.2', 'head']


def test_what_cannot_be_hooked_is_reported_before_training() -> None:
    learn = quiet(HookCallback('hed'), model=nn.Sequential())
    learn.model.add_module('head', nn.Linear(1, 1))
    start = learn.model.head.weight.item()
    with pytest.raises(OptionError, match=r"Sequential .*'hed'.*`head`.*summary"):
        learn.fit(1)
    assert learn.model.head.weight.item() == start
    for kwargs, error, message in (
        ({'every': 0}, TimeError, 'positive'),
        ({'every': '1ep'}, TimeError, "'100ba'"),
    ):
        with pytest.raises(error, match=message):
            HookCallback(**kwargs)


# -- compiled code


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_a_compiled_model_runs_uncompiled_while_hooks_are_there() -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            compiled.append(1)
            return graph(*args)

        return run

    for wrapped in (False, True):
        compiled.clear()
        model: Any = torch.compile(net(), backend=backend) if wrapped else net()
        learn = quiet(cb := Shapes(every=2), model=model, n_train=4, n_valid=1)
        if not wrapped:
            learn.compile(backend=backend)
        learn.fit(1)
        assert [i for i, *_ in cb.seen] == [0, 0, 2, 2] and cb.layer_names == ['0', '2']
        assert len(compiled) == 3, 'batches 1 and 3, and the validation'
        torch._dynamo.reset()


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@needs_whole_step
def test_the_ordinary_step_runs_while_hooks_are_there() -> None:
    learn = quiet(cb := Shapes(), n_train=4).compile(step=True, backend='eager')
    explanations: list[str] = []
    cbs = Callback(before_validate=lambda cb: explanations.append(cb.learn.explain_step()))
    learn.fit(1, cbs=cbs)
    assert 'runs: module 0 has hooks; module 2 has hooks.' in explanations[0]
    assert len([1 for _, training, _ in cb.seen if training]) == 8

    learn.remove_cb(cb)
    learn.fit(2)
    assert 'has hooks' not in learn.explain_step()
