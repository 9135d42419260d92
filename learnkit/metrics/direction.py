# SPDX-License-Identifier: Apache-2.0
"""`MetricProperties`: whether higher or lower values of a metric are better, by name or pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from learnkit.core.errors import OptionError

Compare = Callable[[Any, Any], Any]

# built-in patterns, checked from top to bottom; a pattern with a slash matches whole columns, a pattern without a
# slash matches the name that `_strip_prefixes` returns
_PATTERNS = (
    ('higher', 'neg_*loss neg_*error neg_*deviance neg_*_score'),  # scores of scikit-learn
    (
        'neutral',
        'epoch fit time iter step lr lr/* lr-* mom mom/* mom-* wd wd/* *_scale *_size *_steps *_threshold',
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
_KNOWN = [(pattern, way) for way, patterns in _PATTERNS for pattern in patterns.split()]
WAYS = ('higher', 'lower', 'neutral')

_PREFIX = re.compile(r'^(train|valid|val|eval|test)_')
_TORCHMETRICS = re.compile(r'^(binary|multiclass|multilabel)_?')


class MetricProperties:
    """Declare for metrics whether higher values are better, lower values, or neither.

    A metric is given by its column in the history or by a glob pattern. Case, the prefixes `train_` and `valid_`, and
    the loader's name (`night/loss`) are ignored, unless the pattern contains a slash. Declarations take precedence
    over built-in patterns (losses, errors, the metrics of `learnkit.metrics`, common metrics of
    torchmetrics). Among declarations, names take precedence over patterns, and later ones over earlier ones.

    Raises `OptionError` for an unknown name.

    >>> ways = MetricProperties(lower='wer_*', neutral='temperature')
    >>> ways['valid_loss'], ways['night/accuracy'], ways['wer_clean'], ways['temperature']
    ('lower', 'higher', 'lower', 'neutral')
    """

    def __init__(
        self,
        higher: str | Iterable[str] = (),  # names or patterns of metrics with higher values better
        lower: str | Iterable[str] = (),  # names or patterns of metrics with lower values better
        neutral: str | Iterable[str] = (),  # names or patterns of rates, times, norms
    ) -> None:
        self._declared: dict[str, str] = {}
        for way, patterns in zip(WAYS, (higher, lower, neutral), strict=True):
            names = (patterns,) if isinstance(patterns, str) else patterns
            self._declared |= {name.lower(): way for name in names}

    def __getitem__(self, name: str) -> str:
        "Return 'higher', 'lower' or 'neutral'."
        way = self.get(name)
        if way is not None:
            return way
        bare = _strip_prefixes(name)
        raise OptionError(
            f'It is not declared whether {name!r} is better when it is higher or lower. Declare it: '
            f'`MetricProperties(higher={bare!r})`, or `lower=`, which callbacks take as `comp=`.'
        )

    def get(self, name: str) -> str | None:
        "Return 'higher', 'lower' or 'neutral', or None for an unknown name."
        whole = name.lower()
        own = _strip_prefixes(name)
        exact = self._declared.get(whole, self._declared.get(own))
        if exact is not None:
            return exact
        for pattern, way in (*reversed(self._declared.items()), *_KNOWN):
            if fnmatchcase(own, pattern) or fnmatchcase(whole, pattern):
                return way
        return None

    def higher_is_better(self, name: str) -> bool:
        "Return True if higher values are better. Raises `OptionError` for a neutral metric."
        way = self[name]
        if way != 'neutral':
            return way == 'higher'
        raise OptionError(
            f'{name!r} is neutral: declare it with `MetricProperties(lower={name!r})`.'
        )


def as_comparison(
    comp: Compare | MetricProperties | str | None,  # comparison; None: built-in patterns
    name: str,  # name of the metric
) -> Compare:
    """Return a function `comp(new, old)` that is True if `new` is better. Raises `OptionError`.

    >>> as_comparison('less', 'anything') is np.less, as_comparison(None, 'dice_score') is np.greater
    (True, True)
    """
    if comp is None:
        comp = MetricProperties()
    if isinstance(comp, MetricProperties):
        return np.greater if comp.higher_is_better(name) else np.less
    if callable(comp):
        return comp
    if comp in ('greater', 'less'):
        return np.greater if comp == 'greater' else np.less
    raise OptionError(
        f'comp={comp!r}: pass `greater`, `less`, a function comp(new, old), or MetricProperties.'
    )


def _strip_prefixes(name: str) -> str:
    "Return a metric's name in snake_case, without the loader's name and prefixes of learnkit and torchmetrics."
    last = name.rpartition('/')[2]
    if not last.isupper():
        last = re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', last)
    bare = _PREFIX.sub('', last.lower())
    return _TORCHMETRICS.sub('', bare) or bare
