"""Which way a metric is better: higher, lower or neither, by its name or a pattern. An unknown name is no guess."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, Self

import numpy as np

from learnkit.core.errors import OptionError, did_you_mean

__all__ = ['MetricProperties', 'as_comparison']

Compare = Callable[[Any, Any], Any]

# What is known by itself, looked through from top to bottom. A pattern with a slash is for whole columns, one without
# for the metric's own name, as `_own_name` has it.
_KNOWN: tuple[tuple[str, str], ...] = tuple(
    (pattern, way)
    for way, patterns in (
        ('higher', 'neg_*loss neg_*error neg_*deviance neg_*_score'),  # scores of scikit-learn
        (
            'neutral',
            'epoch fit time iter step lr lr/* lr-* mom mom/* mom-* wd wd/* eps beta* weight_decay momentum *_lr '
            '*_weight *_scale *_size *_steps *_threshold loss_weight/* optim/* profiler/* profiling/* ctx/* '
            'gradient/* grad/* norm/* l2_norm/* l2_norm_ratio/* cosine/* activations/* throughput/* time/* '
            'memory/* system/* cpu/* gpu/* cpu_* gpu_* disk_* network_* memory_*_bytes memory_percentage '
            'train_time/* data/* parameters/*',
        ),
        (
            'lower',
            'loss *_loss loss_* *error* *_err err perplexity ppl *_perplexity mse mae rmse msle rmsle mape smape '
            'exp_rmspe *_mse *_mae *_rmse bce nll kl cross_entropy *_entropy brier* wer cer fid fvd lpips eer ece '
            '*hamming* *distance* *divergence* *deviance* false_positive_rate false_negative_rate fpr fnr',
        ),
        (
            'higher',
            'acc accuracy *_acc acc_[0-9]* acc_top* acc_norm accuracy* *_accuracy* top_k* precision* recall* f1* '
            'fbeta* f_beta* dice* jaccard* iou *_iou miou *_miou iou_* ap map *_ap *_map ap_[0-9]* ap_small '
            'ap_medium ap_large map_[0-9]* map_small map_medium map_large map_per_class ap_score* '
            'average_precision* auc auroc *_auc *_auroc roc_auc* auprc r2 r2_score explained_variance* '
            'cohen_kappa* kappa matthews* mcc pearson* spearman* corr_* *_corr correlation* *_correlation* '
            'similarity* *_similarity* *bleu* rouge* meteor exact_match psnr *noise_ratio ssim *_ssim ndcg mrr '
            'hit_rate specificity sensitivity win_rate reward *_reward *_precision *_recall *_kappa *_quality',
        ),
    )
    for pattern in patterns.split()
)
WAYS = ('higher', 'lower', 'neutral')

_PREFIX = re.compile(r'^(train|valid|val|eval|test)_')
_TORCHMETRICS = re.compile(r'^(binary|multiclass|multilabel)_?')


class MetricProperties:
    """Say of each metric whether higher or lower is better, or neither.

    A metric is named as its column of the history, or by a glob pattern. The prefixes `train_` and `valid_` and the
    loader's name (`night/loss`) do not matter, unless the pattern itself has a slash; nor does upper or lower case.
    What is declared here comes before what is known by itself (losses, errors, the metrics of
    `learnkit.metrics.functional`, the common ones of torchmetrics); of what is declared, a name comes before a pattern,
    and later before earlier.

    Raises `OptionError` for a name that is not known, and for one that is declared to be two things.

    >>> ways = MetricProperties(lower='wer_*', neutral='temperature')
    >>> ways['valid_loss'], ways['night/accuracy'], ways['wer_clean'], ways['temperature']
    ('lower', 'higher', 'lower', 'neutral')
    >>> ways.is_better('wer_clean', 0.1, than=0.2)
    True
    """

    def __init__(
        self,
        higher: str | Iterable[str] = (),  # names or patterns of metrics of which more is better
        lower: str | Iterable[str] = (),  # less
        neutral: str | Iterable[str] = (),  # neither: a rate, a time, a norm
    ) -> None:
        self._declared: dict[str, str] = {}
        self.declare(higher, lower, neutral)

    def declare(
        self,
        higher: str | Iterable[str] = (),
        lower: str | Iterable[str] = (),
        neutral: str | Iterable[str] = (),
    ) -> Self:
        "Declare more metrics, and return this object; a name that was declared before is now what is said last."
        new: dict[str, str] = {}
        for way, patterns in zip(WAYS, (higher, lower, neutral), strict=True):
            for pattern in (patterns,) if isinstance(patterns, str) else patterns:
                if not isinstance(pattern, str) or not pattern.strip():
                    raise OptionError(
                        f'{way}={patterns!r}: give names of metrics, or patterns such as "*_error".'
                    )
                if new.setdefault(pattern.lower(), way) != way:
                    raise OptionError(
                        f'{pattern!r} cannot be both {new[pattern.lower()]} and {way}: choose one.'
                    )
        for pattern in new:
            self._declared.pop(pattern, None)  # so that the last one comes last
        self._declared |= new
        return self

    def __getitem__(self, name: str) -> str:
        "Return 'higher', 'lower' or 'neutral'."
        way = self.get(name)
        if way is not None:
            return way
        bare = _own_name(name)
        close = did_you_mean(bare, (p for p, _ in _KNOWN if '*' not in p))
        raise OptionError(
            f'Nobody has said whether {name!r} is better when it is higher or lower.{close} Declare it: '
            f'`MetricProperties(higher={bare!r})`, or `lower=`, or `neutral=`, which callbacks take as '
            '`comp=`.'
        )

    def get(self, name: str) -> str | None:
        "Return 'higher', 'lower' or 'neutral', None for a name that is not known."
        whole, own = name.lower(), _own_name(name)
        if (exact := self._declared.get(whole, self._declared.get(own))) is not None:
            return exact
        declared = reversed(self._declared.items())
        return next(
            (way for pattern, way in (*declared, *_KNOWN) if _fits(pattern, whole, own)), None
        )

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def higher_is_better(self, name: str) -> bool:
        "Tell whether higher is better; a neutral metric has no better, which is an `OptionError`."
        if (way := self[name]) != 'neutral':
            return way == 'higher'
        raise OptionError(
            f'{name!r} is neutral: no value of it is better than another. To compare it all the same, '
            f'declare it: `MetricProperties(lower={_own_name(name)!r})`, or `higher=`.'
        )

    def is_neutral(self, name: str) -> bool:
        "Tell whether no value of the metric is better than another."
        return self[name] == 'neutral'

    def is_better(self, name: str, value: Any, than: Any) -> bool:
        "Tell whether `value` is better than another value of the same metric."
        return bool(self.comparison(name)(value, than))

    def comparison(self, name: str) -> Compare:
        "Return `numpy.greater` or `numpy.less`, as `comp` of `EarlyStoppingCallback` and others takes it."
        return np.greater if self.higher_is_better(name) else np.less

    def __repr__(self) -> str:
        ways = {way: [p for p, w in self._declared.items() if w == way] for way in WAYS}
        return f'MetricProperties({", ".join(f"{way}={names}" for way, names in ways.items() if names)})'


def as_comparison(
    comp: Compare | MetricProperties | str | None,  # None: by what is known of the name
    name: str,  # of the metric
) -> Compare:
    """Return which way is better as a function `comp(new, old)`. Raises `OptionError`.

    >>> as_comparison('lt', 'anything') is np.less, as_comparison(None, 'dice_score') is np.greater
    (True, True)
    """
    if comp is None:
        comp = MetricProperties()
    if isinstance(comp, MetricProperties):
        return comp.comparison(name)
    if callable(comp):
        return comp
    named = {'greater': np.greater, 'gt': np.greater, 'less': np.less, 'lt': np.less}
    if isinstance(comp, str) and comp.lower() in named:
        return named[comp.lower()]
    raise OptionError(
        f'comp={comp!r}: give `greater`, `less`, a function comp(new, old), or MetricProperties.'
    )


def _own_name(name: str) -> str:
    "Return a metric's name in snake_case, without its loader and the prefixes that learnkit and torchmetrics add."
    last = name.rpartition('/')[2]
    if not last.isupper():
        last = re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', last)
    bare = _PREFIX.sub('', last.lower())
    return _TORCHMETRICS.sub('', bare) or bare


def _fits(pattern: str, whole: str, own: str) -> bool:
    return fnmatchcase(whole, pattern) or ('/' not in pattern and fnmatchcase(own, pattern))
