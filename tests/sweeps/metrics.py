"""Table of metrics: every class of the installed libraries, with its data and what its constructor needs.

`build()` makes a metric; the title of its class decides about its data, the ten samples of `make_data`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from learnkit.metrics import skm_to_fastai
from tests.sweeps.verdicts import Subject

N = 10
N_CLASS = 3
Columns = tuple[Any, ...]  # predictions and targets of all samples


@dataclass(frozen=True)
class Measuring:
    "How a metric is used."

    kind: str  # of `make_data`
    # f(targets, predictions) of the whole set, for a score that `build` wraps
    score: Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(*shape, generator=generator)


def draw_classes(*shape: int, n: int = N_CLASS, seed: int = 0) -> Tensor:
    return (draw(*shape, seed=seed) * n).long().clamp(max=n - 1)


WORDS = ('the cat sat', 'a dog ran home', 'it was late', 'we saw the red fox', 'hello world')


def make_texts() -> tuple[list[str], list[str]]:
    "Return sentences, and sentences of which every second differs in a word."
    targets = [WORDS[i % len(WORDS)] for i in range(N)]
    return [text + ' here' * (i % 2) for i, text in enumerate(targets)], targets


def make_boxes(low: Tensor, has_scores: bool) -> list[dict[str, Tensor]]:
    "Return two boxes for each sample."
    boxes = torch.cat([low, low + 20], -1)
    labels = torch.arange(2)
    scores = {'scores': torch.tensor([0.9, 0.6])} if has_scores else {}
    return [{'boxes': own, 'labels': labels, **scores} for own in boxes]


def make_data(kind: str) -> Columns:
    "Return predictions and targets of a kind."
    return DATA[kind]()


def make_images(n_channel: int, size: int, seed: int = 0) -> Tensor:
    return draw(N, n_channel, size, size, seed=seed)


DATA: dict[str, Callable[[], Columns]] = {
    'binary': lambda: (draw(N), draw_classes(N, n=2, seed=3)),
    'groups': lambda: (draw(N), draw_classes(N, n=2, seed=3), draw_classes(N, n=2, seed=5)),
    'classes': lambda: (draw(N, 3).softmax(1), draw_classes(N)),
    'labels': lambda: (draw(N, 3), draw_classes(N, 3, n=2, seed=3)),
    'two labels': lambda: (draw(N, 2), draw_classes(N, 2, n=2, seed=3)),
    'values': lambda: (draw(N) + 0.1, draw(N, seed=3) + 0.1),
    'vectors': lambda: (draw(N, 3), draw(N, 3, seed=3)),
    'chances': lambda: (draw(N, 3).softmax(1), draw(N, 3, seed=3).softmax(1)),
    'ensembles': lambda: (draw(N, 3), draw(N, seed=3)),
    'queries': lambda: (draw(N), draw_classes(N, n=2, seed=3), torch.arange(N) // 4),
    'grid': lambda: (make_images(1, 16), make_images(1, 16, 3)),
    'colors': lambda: (make_images(3, 16), make_images(3, 16, 3)),
    'large': lambda: (make_images(1, 48), make_images(1, 48, 3)),
    'images': lambda: (make_images(3, 16),),
    'waves': lambda: (draw(N, 40), draw(N, 40, seed=3)),
    'long waves': lambda: (draw(N, 1200), draw(N, 1200, seed=3)),
    'speakers': lambda: (draw(N, 2, 40), draw(N, 2, 40, seed=3)),
    'spectra': lambda: (draw(N, 4, 5, 2), draw(N, 4, 5, 2, seed=3)),
    'texts': make_texts,
    'references': lambda: (make_texts()[0], [[text] for text in make_texts()[1]]),
    'tokens': lambda: (draw(N, 4, 5), draw_classes(N, 4, n=5)),
    'clusters': lambda: (draw_classes(N, seed=2), draw_classes(N)),
    'points': lambda: (draw(N, 2), torch.arange(N) % 3),
    'ratings': lambda: (draw_classes(N, 3, n=4),),
    'numbers': lambda: (draw(N),),
    'weighted': lambda: (draw(N), draw(N, seed=3)),
    'masks': lambda: (draw_classes(N, 8, 8), draw_classes(N, 8, 8, seed=3)),
    'panoptic': lambda: (
        torch.stack([draw_classes(N, 8, 8), draw_classes(N, 8, 8, n=2)], -1),
        torch.stack([draw_classes(N, 8, 8, seed=3), draw_classes(N, 8, 8, n=2, seed=4)], -1),
    ),
    'boxes': lambda: (
        make_boxes(draw(N, 2, 2) * 30, True),
        make_boxes(draw(N, 2, 2) * 30, False),
    ),
    'shapes': lambda: (draw(N, 6, 2), draw(N, 6, 2, seed=3)),
    'ranks': lambda: (draw(N, 3), draw_classes(N)),
    'clicks': lambda: (draw_classes(N, n=2, seed=3),),
}


# -- torchmetrics ----------------------------------------------------------------------------------

Rows = Iterator[tuple[str, Measuring, Callable[[], Any]]]
TORCHMETRICS = {
    'classification': 'classes',
    'regression': 'values',
    'segmentation': 'masks',
    'retrieval': 'queries',
    'image': 'grid',
    'audio': 'waves',
    'text': 'texts',
    'clustering': 'clusters',
    'nominal': 'clusters',
    'aggregation': 'numbers',
    'detection': 'boxes',
    'shape': 'shapes',
}
# classes whose data are not those of their module
KINDS = {
    'BinaryFairness': 'groups',
    'BinaryGroupStatRates': 'groups',
    'CosineSimilarity': 'vectors',
    'JensenShannonDivergence': 'chances',
    'KLDivergence': 'chances',
    'ContinuousRankedProbabilityScore': 'ensembles',
    'ErrorRelativeGlobalDimensionlessSynthesis': 'colors',
    'SpectralAngleMapper': 'colors',
    'SpectralDistortionIndex': 'colors',
    'TotalVariation': 'images',
    'VisualInformationFidelity': 'large',
    'MultiScaleStructuralSimilarityIndexMeasure': 'large',
    'ComplexScaleInvariantSignalNoiseRatio': 'spectra',
    'SignalDistortionRatio': 'long waves',
    'PermutationInvariantTraining': 'speakers',
    'SourceAggregatedSignalDistortionRatio': 'speakers',
    'BLEUScore': 'references',
    'CHRFScore': 'references',
    'SacreBLEUScore': 'references',
    'TranslationEditRate': 'references',
    'Perplexity': 'tokens',
    'CalinskiHarabaszScore': 'points',
    'DaviesBouldinScore': 'points',
    'DunnIndex': 'points',
    'FleissKappa': 'ratings',
    'MeanMetric': 'weighted',
    'PanopticQuality': 'panoptic',
    'ModifiedPanopticQuality': 'panoptic',
}
# by parameter that a constructor demands
NEEDED = {
    'num_classes': N_CLASS,
    'num_labels': 3,
    'num_groups': 2,
    'num_outputs': 1,
    'min_recall': 0.5,
    'min_precision': 0.5,
    'min_specificity': 0.5,
    'min_sensitivity': 0.5,
    'beta': 2.0,
    'p': 3,
    'threshold': 0.5,
    'data_range': 1.0,
    'things': {0, 1},
    'stuffs': {2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    'MultiScaleStructuralSimilarityIndexMeasure': {'kernel_size': 3, 'betas': (0.5, 0.5)},
    'PearsonCorrCoef': {},
    'MeanIoU': {'input_format': 'index'},
    'DiceScore': {'input_format': 'index'},
    'GeneralizedDiceScore': {'input_format': 'index'},
    'HausdorffDistance': {'input_format': 'index'},
    'SignalDistortionRatio': {'filter_length': 8},
    'ROUGEScore': {'rouge_keys': ('rouge1', 'rouge2', 'rougeL')},
    'SacreBLEUScore': {},
}
# what needs a pretrained model, data of another form, or the task as an argument
SKIPPED = {
    'BERTScore',
    'InfoLM',
    'SQuAD',
    'DeepImageStructureAndTextureSimilarity',
    'LearnedPerceptualImagePatchSimilarity',
    'MemorizationInformedFrechetInceptionDistance',
    'PerceptualPathLength',
    'QualityWithNoReference',
    'SpatialDistortionIndex',
    'MulticlassExactMatch',
    'BaseAggregator',
    'Metric',
    'Running',
}


def list_torchmetrics() -> Rows:
    "Yield the metrics of torchmetrics that need neither a model nor another metric, and some wrappers."
    for module_name, kind in TORCHMETRICS.items():
        module = import_module(f'torchmetrics.{module_name}')
        for name, cls in list_metrics_of(module):
            is_factory = module_name == 'classification' and not name.startswith(
                ('Binary', 'Multiclass', 'Multilabel')
            )
            if name not in SKIPPED and not is_factory:
                yield name, Measuring(find_kind(name, kind)), partial(construct, cls)
    yield from list_torchmetrics_wrappers()


def list_metrics_of(module: Any) -> Iterator[tuple[str, Any]]:
    "Yield the metric classes of a module."
    base = import_module('torchmetrics').Metric
    for name, cls in sorted(vars(module).items()):
        if inspect.isclass(cls) and issubclass(cls, base) and not name.startswith('_'):
            yield name, cls


def find_kind(name: str, kind: str) -> str:
    "Return the kind of data of a class, of which `kind` is its module's."
    for prefix, own in {'Binary': 'binary', 'Multilabel': 'labels'}.items():
        if name.startswith(prefix) and name not in KINDS:
            return own
    return KINDS.get(name, kind)


def construct(cls: Any) -> Any:
    "Make a metric, with what its constructor demands."
    name = cls.__name__
    parameters = inspect.signature(cls.__init__).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty or p.name == 'num_classes']
    options = {key: NEEDED[key] for key in required if key in NEEDED} | OPTIONS.get(name, {})
    if name == 'PermutationInvariantTraining':
        functional = import_module('torchmetrics.functional.audio')
        options['metric_func'] = functional.scale_invariant_signal_noise_ratio
    if name == 'FleissKappa':
        options['mode'] = 'counts'
    return cls(**options)


def list_torchmetrics_wrappers() -> Rows:
    "Yield wrappers around other metrics."
    library = import_module('torchmetrics')
    accuracy = partial(library.classification.MulticlassAccuracy, N_CLASS, average=None)
    error = library.MeanAbsoluteError
    wrappers = library.wrappers
    yield 'ClasswiseWrapper', Measuring('classes'), lambda: wrappers.ClasswiseWrapper(accuracy())
    yield 'MinMaxMetric', Measuring('values'), lambda: wrappers.MinMaxMetric(error())
    yield (
        'MultioutputWrapper',
        Measuring('vectors'),
        lambda: wrappers.MultioutputWrapper(error(), 3),
    )
    yield (
        'MetricCollection',
        Measuring('classes'),
        lambda: library.MetricCollection([accuracy(), library.classification.MulticlassRecall(3)]),
    )
    yield (
        'a sum of two metrics',
        Measuring('values'),
        lambda: error() + library.MeanSquaredError(),
    )


# -- torcheval -------------------------------------------------------------------------------------

TORCHEVAL_KINDS = {
    'AUC': 'weighted',
    'BinaryNormalizedEntropy': 'real binary',
    'BLEUScore': 'references',
    'Cat': 'numbers',
    'ClickThroughRate': 'clicks',
    'HitRate': 'ranks',
    'Max': 'numbers',
    'Mean': 'numbers',
    'Min': 'numbers',
    'Sum': 'numbers',
    'MeanSquaredError': 'values',
    'R2Score': 'values',
    'PeakSignalNoiseRatio': 'grid',
    'Perplexity': 'tokens',
    'ReciprocalRank': 'ranks',
    'RetrievalPrecision': 'binary',
    'TopKMultilabelAccuracy': 'labels',
    'WeightedCalibration': 'weighted',
    'WordErrorRate': 'texts',
    'WordInformationLost': 'texts',
    'WordInformationPreserved': 'texts',
}
DATA['real binary'] = lambda: (draw(N), draw_classes(N, n=2, seed=3).float())
TORCHEVAL_OPTIONS: dict[str, dict[str, Any]] = {
    'BLEUScore': {'n_gram': 2},
    'TopKMultilabelAccuracy': {'k': 2},
    'MulticlassConfusionMatrix': {'num_classes': 3},
    'MultilabelAUPRC': {'num_labels': 3},
    'MultilabelBinnedAUPRC': {'num_labels': 3},
    'MultilabelBinnedPrecisionRecallCurve': {'num_labels': 3},
    'MultilabelPrecisionRecallCurve': {'num_labels': 3},
    'MultilabelRecallAtFixedPrecision': {'num_labels': 3, 'min_precision': 0.5},
    'BinaryRecallAtFixedPrecision': {'min_precision': 0.5},
}
TORCHEVAL_SKIPPED = {'FrechetAudioDistance', 'FrechetInceptionDistance', 'Metric', 'Throughput'}


def list_torcheval() -> Rows:
    "Yield the metrics of torcheval, without those of a pretrained model."
    library = import_module('torcheval.metrics')
    for name in library.__all__:
        cls = getattr(library, name)
        if not inspect.isclass(cls) or name in TORCHEVAL_SKIPPED or name.startswith('Windowed'):
            continue
        kind = TORCHEVAL_KINDS.get(name) or find_kind(name, 'classes')
        options = dict(TORCHEVAL_OPTIONS.get(name, {}))
        parameters = inspect.signature(cls.__init__).parameters
        if name.startswith('Multiclass') and parameters['num_classes'].default is not N_CLASS:
            options['num_classes'] = N_CLASS
        yield name, Measuring(kind), partial(cls, **options)


# -- scikit-learn ----------------------------------------------------------------------------------

# scores of predicted classes, and their options
CLASS_SCORES: dict[str, dict[str, Any]] = {
    'accuracy_score': {},
    'adjusted_mutual_info_score': {},
    'adjusted_rand_score': {},
    'balanced_accuracy_score': {},
    'cohen_kappa_score': {},
    'completeness_score': {},
    'confusion_matrix': {'labels': [0, 1, 2]},
    'f1_score': {'average': 'macro'},
    'fbeta_score': {'average': 'macro', 'beta': 2},
    'fowlkes_mallows_score': {},
    'hamming_loss': {},
    'homogeneity_score': {},
    'jaccard_score': {'average': 'macro'},
    'matthews_corrcoef': {},
    'mutual_info_score': {},
    'normalized_mutual_info_score': {},
    'precision_score': {'average': 'macro', 'zero_division': 0},
    'rand_score': {},
    'recall_score': {'average': 'macro', 'zero_division': 0},
    'v_measure_score': {},
    'zero_one_loss': {},
}
VALUE_SCORES = (
    'd2_absolute_error_score',
    'd2_pinball_score',
    'd2_tweedie_score',
    'explained_variance_score',
    'max_error',
    'mean_absolute_error',
    'mean_absolute_percentage_error',
    'mean_gamma_deviance',
    'mean_pinball_loss',
    'mean_poisson_deviance',
    'mean_squared_error',
    'mean_squared_log_error',
    'mean_tweedie_deviance',
    'median_absolute_error',
    'r2_score',
    'root_mean_squared_error',
    'root_mean_squared_log_error',
)
CHANCE_SCORES: dict[str, tuple[str, dict[str, Any]]] = {
    'average_precision_score': ('binary', {}),
    'brier_score_loss': ('binary', {}),
    'd2_brier_score': ('binary', {}),
    'roc_auc_score': ('binary', {}),
    'coverage_error': ('labels', {'flatten': False}),
    'label_ranking_average_precision_score': ('labels', {'flatten': False}),
    'label_ranking_loss': ('labels', {'flatten': False}),
    'dcg_score': ('labels', {'flatten': False}),
    'ndcg_score': ('labels', {'flatten': False}),
    'log_loss': ('classes', {'flatten': False, 'labels': [0, 1, 2]}),
    'd2_log_loss_score': ('classes', {'flatten': False, 'labels': [0, 1, 2]}),
    'top_k_accuracy_score': ('classes', {'flatten': False, 'labels': [0, 1, 2]}),
}


def list_sklearn() -> Rows:
    "Yield scikit-learn's scores of classes, of values and of chances, by `skm_to_fastai`."
    library = import_module('sklearn.metrics')
    for name, options in CLASS_SCORES.items():
        score = getattr(library, name)
        measuring = Measuring('classes', partial(_score_classes, score), options)
        yield name, measuring, partial(skm_to_fastai, score, **options)
    rows = {name: ('values', dict[str, Any]()) for name in VALUE_SCORES} | CHANCE_SCORES
    for name, (kind, options) in rows.items():
        score = getattr(library, name)
        own = {key: value for key, value in options.items() if key != 'flatten'}
        measuring = Measuring(kind, score, own)
        yield name, measuring, partial(skm_to_fastai, score, is_class=False, **options)


def _score_classes(score: Any, targets: Any, preds: Any, **options: Any) -> Any:
    return score(targets, preds.argmax(1), **options)


# by name of the distribution
LIBRARIES: dict[str, Callable[[], Rows]] = {
    'torchmetrics': list_torchmetrics,
    'scikit-learn': list_sklearn,
    'torcheval': list_torcheval,
}


def load_metrics(library: str) -> list[Subject]:
    "Return the metrics of an installed library."
    return [Subject(library, title, build, used) for title, used, build in LIBRARIES[library]()]
