# SPDX-License-Identifier: Apache-2.0
"""Functions that suggest a learning rate from the rates and losses of a search."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

Point = tuple[float, float]  # learning rate and loss
Suggestion = tuple[float, Point]  # rate to use, and point of the curve to mark


def valley(lrs: Any, losses: Any, num_it: int) -> Suggestion:
    """Suggest a rate from the middle of the longest decreasing sequence of losses.

    >>> valley([1e-4, 1e-3, 1e-2, 1e-1, 1., 10.], [9., 9., 5., 4., 1., 2.], 6)[0]
    0.001
    """
    lrs = _floats(lrs)
    losses = _floats(losses)
    # length of the longest decreasing sequence that ends at each point
    length = [1] * len(losses)
    start = 0
    end = 0
    for i, loss in enumerate(losses):
        for j in range(i):
            if losses[j] > loss and length[j] >= length[i]:
                length[i] = length[j] + 1
            if length[i] > length[end]:
                start = i - length[i]
                end = i
    third = (end - start) / 3
    i = start + int(third) + int(third / 2)
    return lrs[i], (lrs[i], losses[i])


def slide(
    lrs: Any,
    losses: Any,
    num_it: int,
    lr_diff: int = 15,  # number of rates between the two ends of the interval
    thresh: float = 0.005,  # largest difference of the slopes at the ends that stops the interval
    adjust_value: float = 1.0,  # factor of the suggestion
) -> Suggestion:
    "Suggest the lower end of an interval that slides down until the slopes at its ends agree."
    lrs = _floats(lrs)
    losses = _floats(losses)
    slopes = np.gradient(losses)
    high = len(losses) - 1
    low = max(high - lr_diff, 0)
    best = lrs[low]
    while low >= 0 and abs(slopes[high] - slopes[low]) > thresh:
        best = lrs[low]
        low -= 1
        high -= 1
    lr = best * adjust_value
    return lr, (lr, float(np.interp(math.log10(lr), np.log10(lrs), losses)))


def minimum(lrs: Any, losses: Any, num_it: int) -> Suggestion:
    "Suggest one tenth of the rate with the lowest loss."
    lrs = _floats(lrs)
    losses = _floats(losses)
    i = int(np.argmin(losses))
    return lrs[i] / 10, (lrs[i], losses[i])


def steep(lrs: Any, losses: Any, num_it: int) -> Suggestion:
    "Suggest the rate where the loss falls most steeply over the logarithm of the rate."
    lrs = _floats(lrs)
    losses = _floats(losses)
    i = int(np.argmin(np.diff(losses) / np.diff(np.log(lrs))))
    return lrs[i], (lrs[i], losses[i])


def _floats(values: Any) -> list[float]:
    return values.tolist() if hasattr(values, 'tolist') else [float(v) for v in values]


# a namespace, for completion in notebooks
SuggestionMethod = SimpleNamespace(Valley=valley, Slide=slide, Minimum=minimum, Steep=steep)
