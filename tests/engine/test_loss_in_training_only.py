"""Models and loss functions that have a loss in training only, such as detectors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from learnkit import Callback, Checkpoint, DataLoaders, EarlyStoppingCallback, Learner
from learnkit.core.errors import LossError, MetricError
from learnkit.engine.loss import are_losses


class Detector(nn.Module):
    "Return named losses in training, and a list of boxes in evaluation, as torchvision's detectors."

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.layer(x)
        if self.training:
            assert y is not None
            return {'box': (out - y).pow(2).mean(), 'score': out.abs().mean()}
        return [{'box': row} for row in out]


class Distance(Metric):
    "Sum the distances between boxes and targets."

    total: Tensor
    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state('total', torch.tensor(0.0), dist_reduce_fx='sum')

    def update(self, boxes: list[dict[str, Tensor]], targets: Tensor) -> None:
        self.total += sum((b['box'] - t).abs().sum() for b, t in zip(boxes, targets, strict=True))

    def compute(self) -> Tensor:
        return self.total


def pass_targets(cb: Any) -> None:
    cb.learn.xb = (*cb.xb, *cb.yb)


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(22, 3, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    order = torch.Generator().manual_seed(1)
    return DataLoader(data, 4, shuffle=True, generator=order), DataLoader(data, 8)


def make(*cbs: Any, **options: Any) -> Learner:
    torch.manual_seed(2)
    options = {'metrics': Distance(), 'opt_func': torch.optim.SGD, 'lr': 0.01, **options}
    give = Callback(before_batch=pass_targets)
    return Learner(DataLoaders(*loaders()), Detector(), cbs=[give, *cbs], **options)


def test_weights_losses_and_metric_are_those_of_a_plain_loop() -> None:
    learn = make()
    with learn.no_bar(), learn.no_logging():
        learn.fit(3)
    torch.manual_seed(2)
    model = Detector()
    train, valid = loaders()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for row in learn.history:
        losses, sizes = [], []
        model.train()
        for x, y in train:
            parts = model(x, y)
            loss = parts['box'] + parts['score']
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
            sizes.append(len(x))
        mean = sum(n * loss for n, loss in zip(sizes, losses, strict=True)) / sum(sizes)
        assert row['train_loss'] == pytest.approx(mean, rel=1e-6)
        model.eval()
        with torch.no_grad():
            total = sum(
                (b['box'] - t).abs().sum().item()
                for x, y in valid
                for b, t in zip(model(x), y, strict=True)
            )
        assert row['distance'] == pytest.approx(total, rel=1e-5)
        assert 'valid_loss' not in row
        assert {'train_box', 'train_score'} <= set(row)
    for found, expected in zip(learn.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert learn.recorder.metric_names[1:3] == ['train_loss', 'distance']


def test_a_loss_function_may_return_none_in_evaluation() -> None:
    def loss_func(out: Any, *targets: Any) -> Any:
        return out if isinstance(out, dict) else None

    learn, own = make(loss_func=loss_func), make()
    for each in (learn, own):
        with each.no_bar(), each.no_logging():
            each.fit(2)
    for found, expected in zip(learn.history, own.history, strict=True):
        found, expected = ({**row, 'time': 0} for row in (found, expected))
        assert found == expected
    with learn.no_bar(), learn.no_logging():
        assert list(learn.validate()) == [learn.history[-1]['distance']]


def test_a_loss_function_may_not_return_none_in_training() -> None:
    learn = make(loss_func=lambda out, *targets: None)
    with learn.no_bar(), learn.no_logging(), pytest.raises(LossError, match='None'):
        learn.fit(1)
    assert learn.time.ba == 0


def test_a_stopper_follows_a_metric_and_not_the_absent_loss() -> None:
    stop = EarlyStoppingCallback('distance', comp='less', patience=2)
    learn = make(stop, lr=0.0)
    with learn.no_bar(), learn.no_logging():
        learn.fit(9)
    assert len(learn.history) == 3
    for _ in range(2):  # the second fit is told as the first one
        other = make(EarlyStoppingCallback())
        with (
            other.no_bar(),
            other.no_logging(),
            pytest.raises(MetricError, match='monitor one of its metrics'),
        ):
            other.fit(3)


def test_the_loss_of_samples_is_an_error_that_names_the_option() -> None:
    learn = make()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        preds, _ = learn.get_preds()
        assert len(preds) == 22
        with pytest.raises(LossError, match='with_loss'):
            learn.get_preds(with_loss=True)


def test_a_later_fit_with_a_loss_has_the_column_again() -> None:
    learn = make()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        learn.loss_func = lambda out, y: (
            out if isinstance(out, dict) else torch.stack([b['box'] for b in out]).mean()
        )
        learn.fit(1)
    assert 'valid_loss' not in learn.history[0]
    assert isinstance(learn.history[1]['valid_loss'], float)


def test_a_resumed_run_has_the_columns_of_a_straight_one(tmp_path: Path) -> None:
    learn = make(Checkpoint('3ba', tmp_path, keep_last=None), eval_every='5ba')
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)
    paths = sorted(tmp_path.glob('*.ckpt'))
    assert len(paths) >= 4
    for path in paths:
        resumed = make(eval_every='5ba')
        with resumed.no_bar(), resumed.no_logging():
            resumed.fit(2, resume=path)
        rows = [[{**row, 'time': 0} for row in each.history] for each in (resumed, learn)]
        assert rows[0] == rows[1]


@pytest.mark.parametrize(
    'output',
    [
        {},
        {'logits': torch.zeros(3, requires_grad=True)},
        {'count': torch.tensor(1.0)},
        [torch.tensor(1.0, requires_grad=True)],
    ],
)
def test_outputs_that_are_not_losses(output: Any) -> None:
    assert not are_losses(output)
