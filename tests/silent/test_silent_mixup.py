"""MixUp and CutMix: masks, batches that are left out, class weights, and the end of blending."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import Callback, Learner
from learnkit.callbacks.mixup import CutMix, MixUp
from learnkit.data.dataloaders import DataLoaders
from learnkit.losses import CrossEntropyLossFlat
from tests.helpers.learners import quiet_learner

WEIGHT = torch.tensor([1.0, 5.0, 0.1], dtype=torch.float64)


class Notes(Callback):
    "Record each training batch."

    order, run_valid = 50, False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    def after_loss(self) -> None:
        learn = self.learn
        self.rows.append(
            {
                'x': learn.x,
                'yb': learn.yb,
                'batch': learn.batch,
                'pred': learn.pred.detach(),
                'loss': learn.loss.item(),
            }
        )

    def state_dict(self) -> None:
        return None


def trained(batches: Any, model: nn.Module, loss: Any, *cbs: Any, **kwargs: Any) -> Learner:
    dls = DataLoaders(batches)
    learn = quiet_learner(
        dls, model.double(), loss, cbs=[*cbs, Notes], opt_func=torch.optim.SGD, lr=0.0
    )
    learn.fit(1, **kwargs)
    return learn


def vectors(n: int = 2) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    return [
        (
            torch.rand(8, 4, generator=gen, dtype=torch.float64),
            torch.randint(3, (8,), generator=gen),
        )
        for _ in range(n)
    ]


def classes_of(x: Tensor) -> Tensor:
    return x[:, 0].long() // 5 % 3


def pictures(kind: str) -> tuple[Tensor, Tensor]:
    "Return images with unique pixel values, and masks computed from them."
    x = torch.arange(8.0 * 6 * 4, dtype=torch.float64).view(8, 1, 6, 4)
    classes = classes_of(x)
    assert (classes != classes.roll(1, 0)).double().mean() > 0.5  # the classes of two images differ
    return x, classes if kind == 'classes' else F.one_hot(classes, 3).movedim(-1, 1).double()


# -- masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['classes', 'shares'])
def test_masks_are_cut_along_with_the_images(kind: str) -> None:
    x, mask = pictures(kind)
    loss = F.cross_entropy
    wrong, cut = [], 0.0
    for seed in range(5):
        torch.manual_seed(seed)
        learn = trained([(x, mask)], nn.Conv2d(1, 3, 1), loss, CutMix())
        [note] = learn.notes.rows
        [got] = note['yb']
        expected = classes_of(note['x'])  # the mask that belongs to the pixels there
        classes = got if kind == 'classes' else got.argmax(1)
        wrong.append((classes != expected).double().mean().item())
        cut += (note['x'] != x).double().mean().item()
        assert note['loss'] == pytest.approx(loss(note['pred'], got).item(), rel=1e-12)
        assert kind == 'classes' or set(got.unique().tolist()) == {0.0, 1.0}
    assert max(wrong) == 0.0 and cut > 0.2


@pytest.mark.parametrize('weight', [None, WEIGHT])
def test_mixup_of_masks_blends_the_loss_of_each_pixel(weight: Tensor | None) -> None:
    x, mask = pictures('classes')
    seen: list[Any] = []
    look = Callback(
        after_loss=lambda cb: seen.append((cb.learn.mix_up.lam.double(), cb.learn.mix_up.yb1[0]))
    )
    batches = [(x / 200, mask)]
    learn = trained(batches, nn.Conv2d(1, 3, 1), nn.CrossEntropyLoss(weight), MixUp(), look)
    [note], [(lam, mask1)] = learn.notes.rows, seen
    log_p = note['pred'].log_softmax(1)
    w = torch.ones(3, dtype=torch.float64) if weight is None else weight
    total = count = 0.0
    for i in range(8):
        for share, of in ((lam[i], mask[i]), (1 - lam[i], mask1[i])):
            total -= (share * w[of] * log_p[i].gather(0, of[None])[0]).sum().item()
            count += (share * w[of]).sum().item()
    assert note['loss'] == pytest.approx(total / count, rel=1e-6)


# -- batches that are left out ---------------------------------------------------------------------


class Skipping(MixUp):
    "Blend only the first batch of each epoch."

    def before_batch(self) -> None:
        if self.learn.iter == 0:
            super().before_batch()


def test_a_skipped_batch_has_the_plain_loss() -> None:
    learn = trained(vectors(), nn.Linear(4, 3), F.cross_entropy, Skipping())
    note, (x, y) = learn.notes.rows[1], vectors()[1]
    plain = F.cross_entropy(learn.model(x), y).item()
    assert note['loss'] == pytest.approx(plain, rel=1e-12)
    first = F.cross_entropy(learn.notes.rows[0]['pred'], vectors()[0][1]).item()
    assert learn.notes.rows[0]['loss'] != pytest.approx(first, rel=1e-4)


# -- weights and ignored targets -------------------------------------------------------------------


class AtOne(MixUp):
    "Set every share to 1, and leave the inputs as they are."

    def before_batch(self) -> None:
        xb = self.learn.xb
        super().before_batch()
        self.learn.xb, self.lam = xb, torch.ones(8)


def own_loss(pred: Tensor, targ: Tensor, reduction: str = 'mean') -> Tensor:
    "A user's loss with internal weights."
    return F.cross_entropy(pred, targ, WEIGHT, reduction=reduction)


def weighted_losses() -> dict[str, Any]:
    return {
        'weight': nn.CrossEntropyLoss(WEIGHT),
        'ignore_index': nn.CrossEntropyLoss(ignore_index=2),
        'both': nn.CrossEntropyLoss(WEIGHT, ignore_index=0),
        'partial': partial(F.cross_entropy, weight=WEIGHT, ignore_index=1),
        'flat': CrossEntropyLossFlat(weight=WEIGHT),
        'own': own_loss,
        'nll': lambda pred, targ, reduction='mean': F.nll_loss(
            pred.log_softmax(1), targ, WEIGHT, reduction=reduction
        ),
    }


@pytest.mark.parametrize('kind', weighted_losses())
def test_at_one_it_is_the_plain_loss(kind: str) -> None:
    loss = weighted_losses()[kind]
    learn = trained(vectors(), nn.Linear(4, 3), loss, AtOne())
    for note, (x, y) in zip(learn.notes.rows, vectors(), strict=True):
        plain = loss(learn.model(x), y).item()
        assert note['loss'] == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize('kind', ['ignore_index', 'both', 'flat'])
def test_between_it_is_the_weighted_mean_of_blended_targets(kind: str) -> None:
    "The closed form: each sample twice, with its share and the partner's, and weights of both."
    loss = weighted_losses()[kind]
    seen: list[Any] = []
    look = Callback(
        after_loss=lambda cb: seen.append((cb.learn.mix_up.lam.double(), cb.learn.mix_up.yb1[0]))
    )
    learn = trained(vectors(), nn.Linear(4, 3), loss, MixUp(), look)
    weight = torch.ones(3, dtype=torch.float64) if kind == 'ignore_index' else WEIGHT.clone()
    if kind in ('ignore_index', 'both'):
        weight[2 if kind == 'ignore_index' else 0] = 0
    for note, (_, y), (lam, y1) in zip(learn.notes.rows, vectors(), seen, strict=True):
        nll = -note['pred'].log_softmax(1)
        total = sum(
            lam[i] * weight[y[i]] * nll[i, y[i]] + (1 - lam[i]) * weight[y1[i]] * nll[i, y1[i]]
            for i in range(8)
        )
        count = sum(lam[i] * weight[y[i]] + (1 - lam[i]) * weight[y1[i]] for i in range(8))
        assert note['loss'] == pytest.approx(float(total / count), rel=1e-6)
