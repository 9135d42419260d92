"""Losses and gradients of single samples: by torch.func and one after the other, compared with a loop by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, CutMix, DataLoaders, Learner, MixUp
from learnkit.core.errors import LossError
from learnkit.core.plotting import pyplot
from learnkit.data.show import show_samples
from learnkit.debug import samples
from learnkit.debug.samples import Samples, measure_samples


class ByName(nn.Module):
    "Model of a batch that is a dict."

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.linear(values)
        return out


class Branches(nn.Module):
    "Model that depends on values, which torch.func cannot transform."

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return 2 * out if out.sum().item() > 0 else out


X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1] * 4)
CASES: dict[str, tuple[Any, Any, bool]] = {
    'norm and dropout': (
        lambda: nn.Sequential(
            nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, 2)
        ),
        (X, Y),
        True,
    ),
    'dict': (ByName, ({'values': X}, Y), True),
    'branches': (Branches, (X, Y), False),
}


@pytest.mark.parametrize('name', CASES)
def test_samples_are_those_of_a_loop_by_hand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, batch, is_supported = CASES[name]
    torch.manual_seed(0)
    model = build()
    loss_func = nn.CrossEntropyLoss()
    together: list[bool] = []
    measure = samples._measure_together

    def spy(*args: Any) -> Any:
        together.append((result := measure(*args)) is not None)
        return result

    monkeypatch.setattr(samples, '_measure_together', spy)
    found: list[list[dict[str, Any]]] = []
    expected: list[tuple[float, float]] = []

    def look(cb: Any) -> None:
        found.extend(measure_samples(cb.learn, vectorized) for vectorized in (True, False))
        model.eval()
        for x, y in zip(X, Y, strict=True):
            loss = loss_func(model(x[None]), y[None])
            grads = torch.autograd.grad(loss, [*model.parameters()])
            norm = torch.cat([g.flatten() for g in grads]).norm()
            expected.append((loss.item(), norm.item()))
        model.train()

    learn = Learner(DataLoaders([batch]), model, loss_func)
    with learn.no_bar():
        learn.fit(1, cbs=Callback(before_batch=look))
    assert together == [is_supported]
    total = sum(norm for _, norm in expected)
    for rows in found:
        assert [row['loss'] for row in rows] == sorted((row['loss'] for row in rows), reverse=True)
        for row in rows:
            loss, norm = expected[row['position']]
            assert row['loss'] == pytest.approx(loss, rel=1e-5)
            assert row['share'] == pytest.approx(norm / total, rel=1e-4)


@pytest.mark.parametrize('blend', [MixUp, CutMix])
@pytest.mark.parametrize('vectorized', [True, False])
def test_blended_samples(blend: type[Any], vectorized: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    rows: list[dict[str, Any]] = []
    expected: list[float] = []

    def look(cb: Any) -> None:
        mix = cb.learn.cbs.filter(lambda o: isinstance(o, blend))[0]
        rows.extend(measure_samples(cb.learn, vectorized))
        with torch.no_grad():
            pred = model(cb.x).log_softmax(1)
        share = mix.lam.flatten()
        for i in range(len(cb.x)):
            lam = float(share[i if len(share) > 1 else 0])
            own, other = pred[i, cb.y[i]], pred[i, mix.yb1[0][i]]
            expected.append(-(lam * own + (1 - lam) * other).item())

    x = torch.randn(8, 1, 4, 4)
    learn = Learner(DataLoaders([(x, Y)]), model, nn.CrossEntropyLoss(), cbs=blend(2.0))
    with learn.no_bar():
        learn.fit(1, cbs=Callback(before_batch=look, order=1000))
    losses = [row['loss'] for row in sorted(rows, key=lambda row: row['position'])]
    assert losses == pytest.approx(expected, rel=1e-5)


class BatchLoss(Callback):
    "Callback whose method is the loss function, as of fastai's MixUp."

    run_valid = False

    def before_train(self) -> None:
        self.learn.loss_func = self.compute

    def after_train(self) -> None:
        self.learn.loss_func = nn.CrossEntropyLoss()

    def compute(self, pred: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(pred, y.flip(0))


def test_a_loss_of_the_whole_batch_is_refused() -> None:
    look = Callback(before_batch=lambda cb: measure_samples(cb.learn))
    model, loss = nn.Linear(3, 2), nn.CrossEntropyLoss()
    learn = Learner(DataLoaders([(X, Y)]), model, loss, cbs=[BatchLoss(), look])
    with learn.no_bar(), pytest.raises(LossError, match='BatchLoss computes the loss of the whole'):
        learn.fit(1)


class Counting(nn.Linear):
    "A line that counts its calls, on its class: `measure_samples` restores the attributes of a model."

    n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.n_calls += 1
        return super().forward(x)


def test_the_model_is_called_once_for_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    y = Y[:, None].float()
    for most, n_calls in ((samples._MOST, 1), (8, 4)):  # 8 elements: two samples at a time
        monkeypatch.setattr(samples, '_MOST', most)
        model = Counting(3, 1)
        with torch.no_grad():
            errors = (model(X) - y)[:, 0]
        Counting.n_calls = 0
        rows: list[dict[str, Any]] = []
        look = Callback(before_batch=lambda cb, rows=rows: rows.extend(measure_samples(cb.learn)))
        with Learner(DataLoaders([(X, y)]), model, nn.MSELoss(), cbs=look).no_bar() as learn:
            learn.fit(1)
        assert Counting.n_calls == n_calls + 1  # and the training itself
        # the gradient of (w x + b - y)^2 is 2 (w x + b - y) (x, 1)
        norms = errors.abs() * (X.square().sum(1) + 1).sqrt()
        order = errors.abs().argsort(descending=True).tolist()
        losses, shares = errors.square()[order].tolist(), (norms / norms.sum())[order].tolist()
        assert [row['position'] for row in rows] == order
        assert [row['loss'] for row in rows] == pytest.approx(losses, rel=1e-5)
        assert [row['share'] for row in rows] == pytest.approx(shares, rel=1e-5)


def test_pictures() -> None:
    pytest.importorskip('matplotlib')
    rows = [{'position': i, 'loss': 1.0 - i, 'share': 0.5, 'index': i} for i in range(2)]
    html = str(samples.Samples(rows, (torch.rand(2, 1, 4, 4),))._repr_html_())
    assert html.count('<img') == 1 and html.count('<tr>') == 3


def test_eight_samples_are_displayed_each_on_its_own_scale() -> None:
    pytest.importorskip('matplotlib')
    images = torch.rand(20, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    images[3] *= 60 / images[3].max()
    rows = [{'position': i, 'loss': 20.0 - i, 'index': 100 + i} for i in range(20)]
    shown = Samples(rows, (images,))
    lines = repr(shown).splitlines()
    assert [line.split()[0] for line in lines[1:9]] == [*'01234567']
    assert lines[9].startswith('... and 12 more') and len(lines) == 10
    html = shown._repr_html_()
    assert html is not None and html.count('<tr>') == 9 and 'alt="Inputs of the 8 samples' in html
    axs = show_samples((images[:8],), {'index': [*range(8)]}, scale_each=True)
    assert axs[3].get_title().endswith('max 60')
    largest = [ax.images[0].get_array().max() for ax in axs]
    assert largest == pytest.approx([min(image.max().item(), 1.0) for image in images[:8]])
    pyplot().close('all')
    assert repr(Samples([], (images[:0],))) == 'no samples'
