"""Validation loaders with an interval and metrics, and the names of loaders."""

import pytest

from learnkit import Evaluator
from learnkit.core.errors import LoaderError, TimeError
from learnkit.core.time import Time
from learnkit.data.evaluator import named_loaders


def test_an_interval_is_in_epochs_unless_it_has_a_unit() -> None:
    found = [Evaluator([], every).every for every in (3, '1h', None, 'fit')]
    assert found == [Time('3ep'), Time('3600sec'), None, 'fit']
    for bad in (0, '-1ba', '5 apples'):
        with pytest.raises(TimeError):
            Evaluator([], bad)
    evaluator = Evaluator([], metrics=[max])
    assert evaluator.as_metrics(list) is evaluator.as_metrics(list)  # converted once


def test_names_of_loaders() -> None:
    assert named_loaders(None) == [] and named_loaders([1]) == [('valid', [1])]
    assert named_loaders({'b': [1], 'a': [2]}) == [('b', [1]), ('a', [2])]
    for bad in ({}, {'train': []}, {' ': []}, {1: []}):
        with pytest.raises(LoaderError):
            named_loaders(bad)
