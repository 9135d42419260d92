"""The denominator of a loss: compared with torch's means, and its number of host reads."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import (
    SGD,
    BCEWithLogitsLossFlat,
    Callback,
    CrossEntropyLossFlat,
    Learner,
    MSELossFlat,
    Recorder,
    TrainEvalCallback,
)
from learnkit.core.errors import OptionError
from learnkit.engine.denominator import Samples, Unknown, denominator_of
from learnkit.losses import (
    DiceLoss,
    FocalLossFlat,
    LabelSmoothingCrossEntropyFlat,
)

WEIGHT = torch.tensor([1.0, 4.0, 0.5], dtype=torch.float64)


def scores(n: int, *shape: int, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=gen, dtype=torch.float64)


def classes(n: int, *shape: int, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    targ = torch.randint(3, (n, *shape), generator=gen)
    targ[torch.rand(n, *shape, generator=gen) < 0.4] = -100
    return targ


CLASSES_SECOND = [(scores(n, 3, 5, seed=n), classes(n, 5, seed=n)) for n in (2, 7)]
CLASSES_LAST = [(pred.movedim(1, -1), targ) for pred, targ in CLASSES_SECOND]
ONE_EACH = [(scores(n, 3, seed=n), classes(n, seed=n)) for n in (6, 9)]
ALL_COUNT = [(pred, targ.clamp(min=0)) for pred, targ in CLASSES_SECOND]
ALL_COUNT_LAST = [(pred, targ.clamp(min=0)) for pred, targ in CLASSES_LAST]
CHANCES = [(pred, pred.flip(0).softmax(1)) for pred, _ in CLASSES_SECOND]
NUMBERS = [(scores(2, 3), scores(2, 3, seed=1)), (scores(5, 3, seed=2), scores(5, 3, seed=3))]
SHARES = [(pred, targ.sigmoid()) for pred, targ in NUMBERS]

MEANS: dict[str, tuple[Any, list[tuple[Tensor, Tensor]]]] = {
    'cross_entropy': (F.cross_entropy, CLASSES_SECOND),
    'one target each': (nn.CrossEntropyLoss(), ONE_EACH),
    'class weights': (nn.CrossEntropyLoss(WEIGHT), CLASSES_SECOND),
    'weights and smoothing': (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), CLASSES_SECOND),
    'partial': (partial(F.cross_entropy, weight=WEIGHT), CLASSES_SECOND),
    'nested partial': (partial(partial(F.cross_entropy, ignore_index=1), weight=WEIGHT), ALL_COUNT),
    'nll': (nn.NLLLoss(WEIGHT, ignore_index=0), ALL_COUNT),
    'probabilities': (nn.CrossEntropyLoss(WEIGHT), CHANCES),
    'flat': (CrossEntropyLossFlat(WEIGHT), CLASSES_LAST),
    'flat, axis 1': (CrossEntropyLossFlat(axis=1, ignore_index=2), ALL_COUNT),
    'smoothing': (LabelSmoothingCrossEntropyFlat(), CLASSES_LAST),
    'focal': (FocalLossFlat(weight=WEIGHT), ALL_COUNT_LAST),
    'mse': (nn.MSELoss(), NUMBERS),
    'mse flat': (MSELossFlat(), NUMBERS),
    'huber': (partial(F.huber_loss, delta=0.5), NUMBERS),
    'bce': (BCEWithLogitsLossFlat(), SHARES),
    'bce weights': (nn.BCEWithLogitsLoss(WEIGHT, pos_weight=WEIGHT), SHARES),
}


@pytest.mark.parametrize('kind', MEANS)
def test_means_weighted_by_the_denominator_match_the_total_mean(kind: str) -> None:
    loss_func, parts = MEANS[kind]
    count = denominator_of(loss_func).count
    weights = [count((targ,)) for _, targ in parts]
    pred, targ = (torch.cat([part[i] for part in parts]) for i in range(2))
    losses = [loss_func(*part).item() for part in parts]
    mean = sum(x * w for x, w in zip(losses, weights, strict=True)) / sum(weights)
    assert mean == pytest.approx(loss_func(pred, targ).item(), abs=1e-14)


def test_what_is_not_a_mean_counts_samples_or_elements() -> None:
    targ = torch.tensor([[1, -100], [0, 2]])
    assert denominator_of(nn.CrossEntropyLoss(reduction='sum')).count((targ,)) is None
    assert denominator_of(nn.CrossEntropyLoss(WEIGHT, reduction='none')).count((targ,)) == 4
    assert denominator_of(DiceLoss()).count((targ,)) is None
    assert denominator_of(nn.CrossEntropyLoss()).count(()) is None
    assert type(denominator_of(nn.CTCLoss())) is Samples


class Own(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 2


@pytest.mark.parametrize('loss_func', [Own(), lambda pred, y: pred.mean()])
def test_a_function_that_is_not_torch_s_is_unknown(loss_func: Any) -> None:
    assert type(denominator_of(loss_func)) is Unknown


def test_options_may_change() -> None:
    loss_func, targ = nn.CrossEntropyLoss(), torch.tensor([0, 1, 2])
    count = denominator_of(loss_func).count
    assert count((targ,)) == 3
    loss_func.ignore_index = 1
    assert count((targ,)) == 2
    loss_func.weight = WEIGHT
    assert count((targ,)) == 1.5
    loss_func.reduction = 'none'
    assert count((targ,)) == 3


# -- in a Learner ----------------------------------------------------------------------------------


def make_learner(loss_func: Any, *cbs: Any, train: Any = ONE_EACH, **kwargs: Any) -> Learner:
    torch.manual_seed(1)
    options: dict[str, Any] = {'opt_func': SGD, 'lr': 0.5, **kwargs}
    dls = (train, train)
    model = nn.Linear(3, 3).double()
    learn = Learner(
        dls, model, loss_func, default_cbs=False, cbs=[TrainEvalCallback, Recorder, *cbs], **options
    )
    learn.logger = lambda row: None
    return learn


def test_a_weight_func_of_another_name_is_refused() -> None:
    with pytest.raises(OptionError, match=r'weight_func=.*tokens'):
        make_learner(F.cross_entropy, weight_func='token')


def test_train_loss_is_mean_or_smooth() -> None:
    with pytest.raises(OptionError, match=r"train_loss='mea'.*`mean`"):
        Recorder(train_loss='mea')
    learn = make_learner(F.cross_entropy)
    learn.recorder.train_loss = 'smooth'
    learn.fit(2)
    expected = [learn.recorder.smooth_loss.smooth[i] for i in (1, 3)]
    assert [row['train_loss'] for row in learn.history] == expected


def test_a_model_that_computes_its_own_loss_of_tokens_is_warned_of() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 3).double()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {'loss': F.cross_entropy(self.net(x), labels)}

    batches = [{'x': pred, 'labels': targ} for pred, targ in ONE_EACH]
    cbs = [TrainEvalCallback, Recorder]
    learn = Learner(batches, Own(), opt_func=SGD, lr=0.0, default_cbs=False, cbs=cbs)
    learn.logger = lambda row: None
    with pytest.warns(UserWarning, match="Own.*weight_func='tokens'"):
        learn.fit(1)


def test_evaluation_records_the_reported_loss() -> None:
    def double(cb: Any) -> None:
        if not cb.training:
            cb.learn.loss = cb.loss * 2

    learn = make_learner(F.cross_entropy, Callback(after_loss=double))
    plain = make_learner(F.cross_entropy)
    learn.fit(1)
    plain.fit(1)
    expected = 2 * plain.history[0]['valid_loss']
    assert learn.history[0]['valid_loss'] == pytest.approx(expected, rel=1e-14)
