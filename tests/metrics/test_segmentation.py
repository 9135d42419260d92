"""Compare Dice, Jaccard and foreground accuracy with sets of pixels and scikit-learn."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from learnkit.core.errors import MetricError
from learnkit.metrics import (
    Dice,
    DiceMulti,
    ForegroundAcc,
    JaccardCoeff,
    JaccardCoeffMulti,
    foreground_acc,
)
from learnkit.metrics.averages import as_metrics, dry_run
from tests.helpers.libraries import require
from tests.helpers.measuring import feed

skm = require('sklearn.metrics')

METRICS = [Dice, JaccardCoeff, DiceMulti, JaccardCoeffMulti]


def images(n: int = 11, n_classes: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    "Return predictions with a share of right pixels, fewer in some images than in others."
    targ = (torch.rand(n, 4, 5) * n_classes * torch.rand(n, 1, 1)).long()
    return torch.randn(n, n_classes, 4, 5) + 2 * torch.eye(n_classes)[targ].movedim(-1, 1), targ


def flat(pred: torch.Tensor, targ: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    return targ.numpy().ravel(), pred.argmax(1).numpy().ravel()


@pytest.mark.parametrize('bs', [3, 11])
def test_dice_and_jaccard_of_two_classes(bs: int) -> None:
    pred, targ = images()
    t, p = (set(np.flatnonzero(o)) for o in flat(pred, targ))
    expected = 2 * len(t & p) / (len(t) + len(p))
    assert feed(Dice(), pred, targ, bs=bs).value == pytest.approx(expected, rel=1e-14)
    assert feed(JaccardCoeff(), pred, targ[:, None], bs=bs).value == pytest.approx(
        len(t & p) / len(t | p), rel=1e-14
    )


@pytest.mark.parametrize('bs', [3, 11])
@pytest.mark.parametrize('n_classes', [2, 5])
def test_dice_and_jaccard_of_many_classes_equal_sklearn(bs: int, n_classes: int) -> None:
    pred, targ = images(n_classes=n_classes)
    t, p = flat(pred, targ)
    expected = skm.f1_score(t, p, average='macro')
    assert feed(DiceMulti(), pred, targ, bs=bs).value == pytest.approx(expected)
    expected = skm.jaccard_score(t, p, average='macro')
    assert feed(JaccardCoeffMulti(), pred, targ, bs=bs).value == pytest.approx(expected)
    last = pred.movedim(1, -1)
    assert DiceMulti(axis=-1)(last, targ) == pytest.approx(skm.f1_score(t, p, average='macro'))


@pytest.mark.parametrize('metric', METRICS)
def test_best_worst_and_nothing(metric: Any) -> None:
    pred, targ = images()
    targ[0, 0, :2] = torch.tensor([0, 1])
    hot = torch.eye(2)[targ].movedim(-1, 1)
    assert metric()(hot, targ) == 1.0 and metric()(hot, 1 - targ) == 0.0
    if metric in (Dice, JaccardCoeff):
        assert metric()(torch.eye(2)[targ * 0].movedim(-1, 1), targ * 0) is None
    else:
        assert math.isnan(metric()(pred[:0], targ[:0]))


def test_targets_that_are_not_a_class_match_nothing() -> None:
    targ = torch.tensor([[[1, 0, 255]]])
    pred = torch.eye(2)[torch.tensor([[[1, 0, 1]]])].movedim(-1, 1)
    assert Dice()(pred, targ) == pytest.approx(2 / 3)
    assert DiceMulti()(pred, targ) == pytest.approx((1 + 2 / 3) / 2)


@pytest.mark.parametrize('bs', [3, 11])
def test_foreground_accuracy_is_over_all_pixels(bs: int) -> None:
    pred, targ = images(n_classes=3)
    t, p = flat(pred, targ)
    for bkg_idx in (0, 2):
        expected = np.mean((t == p)[t != bkg_idx])
        (m,) = as_metrics(partial(foreground_acc, bkg_idx=bkg_idx))
        assert feed(m, pred, targ, bs=bs).value == pytest.approx(expected, rel=1e-14)
        assert m.name == 'foreground_acc'
        assert float(foreground_acc(pred, targ[:, None], bkg_idx)) == pytest.approx(expected)
    assert isinstance(as_metrics(foreground_acc)[0], ForegroundAcc)
    assert math.isnan(foreground_acc(pred, targ * 0))
    assert math.isnan(feed(ForegroundAcc(), pred, targ * 0).value)


def test_what_does_not_fit_is_reported_before_training() -> None:
    pred, targ = images(n_classes=3)
    for metric in (Dice(), JaccardCoeff()):
        with pytest.raises(MetricError, match=rf'3 along axis 1: use {type(metric).__name__}Multi'):
            dry_run(metric, pred, (targ,))
    for metric in (DiceMulti(), JaccardCoeffMulti(), ForegroundAcc()):
        with pytest.raises(MetricError, match='do not fit targets'):
            dry_run(metric, pred, (targ[:, :2],))
