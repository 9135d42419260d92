"""The direction in which a metric improves."""

import numpy as np
import pytest

from learnkit.core.errors import OptionError
from learnkit.metrics.direction import MetricProperties, as_comparison
from tests.helpers.every_metric import EVERY_METRIC, GIVEN, make_metric

LOWER = set(
    (
        'error_rate mse rmse RMSE mae msle exp_rmspe ExpRMSPE BrierScore BrierScoreMulti '
        'Perplexity perplexity HammingLoss HammingLossMulti'
    ).split()
)


@pytest.mark.parametrize('name', [name for name in EVERY_METRIC if name not in GIVEN])
def test_every_metric_of_the_package_is_known(name: str) -> None:
    metric = make_metric(name)
    way = MetricProperties().get(metric.name)
    assert way is not None, (
        f'{type(metric).__module__}: no pattern matches the column {metric.name!r} of {name}; add one to `_PATTERNS` '
        'in learnkit/metrics/direction.py, and if lower is better, the name to LOWER in this file'
    )
    assert way == ('lower' if name in LOWER else 'higher'), (
        f'{name} is {way!r} by `_PATTERNS` in learnkit/metrics/direction.py, and something else by LOWER in this file'
    )


@pytest.mark.parametrize(
    ('names', 'way'),
    [
        (
            'train_loss valid_loss night/loss valid_part_loss MeanSquaredError wer day/perplexity',
            'lower',
        ),
        (
            'accuracy valid_accuracy night/top_k_accuracy MulticlassAccuracy BinaryF1Score BinaryAUROC mIoU acc',
            'higher',
        ),
        (
            'lr lr/0 mom time epoch',
            'neutral',
        ),
    ],
)
def test_columns_by_their_own_names(names: str, way: str) -> None:
    expected = dict.fromkeys(names.split(), way)
    assert {name: MetricProperties()[name] for name in names.split()} == expected


def test_an_unknown_name_is_an_error_that_states_how_to_declare_it() -> None:
    ways = MetricProperties()
    assert ways.get('quux') is None
    with pytest.raises(OptionError, match=r"'night/quux'.*MetricProperties\(higher='quux'\)"):
        ways['night/quux']
    with pytest.raises(OptionError, match='is neutral'):
        ways.higher_is_better('lr')


def test_what_is_declared_comes_first() -> None:
    ways = MetricProperties(higher=['quux', 'loss'], lower='night/*', neutral='probe_*')
    assert [
        ways[n] for n in ('quux', 'valid_loss', 'night/accuracy', 'day/accuracy', 'probe_loss')
    ] == ['higher', 'higher', 'lower', 'higher', 'neutral']
    assert ways['night/quux'] == 'higher'  # a name comes before a pattern


def test_comparisons() -> None:
    assert as_comparison(None, 'mae') is np.less and as_comparison('greater', 'mae') is np.greater
    assert as_comparison(max, 'mae') is max
    for wrong in ('lower', 3):
        with pytest.raises(OptionError, match='comp='):
            as_comparison(wrong, 'mae')  # type: ignore[arg-type]


def test_negated_scores_and_names_that_only_look_like_metrics() -> None:
    ways = MetricProperties()
    for name in (
        'neg_log_loss',
        'neg_mean_squared_error',
        'neg_brier_score',
        'valid_neg_root_mean_squared_error',
    ):
        assert ways[name] == 'higher'
    for name in ('loss_scale', 'acc_steps', 'map_size', 'iou_threshold'):
        assert ways[name] == 'neutral'
    for name in ('inaccuracy', 'dissimilarity', 'acc_foo', 'decorrelation', 'neg_log_likelihood'):
        assert ways.get(name) is None
    for name in ('BalancedAccuracy', 'CosineSimilarity', 'map_50', 'acc_top5'):
        assert ways[name] == 'higher'
