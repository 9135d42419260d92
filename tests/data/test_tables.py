"""Samples of vectors, signals, words and dicts as tables."""

from typing import Any

import torch

from learnkit import DataLoaders


def loaders(x: Any, y: Any) -> DataLoaders:
    return DataLoaders.from_tensors((x, y), bs=4, shuffle=False)


def test_vectors_are_a_table() -> None:
    x, y = torch.arange(6.0).view(3, 2) / 3, torch.tensor([1, 0, 1])
    dls = loaders(x, y)
    dls.vocab = ['no', 'yes']
    table = dls.show_batch(max_n=2)
    expected = {'x[0]': x[:2, 0].tolist(), 'x[1]': x[:2, 1].tolist(), 'target': ['yes', 'no']}
    assert table.columns == expected
    assert repr(table).splitlines() == [
        '  x[0]    x[1]  target',
        '     0  0.3333     yes',
        '0.6667       1      no',
    ]
    assert len(table) == 2


def test_long_vectors_signals_words_and_dicts() -> None:
    long = loaders(torch.rand(3, 30), torch.zeros(3)).show_batch()
    assert list(long.columns) == [*[f'x[{i}]' for i in range(8)], '...', 'target']
    assert long.columns['...'] == ['22 more'] * 3
    signals = torch.rand(3, 1, 30)
    expected = signals[:, 0, 3].tolist()
    assert loaders(signals, torch.zeros(3)).show_batch().columns['x[3]'] == expected
    words = DataLoaders([(['some words', 'others'], torch.tensor([1, 0]))]).show_batch(max_n=1)
    assert words.columns == {'x': ['some words'], 'target': [1]}
    batch = {
        'ids': torch.tensor([[1, 2], [3, 4]]),
        'age': torch.tensor([5, 6]),
        'labels': torch.tensor([0, 1]),
    }
    expected = {'ids[0]': [1, 3], 'ids[1]': [2, 4], 'age': [5, 6], 'target': [0, 1]}
    assert DataLoaders([batch]).show_batch().columns == expected
    videos = loaders(torch.rand(3, 2, 3, 4, 5), torch.zeros(3)).show_batch()
    assert videos.columns['x'] == ['Tensor[2, 3, 4, 5] float32'] * 3
