"""Row 26: training after a load. The state that was loaded, in memory or in its file, is as it was."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import EMA, SGD, Callback, GradientAccumulation
from learnkit.checkpoint.digest import digest
from learnkit.checkpoint.folder import load_state
from tests.faults.run_helpers import checkpointed, make_learner, names, quiet

OPTIONS: dict[str, dict[str, Any]] = {
    'adam': {},
    'momentum': {'opt_func': lambda p, lr: SGD(p, lr, mom=0.9)},
    'lbfgs': {'opt_func': torch.optim.LBFGS},
    'ema': {'cbs': EMA},
    'pending gradients': {'cbs': lambda: GradientAccumulation(6)},
}


def learner(option: str) -> Any:
    given = OPTIONS[option]
    learn = make_learner(
        given['cbs']() if 'cbs' in given else None, **{k: v for k, v in given.items() if k != 'cbs'}
    )
    return quiet(learn)


def states(option: str) -> list[Any]:
    "The checkpoints of a run, as they are in memory."
    kept, learn = list[Any](), learner(option)
    keep = Callback(batch_checkpoint=lambda cb: kept.append(cb.learn.checkpoint_state()))
    learn.fit(2, cbs=keep)
    return kept


@pytest.mark.parametrize('option', OPTIONS)
def test_a_state_in_memory(option: str) -> None:
    state = states(option)[1]
    before = digest(state)
    learn = learner(option)
    learn.fit(2, resume=state)
    learn.fit(1)
    assert digest(state) == before
    other = learner(option)
    other.load_checkpoint_state(state)
    other.fit(1)
    assert digest(state) == before


@pytest.mark.parametrize('option', OPTIONS)
def test_a_state_that_was_taken(option: str) -> None:
    "Later batches change none of those that were copied before."
    kept, learn, digests = list[Any](), learner(option), list[str]()

    def keep(cb: Any) -> None:
        kept.append(cb.learn.checkpoint_state())
        digests.append(digest(kept[-1]))

    learn.fit(2, cbs=Callback(batch_checkpoint=keep))
    assert [digest(state) for state in kept] == digests and len(set(digests)) == 6


def test_a_file(tmp_path: Path) -> None:
    checkpointed(tmp_path, every='2ba', keep_last=None)(EMA).fit(2)
    path = tmp_path / names(tmp_path)[0]
    state, _ = load_state(path)
    before, content = digest(state), sha256(path.read_bytes()).digest()
    for resume in (path, state):
        learn = checkpointed(tmp_path, every='1ba', keep_last=None)(EMA)
        learn.fit(2, resume=resume)
        learn.fit(1)
    assert digest(state) == before and sha256(path.read_bytes()).digest() == content
