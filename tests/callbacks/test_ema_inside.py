"""Loads, failures and pauses while the model contains the moving average leave the right weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import Callback, Learner
from learnkit.callbacks.ema import EMA
from tests.helpers.comparing import same
from tests.helpers.learners import quiet_learner


def learner(path: Path | str = '.', *cbs: Any) -> Learner:
    gen = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 3, generator=gen), torch.randn(8, 2, generator=gen)) for _ in range(4)
    ]
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 2))
    dls = (batches, batches[:3])
    return quiet_learner(
        dls, model, F.mse_loss, lr=0.1, cbs=[EMA(0.9), *cbs], path=path, has_bar=False
    )


def state(learn: Learner) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in learn.model.state_dict().items()}


@pytest.mark.parametrize('event', ['before_batch', 'after_validate'])
def test_weights_that_are_loaded_in_an_evaluation_stay(event: str, tmp_path: Path) -> None:
    learn = learner(tmp_path)
    learn.fit(1)
    saved = state(learn)
    learn.save('w', with_opt=False)

    def load(cb: Any) -> None:
        if not cb.training:
            cb.learn.load('w', with_opt=False)

    learn.fit(1, cbs=Callback(**{event: load}))
    assert same(state(learn), saved) and not learn.ema.has_begun


@pytest.mark.parametrize('event', ['before_batch', 'before_step'])
def test_a_nested_evaluation_that_fails_leaves_the_batch_its_weights(event: str) -> None:
    plain, learn = learner(), learner()

    def fail(cb: Any) -> None:
        raise RuntimeError('no such file')

    def evaluate(cb: Any) -> None:
        if not cb.training or cb.learn.run.depth > 1:
            return
        before = state(cb.learn)
        with pytest.raises(RuntimeError, match='no such file'):
            cb.learn.validate(cbs=Callback(after_loss=fail))
        assert same(state(cb.learn), before)

    plain.fit(2)
    learn.fit(2, cbs=Callback(**{event: evaluate}))
    assert learn.ema._raw is None and learn.ema._n_updates == plain.ema._n_updates


# a paused stream


def use(learn: Learner) -> Any:
    stream = learn.predict_iter()
    next(stream)
    return stream


def find(learn: Learner, path: Path) -> dict[str, Tensor]:
    learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None)
    return state(learn)


def loaded(learn: Learner, path: Path) -> dict[str, Tensor]:
    learn.load('own', with_opt=False)
    return state(learn)


@pytest.mark.parametrize('act', [find, loaded])
def test_a_paused_stream_leaves_the_model_its_own_weights(
    act: Callable[..., Any], tmp_path: Path
) -> None:
    learn = learner(tmp_path)
    learn.fit(1)
    learn.save('own', with_opt=False)
    own = state(learn)
    stream = use(learn)
    assert same(act(learn, tmp_path), own) and same(state(learn), own)
    stream.close()
    assert same(state(learn), own)


def test_a_stream_is_of_the_average_from_its_first_batch_to_its_last() -> None:
    learn = learner()
    learn.fit(2)
    expected, own = learn.get_preds()[0], state(learn)
    with learn.ema.applied():
        assert not same(state(learn), own)
    got = []
    for preds, _ in learn.predict_iter():
        got.append(preds)
        assert same(state(learn), own)
    torch.testing.assert_close(torch.cat(got), expected)
