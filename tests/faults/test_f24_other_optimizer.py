"""Row 24: an optimizer that does not match. It is refused with what differs, and nothing has changed."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import Callback, LearnkitError, OptimWrapper, WeightsError
from learnkit.checkpoint.digest import digest
from learnkit.checkpoint.folder import load_state
from tests.faults.fault_helpers import make_learner
from tests.faults.run_helpers import checkpointed, content, names, quiet

# their callbacks keep lists for the test
pytestmark = pytest.mark.filterwarnings('ignore:These attributes changed since the fit began')


def by_layer(model: Any) -> Any:
    return [list(layer.parameters()) for layer in model if list(layer.parameters())]


def without_head(model: Any) -> Any:
    return list(model[:3].parameters())


OTHERS: dict[str, dict[str, Any]] = {
    'another class': {'opt_func': torch.optim.SGD},
    'more groups': {'splitter': by_layer},
    'fewer parameters': {'splitter': without_head},
    'lbfgs': {'opt_func': torch.optim.LBFGS},
}


@pytest.fixture(scope='module')
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('run')
    checkpointed(folder, every='2ba')().fit(1)
    return folder / names(folder)[0]


@pytest.mark.filterwarnings(r'ignore:.*3\.weight, 3\.bias')  # `without_head` leaves them out
@pytest.mark.parametrize('kind', OTHERS)
def test_nothing_is_loaded(kind: str, path: Path, tmp_path: Path) -> None:
    state, steps = load_state(path)[0], list[int]()
    for load in ('file', 'state', 'outside'):
        watcher = Callback(before_batch=lambda cb: steps.append(cb.iter))
        learn = checkpointed(tmp_path)(watcher, **OTHERS[kind])
        learn.create_opt()
        before, groups = content(learn), len(learn.opt.param_groups)
        with pytest.raises(LearnkitError, match=r'ptimizer|param group') as caught:
            if load == 'outside':
                learn.load_checkpoint_state(state)
            else:
                learn.fit(1, resume=path if load == 'file' else state)
        assert isinstance(caught.value, WeightsError) and 'Nothing was loaded' in str(caught.value)
        assert content(learn) == before and not steps and len(learn.opt.param_groups) == groups
        learn.fit(1)
        assert steps.pop() == 1
        steps.clear()


def test_one_that_was_trained_stays_as_it_is(path: Path) -> None:
    "Its own state, too, of a Learner that has been training."
    learn = quiet(make_learner(opt_func=partial(torch.optim.SGD, momentum=0.9)))
    learn.fit(1)
    before, opt = digest(learn.opt.state_dict()), learn.opt
    with pytest.raises(WeightsError):
        learn.fit(1, resume=path)
    assert learn.opt is opt and isinstance(opt, OptimWrapper) and digest(opt.state_dict()) == before
