"""Compare `ActivationStats` with the same activations in float64, and check its plots."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, Learner
from learnkit.callbacks.hooks import Hooks
from learnkit.core.errors import OptionError
from learnkit.data.dataloaders import DataLoaders
from learnkit.monitors.activation_stats import ActivationStats
from tests.helpers.learners import quiet_learner


class TwiceUsed(nn.Module):
    "A model that calls one layer twice and another never."

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.idle = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.body(x) * 9 + 4))


def quiet(
    model: nn.Module, cb: Callback, bs: int = 8, n: int = 24, shape: Any = (2,), **kwargs: Any
) -> Learner:
    x = torch.randn(n, *shape) * 3
    train = (x, torch.randn(n, 1))
    dls = DataLoaders.from_tensors(train, (x, torch.randn(n, 1)), bs=bs, shuffle=False)
    return quiet_learner(
        dls, model, nn.MSELoss(), opt_func=torch.optim.SGD, lr=0.0, cbs=cb, has_bar=False, **kwargs
    )


def outputs(learn: Learner, modules: list[nn.Module]) -> list[list[list[Tensor]]]:
    "Return the float64 output of every call of each module, for each training batch."
    found = []
    for x, _ in learn.dls.train:
        calls: list[list[Tensor]] = [[] for _ in modules]

        def keep(m: nn.Module, i: Any, o: Any, calls: list[list[Tensor]] = calls) -> None:
            calls[modules.index(m)].append(o.double().flatten())

        with Hooks(modules, keep):
            learn.model(x)
        found.append(calls)
    return found


def check(stats: ActivationStats, layer: int, batches: list[Tensor], tol: float = 1e-6) -> None:
    means, stds, near = map(list, stats.layer_stats(layer))
    assert means == pytest.approx([t.mean().item() for t in batches], rel=tol, abs=tol)
    assert stds == pytest.approx([t.std().item() for t in batches], rel=tol, abs=tol)
    assert near == pytest.approx([(t <= 0.05).double().mean().item() for t in batches], rel=tol)


def test_numbers_match_the_activations_in_float64() -> None:
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
    learn = quiet(model, cb := ActivationStats(with_hist=True, include_paramless=True))
    learn.fit(1)
    seen = outputs(learn, list(model))
    assert learn.activation_stats is cb and cb.layer_names == ['0', '1', '2'] and len(cb.stats) == 3
    for layer in range(3):
        check(cb, layer, [torch.cat(calls[layer]) for calls in seen])
    counts = torch.stack([torch.histc(torch.cat(calls[1]).float(), 40, 0, 10) for calls in seen], 1)
    assert torch.allclose(cb.hist(1), counts.log1p()) and counts.sum() > 0
    cell = cb.stats[1][-1]
    assert set(cell) == {'mean', 'std', 'near_zero', 'hist'}
    assert cell['mean'] == cb.layer_stats(-1)[0][1]
    assert cb.layer_stats('2') == cb.layer_stats(-1) == cb.layer_stats(2)


def test_near_zero_counts_negative_numbers_as_fastai_does() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor([[-3.0], [0.0], [0.05], [0.06]]) + 0 * self.w

    learn = quiet(Fixed(), cb := ActivationStats(), bs=4, n=4)
    learn.fit(1)
    assert cb.layer_stats(0)[2] == [0.75]


def test_the_last_call_of_a_layer_is_measured() -> None:
    learn = quiet(model := TwiceUsed(), cb := ActivationStats(with_hist=True))
    learn.fit(1)
    for i, layer in enumerate([model.body, model.head]):
        check(cb, i, [calls[0][-1] for calls in outputs(learn, [layer])])


def test_layers_with_several_outputs_or_none() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(2, 3, batch_first=True)
            self.head = nn.Linear(3, 1)
            self.idle = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    learn = quiet(model := Net(), cb := ActivationStats(), shape=(4, 2))
    learn.fit(1)
    with torch.no_grad():
        expected = [model.rnn(x) for x, _ in learn.dls.train]
    found = list(cb.layer_stats('rnn')[1])
    assert found == pytest.approx([out.std().item() for out, _ in expected], rel=1e-5)
    assert cb.stats[0][2] is None and isinstance(cb.stats[0][1], dict)
    with pytest.raises(OptionError, match=r"layer 2 \('idle'\) was measured"):
        cb.layer_stats('idle')


def test_gradients_are_measured_in_the_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    learn = quiet(model, cb := ActivationStats(is_forward=False))
    learn.fit(1)
    expected = []
    for x, y in learn.dls.train:
        out = model(x)
        expected.append(2 * (out - y).detach().double().flatten() / len(x))
    check(cb, 1, expected, tol=1e-5)
    assert len(cb.layer_stats(0)[0]) == 3


def test_only_due_training_batches_are_measured() -> None:
    learn = quiet(nn.Linear(2, 1), cb := ActivationStats(every=2), bs=4)
    learn.fit(2)
    assert len(cb.stats) == 6 and cb._at == [0, 2, 4, 6, 8, 10]
    learn.validate()
    learn.get_preds()
    assert len(cb.stats) == 6, 'an evaluation keeps them'
    learn.fit(1)
    assert len(cb.stats) == 3, 'a fit starts anew'


def test_state_goes_through_a_safe_file(tmp_path: Any) -> None:
    learn = quiet(TwiceUsed(), cb := ActivationStats(with_hist=True, every=4))
    learn.fit(3)
    torch.save(cb.state_dict(), tmp_path / 'state')
    other = ActivationStats(with_hist=True)
    other.load_state_dict(torch.load(tmp_path / 'state', weights_only=True))
    assert other.layer_stats('body') == cb.layer_stats('body') and len(other.stats) == 3
    assert torch.equal(other.hist(0), cb.hist(0))
    empty = ActivationStats()
    empty.load_state_dict(ActivationStats().state_dict())
    assert empty.stats == []


def test_bad_questions_are_reported() -> None:
    learn = quiet(nn.Sequential(nn.Linear(2, 1)), cb := ActivationStats())
    with pytest.raises(OptionError, match='nothing was measured'):
        cb.layer_stats(0)
    learn.fit(1)
    with pytest.raises(OptionError, match='with_hist=True'):
        cb.color_dim(0)


def test_plots() -> None:
    learn = quiet(TwiceUsed(), cb := ActivationStats(with_hist=True, every=2), bs=4)
    learn.fit(2)
    axs = cb.plot_layer_stats('body')
    for ax, values in zip(axs, cb.layer_stats('body'), strict=True):
        x, y = ax.lines[0].get_data()
        assert list(x) == [0, 2, 4, 6, 8, 10] and list(y) == values and ax.get_xlabel() == 'batch'
    assert axs[0].figure.get_suptitle() == "layer 0 ('body')"
    assert [ax.get_ylabel() for ax in axs] == ['mean', 'standard deviation', 'share <= 0.05']
    assert not any(ax.yaxis.get_major_formatter().get_useOffset() for ax in axs)

    ax = cb.color_dim(-2)
    assert torch.equal(torch.as_tensor(ax.images[0].get_array()), cb.hist('head'))
    assert ax.images[0].get_extent() == [0, 12, 0, 10] and ax.images[0].origin == 'lower'
    assert ax.images[0].colorbar.ax.get_ylabel() == 'log(1 + count)'
    assert ax.get_xlabel() == 'batch'
    assert ax.get_ylabel() == 'activation'
    assert "'head'" in ax.get_title()
    assert cb.color_dim(0, ax=ax) is ax and len(ax.images) == 2
    assert [ax.get_title()[:15] for ax in cb.plot_hist()] == ["layer 0 ('body'", "layer 1 ('head'"]
    assert len(cb.plot_hist('head')) == 1
