"""A new instance of every metric of `learnkit.metrics`, and the kind of data that it measures."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import learnkit.metrics as M
from learnkit.metrics.averages import as_metrics
from learnkit.metrics.base import Metric
from tests.helpers.libraries import import_or_skip

# functions that measure nothing, and base classes
NO_METRICS = set('Mean Metric as_metrics check_column dry_run measures_batches'.split())


class Squares(M.SumMetric):
    "Mean of the squared predictions, as a user writes it."

    def sums(self, pred: Any, targ: Any) -> tuple[Any, int]:
        return pred.double().square().sum(), len(pred)


# metrics that are made of something that a user gives, which decides about the name and the direction
GIVEN: dict[str, Callable[[], Any]] = {
    'AccumMetric': partial(M.AccumMetric, M.mae),
    'AvgLoss': M.AvgLoss,
    'AvgMetric': partial(M.AvgMetric, M.mse),
    'AvgSmoothLoss': M.AvgSmoothLoss,
    'ElementMean': partial(M.ElementMean, M.mae),
    'LossMetric': partial(M.LossMetric, 'part'),
    'LossMetrics': partial(M.LossMetrics, 'part'),
    'SumMetric': Squares,
    'TorchMetric': lambda: M.TorchMetric(import_or_skip('torchmetrics').MeanAbsoluteError()),
    'ValueMetric': partial(M.ValueMetric, lambda: 0.5, 'half'),
    'skm_to_fastai': partial(M.skm_to_fastai, lambda targ, pred: abs(targ - pred).mean()),
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {'FBeta': (2,), 'FBetaMulti': (2,)}

# data of the metrics of each module, and of metrics that measure something else
KIND_OF_MODULE = {
    'classification': 'classes',
    'functional': 'regression',
    'segmentation': 'pixels',
    'averages': 'regression',
    'base': 'regression',
    'whole_set': 'regression',
}
KINDS = dict.fromkeys('accuracy error_rate BrierScore RocAuc skm_to_fastai'.split(), 'classes')
KINDS |= dict.fromkeys('F1Score FBeta Jaccard Precision Recall'.split(), 'two classes')
KINDS |= dict.fromkeys('RocAucBinary APScoreBinary Dice JaccardCoeff'.split(), 'two classes')
KINDS |= dict.fromkeys('accuracy_multi BrierScoreMulti RocAucMulti APScoreMulti'.split(), 'labels')
KINDS |= {
    'CorpusBLEUMetric': 'tokens',
    'ExpRMSPE': 'positive',
    'SpearmanCorrCoef': 'regression',
    'exp_rmspe': 'positive',
    'msle': 'positive',
    'top_k_accuracy': 'nine classes',
}

EVERY_METRIC = [name for name in M.__all__ if name not in NO_METRICS]


def make_metric(name: str) -> Metric:
    "Return a new instance of a metric, by its name in `learnkit.metrics`."
    made = getattr(M, name)
    if name in GIVEN:
        made = GIVEN[name]()
    elif inspect.isclass(made):
        made = made(*ARGUMENTS.get(name, ()))
    return as_metrics(made)[0]


def kind_of(name: str) -> str:
    "Return the kind of data that a metric measures. A new module or metric has a line in the tables above."
    module = getattr(M, name).__module__.rpartition('.')[2]
    if name in KINDS:
        return KINDS[name]
    if name.endswith('Multi') and module == 'classification':
        return 'labels'
    assert module in KIND_OF_MODULE, f'name the data of {name} in KINDS of {__file__}'
    return KIND_OF_MODULE[module]
