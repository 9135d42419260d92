"""Tensors whose values stay in a file."""

import numpy as np
import torch
from torch import Tensor

from learnkit.core.file_tensor import FileTensor, read_values
from learnkit.core.plain import is_dense


def test_each_clone_reads_the_values_again() -> None:
    reads: list[Tensor] = []

    def read() -> Tensor:
        reads.append(torch.arange(6.0).view(2, 3))
        return reads[-1]

    t = FileTensor.make(torch.empty(2, 3, device='meta'), read)
    assert (t.shape, t.dtype, reads) == ((2, 3), torch.float32, [])
    assert isinstance(t, Tensor) and is_dense(t) and not t.is_meta
    first, second = t.clone(), read_values(t)
    assert first is reads[0] and second is reads[1]
    assert np.array_equal(t.numpy(), [[0, 1, 2], [3, 4, 5]]) and len(reads) == 3


def test_another_tensor_is_returned_as_it_is() -> None:
    t = torch.ones(2)
    assert read_values(t) is t
