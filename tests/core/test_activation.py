"""Activations and decoders of torch's losses, each compared with its formula."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import SGD, AccumMetric, DataLoaders, accuracy
from learnkit.core.activation import find_activation, find_decoder, find_scores, outputs_of
from learnkit.losses import (
    BaseLoss,
    BCELossFlat,
    BCEWithLogitsLossFlat,
    CrossEntropyLossFlat,
    DiceLoss,
    FocalLossFlat,
    MSELossFlat,
)
from tests.helpers.learners import quiet_learner

LOGITS = torch.tensor([[-1.0, 0.5, 2.0], [0.0, 1.0, -3.0]])
SOFTMAX, SIGMOID = LOGITS.exp() / LOGITS.exp().sum(1, keepdim=True), 1 / (1 + (-LOGITS).exp())


@pytest.mark.parametrize(
    ('loss_func', 'pred', 'probs', 'classes'),
    [
        (partial(F.cross_entropy, label_smoothing=0.1), LOGITS, SOFTMAX, [2, 1]),
        (nn.NLLLoss(), SOFTMAX.log(), SOFTMAX, [2, 1]),
        (nn.BCEWithLogitsLoss(), LOGITS, SIGMOID, (LOGITS > 0).tolist()),
        (F.binary_cross_entropy, SIGMOID, SIGMOID, (LOGITS > 0).tolist()),
        (nn.MultiMarginLoss(), LOGITS, LOGITS, [2, 1]),
        (nn.MSELoss(), LOGITS, LOGITS, LOGITS.tolist()),
    ],
)
def test_losses_of_torch(loss_func: Any, pred: Tensor, probs: Tensor, classes: list[Any]) -> None:
    found = find_activation(loss_func)(pred)
    assert torch.allclose(found, probs)
    assert find_decoder(loss_func)(found).tolist() == classes


@pytest.mark.parametrize('name', [n for n in dir(nn) if n.endswith('Loss')])
def test_what_outputs_mean_to_each_loss_of_torch(name: str) -> None:
    of_classes = {
        'CrossEntropyLoss': ('classes', True),
        'NLLLoss': ('classes', True),
        'LinearCrossEntropyLoss': ('classes', True),
        'AdaptiveLogSoftmaxWithLoss': ('classes', True),
        'MultiMarginLoss': ('classes', False),
        'BCELoss': ('labels', True),
        'BCEWithLogitsLoss': ('labels', True),
        'MultiLabelSoftMarginLoss': ('labels', True),
        'SoftMarginLoss': ('signs', False),
        'HingeEmbeddingLoss': ('distances', False),
    }
    sizes = {'LinearCrossEntropyLoss': (4, 3), 'AdaptiveLogSoftmaxWithLoss': (4, 3, [1])}
    found = outputs_of(getattr(nn, name)(*sizes.get(name, ())))
    assert (found.targets, found.are_probabilities) == of_classes.get(name, ('numbers', False))


def test_what_outputs_mean_to_other_losses() -> None:
    class Own(nn.Module):
        def activation(self, x: Tensor) -> Tensor:
            return x.sigmoid()

    for loss_func, targets, are_probabilities in (
        (CrossEntropyLossFlat(), 'classes', True),
        (FocalLossFlat(), 'classes', True),
        (DiceLoss(), 'classes', True),
        (BCEWithLogitsLossFlat(), 'labels', True),
        (BCELossFlat(), 'labels', True),
        (MSELossFlat(), 'numbers', False),
        (BaseLoss(nn.CrossEntropyLoss), 'classes', False),  # its activation is the identity
        (partial(F.soft_margin_loss, reduction='sum'), 'signs', False),
        (F.mse_loss, 'numbers', False),
        (Own(), '', True),
        (lambda pred, targ: pred.mean(), '', False),
        (nn.CrossEntropyLoss, '', False),  # a class, which cannot be a loss function
    ):
        found = outputs_of(loss_func)
        assert (found.targets, found.are_probabilities) == (targets, are_probabilities)


def test_losses_that_contain_an_activation() -> None:
    contained = {
        'softmax': (nn.CrossEntropyLoss(), F.cross_entropy, FocalLossFlat(), DiceLoss()),
        'sigmoid': (nn.BCEWithLogitsLoss(), BCEWithLogitsLossFlat(), nn.MultiLabelSoftMarginLoss()),
        '': (nn.NLLLoss(), nn.BCELoss(), BCELossFlat(), nn.MultiMarginLoss(), nn.MSELoss(), None),
    }
    for kind, losses in contained.items():
        assert [outputs_of(loss).contains for loss in losses] == [kind] * len(losses)


# -- losses that contain the last layer ------------------------------------------------------------


def head_losses() -> dict[str, Any]:
    torch.manual_seed(0)
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(6, 5, [2, 4], div_value=1.0)
    losses: dict[str, Any] = {'adaptive': adaptive}
    if hasattr(nn, 'LinearCrossEntropyLoss'):  # torch 2.13
        losses['linear'] = nn.LinearCrossEntropyLoss(6, 5, bias=True)
        losses['grid'] = nn.LinearCrossEntropyLoss(6, 5, out_features=(2, 3))
    return losses


def compute_scores(kind: str, loss_func: Any, x: Tensor) -> Tensor:
    "Return scores (B, C, ...), each from the row of the weight."
    if kind == 'adaptive':
        return loss_func.log_prob(x)
    weight = loss_func.linear.weight.view(5, *loss_func.out_features, 6)
    scores = torch.einsum('c...f,bf->bc...', weight, x)
    return scores if loss_func.linear.bias is None else scores + loss_func.linear.bias


@pytest.mark.parametrize('kind', head_losses())
def test_scores_of_a_loss_that_contains_the_last_layer(kind: str) -> None:
    loss_func, x = head_losses()[kind], torch.randn(4, 6)
    with torch.no_grad():
        expected = compute_scores(kind, loss_func, x)
    scores = find_scores(loss_func, x.requires_grad_())
    assert not scores.requires_grad
    torch.testing.assert_close(scores, expected)
    probs = find_activation(loss_func)(x)
    torch.testing.assert_close(probs, expected.softmax(1))
    assert torch.equal(find_decoder(loss_func)(probs), expected.argmax(1))
    assert find_scores(loss_func, [x])[0] is x
    assert find_scores(loss_func, x.double()).dtype == torch.float32  # the dtype of the layer


def share_of_hits(pred: Tensor, y: Tensor) -> Tensor:
    return (pred.argmax(1) == y).double().mean()


@pytest.mark.parametrize('kind', [kind for kind in head_losses() if kind != 'grid'])
def test_metrics_and_predictions_take_the_scores(kind: str) -> None:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :5].argmax(1)
    batches = list(zip(x.split([3, 15, 2]), y.split([3, 15, 2]), strict=True))
    metrics = [accuracy, AccumMetric(share_of_hits, flatten=False)]
    dls = DataLoaders(batches, batches)
    model = nn.Linear(6, 6)
    learn = quiet_learner(dls, model, head_losses()[kind], SGD, metrics=metrics, lr=0.5)
    with learn.no_bar():
        learn.fit(3)
        loss, *found = learn.validate()
        probs, _, decoded = learn.get_preds(with_decoded=True)
    with torch.no_grad():
        scores = compute_scores(kind, learn.loss_func, model(x))
    expected = (scores.argmax(1) == y).double().mean().item()
    assert loss == pytest.approx(F.cross_entropy(scores, y).item(), rel=1e-6)
    assert found == pytest.approx([expected] * 2)
    torch.testing.assert_close(probs, scores.softmax(1))
    assert torch.equal(decoded, scores.argmax(1))
