"""Data frames, columns, arrays and lists as tensors with one row a sample."""

import numpy as np
import pytest
import torch

from learnkit import DataLoaders, TensorLoader
from learnkit.core.errors import LoaderError

FRAME = {'a': [0.5, 1.5, 2.5, 3.5], 'b': [1.0, 0.0, 1.0, 0.0]}


def test_data_frames_columns_and_lists() -> None:
    pandas = pytest.importorskip('pandas')
    frame = pandas.DataFrame(FRAME)
    y = pandas.Series([0, 1, 1, 0], index=[7, 3, 5, 1])
    expected = torch.tensor(list(FRAME.values()), dtype=torch.float64).T
    parts = {'day': (frame[:2], y[:2]), 'night': (frame[2:], y[2:])}
    dls = DataLoaders.from_tensors((frame, y), parts, bs=4, shuffle=False)
    ((x, t),) = dls.train
    assert torch.equal(x, expected)
    assert x.is_contiguous()
    assert t.tolist() == [0, 1, 1, 0]
    assert t.dtype == torch.int64
    assert [x.tolist() for x, _ in dls['night']] == [expected[2:].tolist()]
    one_set = DataLoaders.from_tensors({'x': frame, 'y': y}, {'x': frame, 'y': y}, bs=4)
    assert sorted(next(iter(one_set.valid))) == ['x', 'y']
    ((x, t),) = TensorLoader([[1, 2.5], [3, 4]], [True, False])
    assert x.tolist() == [[1, 2.5], [3, 4]] and x.dtype == torch.float32 and t.dtype == torch.bool
    assert TensorLoader(frame.astype('float32')).tensors[0].dtype == torch.float32


def test_data_that_is_not_a_table_of_numbers() -> None:
    pandas = pytest.importorskip('pandas')
    frame = pandas.DataFrame(
        {**FRAME, 'kind': ['cat', 'dog', 'cat', 'cow'], 'when': pandas.to_datetime([0, 1, 2, 3])}
    )
    for bad, expected_text in (
        (frame, r"of the columns 'kind' \(.+\), 'when' \(datetime64.*\): encode classes"),
        (frame['kind'], r'`pandas.factorize\(y\)\[0\]`'),
        (['a', 'b'], r'encode classes'),
        (np.array(['a', None], dtype=object), r'object.*encode'),
        ([[1, 2], [3]], 'rows that differ in length'),
        ([torch.zeros(1), torch.zeros(2)], 'different shapes'),
        (5.0, 'no rows'),
        ([], 'are empty'),
    ):
        with pytest.raises(LoaderError, match=expected_text):
            TensorLoader(bad)
    assert TensorLoader(pandas.factorize(frame['kind'])[0]).tensors[0].tolist() == [0, 1, 0, 2]
