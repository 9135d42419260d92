"""Two processes on NCCL with a GPU each, or with a shared GPU, compared with one process.

The CPU case checks these tests on machines without a GPU."""

from typing import Any

import pytest
import torch

from learnkit import Learner
from tests.helpers.distributing import make_dls, make_learner, rows, same_rows, weights

pytestmark = pytest.mark.dist

pytest.importorskip('cloudpickle')


def on_gpus(n: int) -> list[pytest.MarkDecorator]:
    return [
        pytest.mark.cuda,
        pytest.mark.skipif(torch.cuda.device_count() < n, reason=f'needs {n} GPUs'),
    ]


def where(*marks_of_cpu: pytest.MarkDecorator) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ('device', 'backend'),
        [
            pytest.param('cpu', None, marks=marks_of_cpu, id='cpu'),
            pytest.param('cuda', None, marks=on_gpus(2), id='nccl'),
            pytest.param('cuda', 'gloo', marks=on_gpus(1), id='one GPU'),
        ],
    )


def make(device: str, bs: int = 8) -> Learner:
    dls = make_dls(101, bs)
    dls.device = torch.device(device)
    return make_learner(dls)


def fit(learn: Learner) -> dict[str, Any]:
    learn.fit(3)
    learn.check_replicas()
    return {'device': str(next(learn.model.parameters()).device), 'size': learn.world.size}


@where()
def test_two_equal_one_with_the_bigger_batch(device: str, backend: str | None) -> None:
    one, two = make(device, 16), make(device)
    fit(one)
    results = two.launch(fit, 2, strategy='ddp', backend=backend)
    assert results['size'] == 2 and results['device'].startswith(device)
    torch.testing.assert_close(weights(two).cpu(), weights(one).cpu(), rtol=0, atol=1e-10)
    assert same_rows(rows(two), rows(one))


@where(pytest.mark.full)
def test_shards_equal_replicas(device: str, backend: str | None) -> None:
    if backend == 'gloo':
        pytest.skip('gloo cannot shard tensors of a GPU')
    whole, parts = make(device), make(device)
    whole.launch(fit, 2, strategy='ddp', backend=backend)
    parts.launch(fit, 2, strategy='fsdp', backend=backend)
    torch.testing.assert_close(weights(parts).cpu(), weights(whole).cpu(), rtol=0, atol=1e-10)
