"""The denominator of a loss: compared with torch's means, and its number of host reads."""

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from learnkit.core.denominator import (
    ClassTargets,
    Elements,
    Samples,
    Tokens,
    Unknown,
    check_weight_func,
    count_targets,
    denominator_of,
    find_model_denominator,
    sum_of_weights,
)
from learnkit.core.errors import LossError, OptionError
from learnkit.engine.loss_weights import (
    LossWeights,
    adds_up,
    check_is_mean,
    compare_parts,
    find_denominator,
    is_weighted_mean,
)
from learnkit.losses import (
    DiceLoss,
    FocalLossFlat,
    LabelSmoothingCrossEntropyFlat,
)
from tests.helpers.learners import bare_learner, quiet_learner

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
    return bare_learner(dls, model, loss_func, cbs=cbs, **options)


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
    learn = quiet_learner(batches, Own(), opt_func=SGD, lr=0.0, default_cbs=False, cbs=cbs)
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


# -- which losses are recognized -------------------------------------------------------------------

CLASS_FUNCTIONS = [F.cross_entropy, F.nll_loss]
ELEMENT_FUNCTIONS = [
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.gaussian_nll_loss, F.kl_div,
    F.soft_margin_loss, F.multilabel_soft_margin_loss, F.hinge_embedding_loss,
    F.margin_ranking_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
]  # fmt: skip
SAMPLE_FUNCTIONS = [
    F.multi_margin_loss, F.multilabel_margin_loss, F.cosine_embedding_loss, F.ctc_loss,
]  # fmt: skip


@pytest.mark.parametrize(
    ('kind', 'functions'),
    [(ClassTargets, CLASS_FUNCTIONS), (Elements, ELEMENT_FUNCTIONS), (Samples, SAMPLE_FUNCTIONS)],
)
def test_functions_of_torch_are_recognized(kind: type, functions: list[Any]) -> None:
    assert [type(denominator_of(f)) for f in functions] == [kind] * len(functions)
    partials = [partial(f, reduction='mean') for f in functions]
    assert [type(denominator_of(f)) for f in partials] == [kind] * len(functions)


def test_partials_with_other_meanings_are_unknown() -> None:
    assert type(denominator_of(partial(F.mse_loss, weight=WEIGHT))) is Unknown
    assert type(denominator_of(partial(F.cross_entropy, torch.zeros(2, 3)))) is Unknown
    assert type(denominator_of(partial(F.cross_entropy, weight=WEIGHT))) is ClassTargets
    denominator = denominator_of(partial(F.mse_loss, reduction='sum'))
    assert type(denominator) is Elements and denominator.count((WEIGHT,)) is None


def test_names_of_unknown_losses() -> None:
    def own(pred: Tensor, y: Tensor) -> Tensor:
        return pred.mean()

    found = [denominator_of(f) for f in (own, Own(), partial(own))]
    assert [d.name for d in found] == ['own', 'Own', 'partial']


def test_a_loss_may_name_its_denominator() -> None:
    class Pairs(nn.Module):
        def loss_denominator(self) -> Tokens:
            return Tokens(7)

    assert denominator_of(Pairs()).count((torch.tensor([7, 1, 7]),)) == 1


def test_elements_are_counted_only_of_tensors_and_means() -> None:
    y = torch.zeros(2, 3)
    counts = [
        Elements(SimpleNamespace(reduction=reduction)).count((y,))
        for reduction in ('mean', 'none', 'sum', 'batchmean')
    ]
    assert counts == [6, 6, None, None]
    assert Elements(SimpleNamespace()).count((y,)) == 6
    assert Elements(SimpleNamespace()).count(([1, 2],)) is None
    assert Elements(SimpleNamespace()).count(()) is None


def test_class_targets() -> None:
    chances = torch.full((2, 3, 5), 1 / 3)
    assert ClassTargets(SimpleNamespace()).count((chances,)) == 10
    assert ClassTargets(SimpleNamespace(), axis=-1).count((chances,)) == 6
    assert ClassTargets(SimpleNamespace(reduction='sum')).count((chances,)) is None
    assert ClassTargets(SimpleNamespace()).count(([0, 1],)) is None
    assert ClassTargets(SimpleNamespace(ignore_index=None)).ignore_index == -100
    assert ClassTargets(SimpleNamespace()).ignore_index == -100
    assert ClassTargets(SimpleNamespace(ignore_index=2)).ignore_index == 2


def test_tokens() -> None:
    labels = torch.tensor([[5, -100, 7], [-100, 2, 3]])
    assert Tokens().count((labels,)) == 4
    assert Tokens(is_shifted=True).count((labels,)) == 3  # the first label of each row is unused
    assert Tokens(is_shifted=True).count((labels[0],)) == 2  # one label a sample
    assert Tokens(7).count((labels,)) == 5
    assert Tokens().count((labels.float(),)) is None
    assert Tokens().count(()) is None and Tokens().count(([1],)) is None


@pytest.mark.parametrize('n', [1, 255, 256, 257, 1000])
def test_targets_are_counted_in_lists_and_arrays(n: int) -> None:
    gen = torch.Generator().manual_seed(n)
    targ = torch.randint(-1, 3, (n,), generator=gen)
    for index in (-1, 0, 5):
        expected = sum(v != index for v in targ.tolist())
        now = count_targets(targ, index)
        assert type(now) is int and now == expected
        other = count_targets(targ.as_subclass(Labels), index)
        assert isinstance(other, Tensor) and other.item() == expected


class Labels(Tensor):
    pass


def test_weights_of_ignored_targets_do_not_count() -> None:
    targ = torch.tensor([[0, 2], [-100, 1]])
    assert sum_of_weights(targ, -100, WEIGHT) == 1.0 + 0.5 + 4.0
    assert sum_of_weights(targ.clamp(min=0), 0, WEIGHT) == 4.5
    # in double precision, whatever the weights are in
    third = torch.full((3,), 1 / 3)
    assert sum_of_weights(torch.zeros(3000).long(), -100, third) == pytest.approx(
        3000 * float(np.float32(1 / 3)), rel=1e-15
    )


def test_check_weight_func() -> None:
    for func in (None, 'tokens', 'samples', len):
        assert check_weight_func(func) is func
    with pytest.raises(OptionError, match='weight_func=3'):
        check_weight_func(3)


# -- losses that a model computes ------------------------------------------------------------------


def hf_model(name: str, is_encoder_decoder: bool = False) -> nn.Module:
    "A model of a class that looks as if it was of transformers."

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x

    forward.__module__ = 'transformers.models.own'
    model = type(name, (nn.Module,), {'forward': forward})()
    model.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
    return model


@pytest.mark.parametrize(
    ('name', 'is_encoder_decoder', 'is_shifted'),
    [
        ('OwnForCausalLM', False, True),
        ('OwnLMHeadModel', False, True),
        ('OwnForConditionalGeneration', False, True),
        ('OwnForConditionalGeneration', True, False),
        ('OwnForMaskedLM', False, False),
    ],
)
def test_models_of_transformers(name: str, is_encoder_decoder: bool, is_shifted: bool) -> None:
    denominator = find_model_denominator(hf_model(name, is_encoder_decoder))
    assert type(denominator) is Tokens
    assert (denominator.is_shifted, denominator.ignore_index) == (is_shifted, -100)


def test_other_models_that_compute_their_loss() -> None:
    class Composer(nn.Module):
        def forward(self, batch: Any) -> Any:
            return batch

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs

        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            return outputs

        update_metric = get_metrics = eval_forward

    assert type(find_model_denominator(Composer())) is Samples
    denominator = find_model_denominator(nn.Linear(1, 1))
    assert type(denominator) is Unknown and denominator.name == 'the own loss of Linear'


# -- weights of batches ----------------------------------------------------------------------------


def fake_learner(loss_func: Any, weight_func: Any = None, **options: Any) -> Any:
    loss_weights = LossWeights()
    defaults = {
        'model': nn.Identity(),
        'training': True,
        'iter': 0,
        'size_func': None,
        'batch_form': None,
        'xb': (),
        'yb': (),
        'parts': SimpleNamespace(loss_weights=loss_weights),
    }
    return SimpleNamespace(loss_func=loss_func, weight_func=weight_func, **{**defaults, **options})


def test_weight_func_takes_precedence() -> None:
    weights = LossWeights()
    x, y = torch.zeros(2, 3), torch.tensor([[1, -100, 2], [0, -100, -100]])

    def weigh(loss_func: Any, weight_func: Any = None) -> Any:
        return weights.weigh_batch(fake_learner(loss_func, weight_func), (x,), (y,))

    assert weigh(F.cross_entropy) == 3
    assert weigh(F.cross_entropy, 'samples') == 2
    assert weigh(F.cross_entropy, lambda xb, yb: 7) == 7
    assert weigh(lambda pred, y: pred.mean(), 'tokens') == 3
    assert weigh(partial(F.cross_entropy, ignore_index=2), 'tokens') == 5
    assert weigh(nn.MSELoss()) == 6
    assert weigh(nn.CTCLoss()) == 2


def test_a_callback_may_average_over_samples_in_training() -> None:
    weights = LossWeights()
    weights.averages_samples = True
    x, y = torch.zeros(2, 3), torch.zeros(2, 3)
    learn = fake_learner(nn.MSELoss())
    assert weights.weigh_batch(learn, (x,), (y,)) == 2 and weights.are_samples(learn)
    assert weights.are_samples(fake_learner(F.cross_entropy))
    learn.training = False
    assert weights.weigh_batch(learn, (x,), (y,)) == 6


def test_losses_whose_batches_of_one_size_weigh_alike() -> None:
    def are_samples(*args: Any) -> bool:
        return LossWeights().are_samples(fake_learner(*args))

    assert are_samples(nn.MSELoss()) and are_samples(F.cross_entropy, 'samples')
    assert not are_samples(F.cross_entropy) and not are_samples(nn.MSELoss(), 'tokens')
    assert not are_samples(nn.MSELoss(), lambda xb, yb: 1)


def test_sums_are_found_by_their_reduction() -> None:
    def is_sum(loss_func: Any) -> bool:
        return LossWeights().is_sum(fake_learner(loss_func))

    assert is_sum(nn.MSELoss(reduction='sum')) and is_sum(partial(F.mse_loss, reduction='sum'))
    assert not is_sum(nn.MSELoss()) and not is_sum(F.mse_loss) and not is_sum(None)


def test_the_denominator_is_found_once_for_each_loss() -> None:
    weights, learn = LossWeights(), fake_learner(lambda pred, y: pred.mean())
    first = weights.denominator(learn)
    assert weights.denominator(learn) is first
    learn.loss_func = nn.MSELoss()
    assert type(weights.denominator(learn)) is Elements
    learn.weight_func = 'tokens'
    assert type(weights.denominator(learn)) is Tokens
    learn.loss_func, learn.weight_func = None, None
    assert type(weights.denominator(learn)) is Unknown
    learn.model = hf_model('OwnForMaskedLM')
    assert type(weights.denominator(learn)) is Tokens
    assert type(find_denominator(fake_learner(None, 'samples'))) is Samples


@pytest.mark.parametrize(
    ('dtype', 'expected'),
    [(torch.int64, 1), (torch.int32, 1), (torch.float32, 0), (torch.uint8, 0)],
)
def test_ignored_targets_of_an_unknown_loss_are_warned_of(
    dtype: torch.dtype, expected: int
) -> None:
    y = torch.tensor([1, -100]).to(dtype)
    weights, learn = LossWeights(), fake_learner(lambda pred, y: pred.mean())
    learn.iter = 1
    weights.weigh_batch(learn, (y,), (y,))  # only the first batch is looked at
    learn.iter = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        weights.weigh_batch(learn, (y,), (y.abs() + 1, 'text'))
        assert not caught
        for _ in range(2):
            weights.weigh_batch(learn, (y,), (y,))
    assert len(caught) == expected
    assert all('targets of -100' in str(w.message) for w in caught)


# -- comparison of a batch with its parts ----------------------------------------------------------


def squares(pred: Tensor, y: Tensor) -> Tensor:
    return (pred - y).square()


def mean_of_squares(pred: Tensor, y: Tensor) -> Tensor:
    return squares(pred, y).mean()


def masked(pred: Tensor, y: Tensor) -> Tensor:
    return squares(pred, y)[y > 0].mean()


def batch_learner(loss_func: Any, n: int = 9, **options: Any) -> Any:
    gen = torch.Generator().manual_seed(2)
    pred, y = (torch.randn(n, generator=gen, dtype=torch.float64) for _ in range(2))
    return fake_learner(loss_func, pred=pred, yb=(y,), xb=(pred,), **options)


def test_a_batch_is_compared_with_two_divisions() -> None:
    learn = batch_learner(mean_of_squares)
    whole, divisions = compare_parts(learn, learn.pred)
    errors = squares(learn.pred, learn.yb[0]).tolist()
    expected = [((k, sum(errors[:k]) / k), (9 - k, sum(errors[k:]) / (9 - k))) for k in (3, 1)]
    assert whole == pytest.approx(sum(errors) / 9, rel=1e-14)
    assert np.array(divisions) == pytest.approx(np.array(expected), rel=1e-14)
    sizes = {n: compare_parts(batch_learner(mean_of_squares, n), None)[1] for n in (1,)}
    assert sizes == {1: []}


@pytest.mark.parametrize('n', [2, 3, 5, 6])
def test_sizes_of_the_parts(n: int) -> None:
    learn = batch_learner(mean_of_squares, n)
    _, divisions = compare_parts(learn, learn.pred)
    sizes = [(first[0], second[0]) for first, second in divisions]
    assert sizes == {2: [(1, 1)], 3: [(1, 2)], 5: [(1, 4)], 6: [(2, 4), (1, 5)]}[n]


def test_named_parts_of_a_loss_are_compared() -> None:
    def of_parts(pred: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {'a': squares(pred, y).mean(), 'b': pred.mean()}

    def with_total(pred: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {**of_parts(pred, y), 'loss': pred.mean()}

    learn = batch_learner(of_parts)
    expected = (squares(learn.pred, learn.yb[0]) + learn.pred).mean().item()
    assert compare_parts(learn, learn.pred)[0] == pytest.approx(expected, rel=1e-14)
    learn.loss_func = with_total
    assert compare_parts(learn, learn.pred)[0] == learn.pred.mean().item()


def test_several_predictions_are_compared() -> None:
    learn = batch_learner(lambda preds, y: mean_of_squares(preds[0] * preds[1], y))
    pair = (learn.pred, torch.ones(9, dtype=torch.float64))
    expected = mean_of_squares(learn.pred, learn.yb[0]).item()
    assert compare_parts(learn, pair)[0] == pytest.approx(expected, rel=1e-14)
    assert is_weighted_mean(learn, pair) is True


class Noisy(nn.Module):
    "A mean with a counter, a list, a buffer and random numbers, which each call changes."

    def __init__(self, scale: float = 0.0) -> None:
        super().__init__()
        self.scale = scale
        self.n = 0
        self.log: list[float] = []
        self.register_buffer('total', torch.zeros(()))
        self.center = torch.zeros(())  # not a buffer

    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        self.n += 1
        self.log.append(1.0)
        self.total += 1
        self.center.add_(1)
        noise = torch.rand(len(pred), dtype=pred.dtype) * self.scale
        return mean_of_squares(pred + noise, y) * (1 + self.scale * self.n)


@pytest.mark.parametrize('compare', [compare_parts, is_weighted_mean])
@pytest.mark.parametrize('training', [True, False])
def test_a_comparison_leaves_no_trace(compare: Any, training: bool) -> None:
    learn = batch_learner(loss_func := Noisy(1.0), training=training)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    compare(learn, learn.pred)
    assert torch.equal(torch.rand(3), expected)
    assert (loss_func.n, loss_func.log) == (0, [])
    assert (loss_func.total.item(), loss_func.center.item()) == (0, 0)


def test_a_loss_that_fails_is_not_compared() -> None:
    def failing(pred: Tensor, y: Tensor) -> Tensor:
        raise ValueError

    learn = batch_learner(failing)
    whole, divisions = compare_parts(learn, learn.pred)
    assert whole != whole and divisions == []
    assert is_weighted_mean(learn, learn.pred) is None


def info_nce(pred: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.outer(pred, y), torch.arange(len(pred)))


def root(pred: Tensor, y: Tensor) -> Tensor:
    return squares(pred, y).mean().sqrt()


def normed(pred: Tensor, y: Tensor) -> Tensor:
    return squares((pred - pred.mean()) / pred.std(), y).mean()


TERMS: dict[str, tuple[Any, bool | None]] = {
    'mean': (mean_of_squares, True),
    'masked': (masked, True),
    'sum': (lambda pred, y: squares(pred, y).sum(), True),
    'weights of targets': (
        lambda pred, y: (squares(pred, y) * y.exp()).sum() / y.exp().sum(),
        True,
    ),
    'InfoNCE of targets': (info_nce, False),
    'InfoNCE of predictions': (lambda pred, y: info_nce(pred, pred.roll(1)), False),
    'root': (root, False),
    'normalized by the batch': (normed, False),
    'random numbers': (Noisy(0.1), False),
    'constant': (lambda pred, y: pred.sum() * 0 + 1, None),
    'nan': (lambda pred, y: pred.sum() * torch.nan, None),
}


@pytest.mark.parametrize('kind', TERMS)
def test_losses_that_are_means_with_weights(kind: str) -> None:
    loss_func, expected = TERMS[kind]
    learn = batch_learner(loss_func, training=False)
    assert is_weighted_mean(learn, learn.pred) is expected
    assert is_weighted_mean(batch_learner(loss_func, 3, training=False), learn.pred[:3]) is True


def test_a_masked_mean_of_few_samples_is_told_apart() -> None:
    gen = torch.Generator().manual_seed(0)
    pred = torch.randn(4, 3, 6, 6, generator=gen, dtype=torch.float64)
    y = torch.randint(-1, 3, (4, 6, 6), generator=gen)

    def masked_pixels(pred: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(pred, y.clamp(min=0), reduction='none')
        return (losses * (y >= 0)).sum() / (y >= 0).sum()

    options = {'pred': pred, 'yb': (y,), 'xb': (pred,), 'training': False}
    assert is_weighted_mean(fake_learner(masked_pixels, **options), pred) is True
    scores = pred.flatten(1)
    contrast = lambda pred, y: F.cross_entropy(pred @ y.T, torch.arange(len(pred)))
    options = {'pred': scores, 'yb': (scores.roll(1, 1),), 'xb': (scores,), 'training': False}
    assert is_weighted_mean(fake_learner(contrast, **options), scores) is False


class Late(nn.Module):
    "A mean that doubles after four calls."

    n = 0

    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        self.n += 1
        return mean_of_squares(pred, y) * (2 if self.n > 4 else 1)


def test_a_loss_that_differs_when_it_is_computed_again_is_not_compared() -> None:
    learn = batch_learner(Late(), training=False)
    assert is_weighted_mean(learn, learn.pred) is False


def count_checks(learn: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        check_is_mean(learn, learn.pred)
    return [str(w.message) for w in caught]


def test_what_is_not_compared() -> None:
    assert len(count_checks(batch_learner(masked))) == 1
    assert count_checks(batch_learner(masked, weight_func=lambda xb, yb: 1)) == []
    assert count_checks(batch_learner(nn.MSELoss())) == []
    assert count_checks(batch_learner(lambda pred, y: pred.sum() * torch.nan)) == []
    averaged = batch_learner(masked)
    averaged.parts.loss_weights.averages_samples = True
    assert count_checks(averaged) == []


def test_a_mask_that_is_alike_in_both_parts_is_found_by_a_single_sample() -> None:
    learn = batch_learner(masked)
    learn.yb = (torch.tensor([1.0, -1.0, -1.0] * 3, dtype=torch.float64),)
    (message,) = count_checks(learn)
    single, others = (squares(learn.pred[part], 1)[::3] for part in (slice(1), slice(3, None)))
    mean = (single.item() + 8 * others.mean().item()) / 9
    assert f'average to {mean:.6g}' in message


def test_ignored_targets_are_named_as_the_cause() -> None:
    def of_classes(pred: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.stack([pred, -pred], 1), y)

    learn = batch_learner(of_classes)
    learn.yb = (torch.tensor([0, -100, 1, 1, 0, 1, 0, 1, 1]),)
    (message,) = count_checks(learn)
    assert 'targets of -100' in message


def of_pairs(pred: Tensor, y: Tensor) -> Tensor:
    "Sum over pairs of neighbors divided by one number; 0 for one sample."
    return (pred[1:] - pred[:-1]).square().sum() / 5


def of_equal_labels(pred: Tensor, y: Tensor) -> Tensor:
    "A mean that fails for a single sample, as a loss with a variance does."
    if len(pred) < 2:
        raise ValueError('Batch size must be greater than 1')
    return normed(pred, y)


def test_a_loss_that_compares_samples_is_no_sum() -> None:
    "The pairs of two samples are in neither part, and with equal neighbors the parts add up to the whole."
    learn = batch_learner(of_pairs, 4)
    learn.pred = torch.tensor([1.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    whole, divisions = compare_parts(learn, learn.pred)
    assert [first[1] + second[1] for first, second in divisions] == [whole]
    assert not adds_up(learn, learn.pred, whole, divisions)
    (message,) = count_checks(learn)
    assert 'of_pairs is not a mean over samples: it is 2 for a batch' in message


@pytest.mark.parametrize('n', [2, 4, 9])
def test_a_sum_doubles_with_the_batch(n: int) -> None:
    learn = batch_learner(lambda pred, y: squares(pred, y).sum(), n)
    assert adds_up(learn, learn.pred, *compare_parts(learn, learn.pred))
    with pytest.raises(LossError, match='adds up'):
        check_is_mean(learn, learn.pred)


def test_a_loss_that_fails_for_a_sample_is_compared_in_halves() -> None:
    learn = batch_learner(of_equal_labels, 4)
    _, divisions = compare_parts(learn, learn.pred)
    assert [(first[0], second[0]) for first, second in divisions] == [(2, 2)]
    (message,) = count_checks(learn)
    assert 'of_equal_labels is not a mean over samples' in message
    learn = batch_learner(of_equal_labels, 9)
    _, divisions = compare_parts(learn, learn.pred)
    assert [(first[0], second[0]) for first, second in divisions] == [(3, 6)]


def evaluate(loss_func: Any, sizes: list[int], **options: Any) -> tuple[list[str], Learner]:
    "Evaluate twice; return the warnings."
    gen = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    batches = [(torch.randn(n, 1, generator=gen), torch.randn(n, generator=gen)) for n in sizes]
    model = nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))
    learn = Learner(batches, model, loss_func, SGD, default_cbs=False, **options)
    learn.add_cbs([TrainEvalCallback, Recorder])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(2):
            learn.validate(dl=batches)
    return [str(w.message) for w in caught], learn


@pytest.mark.parametrize('sizes', [[8, 8], [8, 5], [6, 6], [64, 64]])
def test_a_masked_mean_is_warned_of_once(sizes: list[int]) -> None:
    def of_most(pred: Tensor, y: Tensor) -> Tensor:
        counts = torch.arange(len(y)) > 0
        return squares(pred, y)[counts].sum() / counts.sum().clamp(min=1)

    (message,), learn = evaluate(of_most, sizes)
    assert 'of_most is not a mean over samples: it is' in message and 'weight_func=' in message
    (loss,) = learn.validate(dl=[learn.dls.one_batch()])
    assert f'it is {loss:.6g} for a batch' in message


@pytest.mark.parametrize('loss_func', [info_nce, root, normed])
def test_a_loss_of_whole_batches_is_warned_of_only_if_they_differ(loss_func: Any) -> None:
    assert evaluate(loss_func, [8, 8])[0] == []
    (message,) = evaluate(loss_func, [8, 8, 5])[0]
    assert 'not a mean over samples' in message
    assert evaluate(loss_func, [8, 8, 5], weight_func='samples')[0] == []


@pytest.mark.parametrize('sizes', [[8, 8], [8, 5], [1, 1], [1, 8]])
def test_a_mean_over_samples_is_not_warned_of(sizes: list[int]) -> None:
    assert evaluate(mean_of_squares, sizes)[0] == []
    assert evaluate(lambda pred, y: mean_of_squares(pred, y) + 3, sizes)[0] == []


def test_a_sum_is_an_error_only_where_it_has_another_weight() -> None:
    def added(pred: Tensor, y: Tensor) -> Tensor:
        return squares(pred, y).sum()

    assert evaluate(added, [8, 8])[0] == []
    with pytest.raises(LossError, match=r"added adds up.*`reduction = 'sum'`"):
        evaluate(added, [8, 5])
    added.reduction = 'sum'  # type: ignore[attr-defined]
    assert evaluate(added, [8, 5])[0] == []


def test_equal_predictions_are_compared_again() -> None:
    calls: list[int] = []

    def counted(pred: Tensor, y: Tensor) -> Tensor:
        calls.append(len(pred))
        return masked(pred, y)

    gen = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    batches = [(torch.randn(8, 1, generator=gen), torch.randn(8, generator=gen))] * 3
    model = nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))
    nn.init.zeros_(model[0].weight)
    learn = quiet_learner(batches, model, counted, SGD, cbs=[TrainEvalCallback, Recorder])
    with learn.no_bar():
        learn.validate(dl=batches[:1])
        n_compared = len(calls) - 1
        calls.clear()
        learn.validate(dl=batches)
        assert len(calls) == 3 + n_compared > 3  # the first batch alone
        nn.init.ones_(model[0].weight)
        with pytest.warns(UserWarning, match='not a mean over samples'):
            learn.validate(dl=batches)
        calls.clear()
        learn.validate(dl=batches)
    assert calls == [8] * 3


@pytest.mark.parametrize('sizes', [[8, 8], [8, 5]])
@pytest.mark.parametrize('loss_func', [mean_of_squares, masked])
def test_a_loss_is_compared_once(loss_func: Any, sizes: list[int]) -> None:
    calls: list[int] = []

    def counted(pred: Tensor, y: Tensor) -> Tensor:
        calls.append(len(pred))
        return loss_func(pred, y)

    _, learn = evaluate(counted, sizes)
    if loss_func is masked:  # warned of at the first batch, whose parts have 2, 6, 1 and 7 samples
        assert calls.count(5) == 2 * sizes.count(5)
    calls.clear()
    gen = torch.Generator().manual_seed(6)
    learn.validate(dl=[(torch.randn(n, 1, generator=gen), torch.ones(n)) for n in sizes])
    assert calls == sizes


def test_a_batch_of_one_sample_is_not_the_one_that_is_compared() -> None:
    (message,) = evaluate(masked, [5, 1, 5])[0]
    assert 'not a mean over samples' in message


@pytest.mark.parametrize(('dtype', 'n'), [(torch.float32, 1), (torch.float16, 0)])
def test_half_precision_has_a_wider_tolerance(dtype: torch.dtype, n: int) -> None:
    def off(pred: Tensor, y: Tensor) -> Tensor:
        return mean_of_squares(pred.float(), y) * (1 + 1e-4 * len(pred))

    batches = [(torch.randn(k, 1).to(dtype), torch.randn(k)) for k in (8, 5)]
    model = nn.Sequential(nn.Linear(1, 1), nn.Flatten(0)).to(dtype)
    learn = bare_learner(batches, model, off, SGD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.validate(dl=batches)
    assert len(caught) == n
