"""Estimators of scikit-learn whose loss has other outputs than scores of classes, weights, and dense predictions."""

import copy
from typing import Any

import numpy as np
import torch
from sklearn.datasets import make_classification, make_multilabel_classification
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import Learner
from learnkit.losses import BCEWithLogitsLossFlat, FocalLossFlat
from learnkit.sklearn import Classifier, Regressor
from tests.silent.cases import case

X, Y = make_classification(120, 5, weights=[0.45], class_sep=1.5, random_state=0)
CLASSES = torch.tensor(Y)
SIGNS = 2.0 * CLASSES - 1
WEIGHTS = torch.arange(120) % 4
ONE_BATCH: dict[str, Any] = {
    'opt_func': torch.optim.SGD,
    'lr': 0.1,
    'batch_size': 120,
    'epochs': 5,
    'random_state': 0,
}


def make_linear(n_outputs: int, n_inputs: int = 5) -> nn.Module:
    "Return a linear layer in float64 with the weights -1 to 1."
    model = nn.Linear(n_inputs, n_outputs).double()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, n_inputs * n_outputs).view(n_outputs, n_inputs))
        model.bias.zero_()
    return model


def train(model: nn.Module, compute_loss: Any, x: Any = X) -> nn.Module:
    "Return a copy of a model, trained by gradient descent on all samples at once."
    model = copy.deepcopy(model)
    for _ in range(ONE_BATCH['epochs']):
        model.zero_grad()
        compute_loss(model(torch.tensor(x))).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= ONE_BATCH['lr'] * p.grad
    return model


def list_weights(model: nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def average(losses: Tensor, weights: Tensor) -> Tensor:
    return (weights * losses).sum() / weights.sum()


def compute_outputs(model: Any, x: Any = X) -> Tensor:
    "Return the raw outputs of a fitted estimator's model."
    network = model.learner_.model
    with torch.no_grad():
        return network(torch.tensor(x, dtype=next(network.parameters()).dtype))


def find_error(f: Any, *args: Any, **kwargs: Any) -> str:
    "Return the class and the message of the error that a call raises, or 'no error'."
    try:
        f(*args, **kwargs)
    except Exception as e:
        return f'{type(e).__name__}: {e}'
    return 'no error'


def fit_binary(loss_func: Any, n_outputs: int = 1) -> tuple[Classifier, Tensor]:
    "Return a fitted Classifier, and the raw outputs of its model."
    module = make_linear(n_outputs).float()
    model = Classifier(module, loss_func=loss_func, epochs=20, lr=0.05, random_state=0).fit(X, Y)
    return model, compute_outputs(model)


@case('estimators', 'accuracy with one logit per sample', old='0.45')
def accuracy_of_one_logit() -> tuple[float, float]:
    model, logits = fit_binary(BCEWithLogitsLossFlat())
    return float(model.score(X, Y)), float(((logits[:, 0] > 0) == CLASSES).double().mean())


@case('estimators', 'AUC with one logit per sample', old='IndexError: one column')
def auc_of_one_logit() -> tuple[float, float]:
    model, logits = fit_binary(BCEWithLogitsLossFlat())
    probs = model.predict_proba(X)
    return roc_auc_score(Y, probs[:, 1]), roc_auc_score(Y, logits[:, 0])


@case('estimators', 'probabilities of both classes', old='one column: 0.873, 0.839, 0.003')
def probabilities_of_both_classes() -> tuple[list[float], list[float]]:
    model, logits = fit_binary(BCEWithLogitsLossFlat())
    second = 1 / (1 + torch.exp(-logits[:3, 0].double()))
    expected = torch.stack([1 - second, second], 1)
    return model.predict_proba(X[:3]).ravel().tolist(), expected.flatten().tolist()


@case('estimators', "torch's BCE with one logit per sample", old='ValueError: Target size')
def weights_of_torch_bce() -> tuple[list[float], list[float]]:
    start = make_linear(1)
    model = Classifier(start, loss_func=nn.BCEWithLogitsLoss(), **ONE_BATCH).fit(X, Y)
    by_hand = train(start, lambda out: (1 + (-SIGNS * out[:, 0]).exp()).log().mean())
    return list_weights(model.learner_.model), list_weights(by_hand)


@case('estimators', 'a soft margin', old='RuntimeError: broadcast shape')
def decisions_of_a_soft_margin() -> tuple[list[float], list[float]]:
    start = make_linear(1)
    model = Classifier(start, loss_func=nn.SoftMarginLoss(), **ONE_BATCH).fit(X, Y)
    by_hand = train(start, lambda out: (1 + (-SIGNS * out[:, 0]).exp()).log().mean())
    with torch.no_grad():
        found = model.decision_function(X)[:4].tolist()
        return found, by_hand(torch.tensor(X[:4]))[:, 0].tolist()


@case('estimators', 'predict_proba of a margin', old='scores: -1.15, 2.15')
def probabilities_of_a_margin() -> tuple[str, str]:
    model, _ = fit_binary(nn.MultiMarginLoss(), 2)
    found = find_error(lambda: model.predict_proba(X))
    return found, "AttributeError: This 'Classifier' has no attribute 'predict_proba'"


@case('estimators', "predict_proba of one's own function of logits", old='logits: -1.72, 2.72')
def probabilities_of_an_own_loss() -> tuple[str, str]:
    model, _ = fit_binary(lambda pred, targ: F.cross_entropy(pred, targ), 2)
    found = find_error(lambda: model.predict_proba(X))
    return found, "AttributeError: This 'Classifier' has no attribute 'predict_proba'"


@case('estimators', 'one class in y', old='LossError: CrossEntropyLoss compares classes ...')
def error_of_one_class() -> tuple[str, str]:
    sentence = 'The number of classes has to be greater than one; got 1 class'  # of `SVC`
    return find_error(Classifier().fit, X, np.ones(120)), f'ValueError: {sentence}'


@case('estimators', 'sample weights of cross-entropy', old="TypeError: 'sample_weight'")
def weights_of_cross_entropy() -> tuple[list[float], list[float]]:
    start = make_linear(2)
    model = Classifier(start, **ONE_BATCH).fit(X, Y, sample_weight=WEIGHTS)

    def loss(out: Tensor) -> Tensor:
        logp = out - out.exp().sum(1, keepdim=True).log()
        return average(-logp[torch.arange(120), CLASSES], WEIGHTS)

    return list_weights(model.learner_.model), list_weights(train(start, loss))


@case('estimators', 'sample weights of two numbers', old="TypeError: 'sample_weight'")
def weights_of_numbers() -> tuple[list[float], list[float]]:
    y = X[:, :2] ** 2
    start = make_linear(2)
    model = Regressor(start, **ONE_BATCH).fit(X, y, sample_weight=WEIGHTS)
    by_hand = train(start, lambda out: average(((out - torch.tensor(y)) ** 2).mean(1), WEIGHTS))
    return list_weights(model.learner_.model), list_weights(by_hand)


@case('estimators', 'sample weights of the validation', old="TypeError: 'sample_weight'")
def weights_of_the_validation() -> tuple[float, float]:
    y = X[:, 0] ** 2
    options = {**ONE_BATCH, 'batch_size': 8, 'validation_fraction': 0.3}
    model = Regressor(make_linear(1), early_stopping=True, **options)
    model.fit(X, y, sample_weight=WEIGHTS)
    kept = np.flatnonzero(WEIGHTS)
    seed = np.random.RandomState(0).randint(2**31 - 1)
    _, held_out = train_test_split(kept, test_size=0.3, random_state=seed)
    losses = (model.predict(X[held_out]) - y[held_out]) ** 2  # of the best weights
    best = min(row['valid_loss'] for row in model.history_)
    return best, float(np.average(losses, weights=WEIGHTS[held_out]))


@case('estimators', 'class_weight with a focal loss', old='as without: -0.00388')
def class_weights_of_a_focal_loss() -> tuple[list[float], list[float]]:
    start = make_linear(2)
    model = Classifier(start, loss_func=FocalLossFlat(), class_weight={0: 1, 1: 5}, **ONE_BATCH)

    def loss(out: Tensor) -> Tensor:
        p = out.softmax(1)[torch.arange(120), CLASSES]
        return average(-((1 - p) ** 2) * p.log(), 1 + 4 * CLASSES)

    return list_weights(model.fit(X, Y).learner_.model), list_weights(train(start, loss))


@case('estimators', 'several labels per sample', old='ValueError: y should be a 1d array')
def weights_of_several_labels() -> tuple[list[float], list[float]]:
    x, y = make_multilabel_classification(40, 6, n_classes=4, random_state=0)
    x, targets = x / 10, torch.tensor(y)
    start = make_linear(4, 6)
    model = Classifier(start, **ONE_BATCH).fit(x, y)

    def loss(out: Tensor) -> Tensor:
        p = out.sigmoid()
        return -(targets * p.log() + (1 - targets) * (1 - p).log()).mean()

    return list_weights(model.learner_.model), list_weights(train(start, loss, x))


@case('estimators', 'outputs of shape [samples]', old='LossError: compares each of the 32 ...')
def weights_of_flat_outputs() -> tuple[list[float], list[float]]:
    y = torch.tensor(X[:, 0] ** 2)
    start = make_linear(1)
    model = Regressor(nn.Sequential(start, nn.Flatten(0)), **ONE_BATCH).fit(X, y)
    by_hand = train(start, lambda out: ((out[:, 0] - y) ** 2).mean())
    return list_weights(model.learner_.model), list_weights(by_hand)


@case('estimators', 'masks of mirrored images: IoU', old='0.333')
def masks_of_mirrored_images() -> tuple[float, float]:
    images = torch.zeros(4, 1, 8, 8)
    images[:, :, 2:6, 1:5] = 1
    layer = nn.Conv2d(1, 1, 1)
    with torch.no_grad():
        layer.weight.fill_(20.0)
        layer.bias.fill_(-10.0)
    learn = Learner([(images, images)], layer, nn.BCEWithLogitsLoss(), default_cbs=False)

    def flip(t: Tensor) -> Tensor:
        return t.flip(-1)

    preds, targs = learn.tta(0, augment=flip, undo=flip)
    mask, target = preds > 0.5, targs > 0
    return float((mask & target).sum() / (mask | target).sum()), 1.0
