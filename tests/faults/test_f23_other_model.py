"""Row 23: a model with other keys, shapes or dtypes. All differences are listed, and no parameter has changed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from learnkit import Callback, WeightsError
from learnkit.checkpoint.folder import load_state
from tests.faults.fault_helpers import make_model
from tests.faults.run_helpers import checkpointed, content, names


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))


def named() -> nn.Module:
    model = make_model()
    # it is a Sequential
    return nn.ModuleDict({'body': model[:3], 'head': model[3]})  # type: ignore[index]


def with_more() -> nn.Module:
    return nn.Sequential(*make_model().children(), nn.Linear(1, 1))


def of_doubles() -> nn.Module:
    return make_model().double()


# every line that has to be told, and how many there are of the model
MODELS: dict[Callable[[], nn.Module], tuple[int, list[str]]] = {
    wider: (
        7,
        [
            'shape: 0.weight is [6, 3], in the file [5, 3]',
            'shape: 1.running_var is [6], in the file [5]',
            'shape: 3.weight is [1, 6], in the file [1, 5]',
        ],
    ),
    named: (
        18,
        ['missing: body.0.weight [5, 3]', 'missing: head.bias [1]', 'unexpected: 3.bias [1]'],
    ),
    with_more: (2, ['missing: 4.weight [1, 1]', 'missing: 4.bias [1]']),
    of_doubles: (
        8,
        ['dtype: 0.weight is float64, in the file float32', 'dtype: 1.running_mean is float64'],
    ),
}


@pytest.fixture(scope='module')
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('run')
    checkpointed(folder, every='2ba')().fit(1)
    return folder / names(folder)[0]


@pytest.mark.parametrize('model', MODELS, ids=lambda f: f.__name__)
def test_nothing_is_loaded(model: Callable[[], nn.Module], path: Path, tmp_path: Path) -> None:
    n, expected_lines = MODELS[model]
    state, trained = load_state(path)[0], list[int]()
    for load in ('file', 'state', 'outside'):
        watcher = Callback(before_batch=lambda cb: trained.append(cb.iter))
        learn = checkpointed(tmp_path)(watcher, model=model())
        learn.create_opt()
        before = content(learn)
        with pytest.raises(WeightsError) as caught:
            if load == 'outside':
                learn.load_checkpoint_state(state)
            else:
                learn.fit(1, resume=path if load == 'file' else state)
        text = str(caught.value)
        lines = text.split('\n  ')[1:]
        assert len([line for line in lines if 'optimizer' not in line]) >= n, text
        assert all(any(line.startswith(start) for line in lines) for start in expected_lines), text
        assert content(learn) == before and not trained and learn.opt.n_steps == 0
        assert (str(path) in text) == (load == 'file')
