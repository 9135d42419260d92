"""The seams of the loop: each is taken, changes what a plain loop would compute, and is given back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import Callback, Learner
from learnkit.core.errors import FitError
from learnkit.engine.positions import Source
from learnkit.engine.seams import SEAMS, Seams, train_whole_batch
from learnkit.testing import synth_learner

BATCHES = [
    (torch.full((4, 2), float(i)), torch.arange(4.0)[:, None] * (i + 1)) for i in range(1, 4)
]


def make_learner(**kwargs: Any) -> Learner:
    torch.manual_seed(0)
    learn = Learner(
        BATCHES, nn.Linear(2, 1), F.mse_loss, opt_func=torch.optim.SGD, lr=0.01, **kwargs
    )
    return learn


def fit(learn: Learner, n: int = 1) -> Tensor:
    with learn.no_bar():
        learn.fit(n)
    return learn.model.weight.detach().clone()


def train_by_hand(
    batches: Any = BATCHES, scale_pred: float = 1.0, scale_loss: float = 1.0, steps: int = 1
) -> Tensor:
    "Return the weight after a plain loop."
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches:
        loss = F.mse_loss(scale_pred * model(x), y) * scale_loss
        loss.backward()
        for _ in range(steps):
            opt.step()
        opt.zero_grad()
    return model.weight.detach().clone()


class Backwards(Source):
    "One epoch, whose batches come in reverse order."

    def epochs(self, learn: Any) -> Iterator[int]:
        yield 7

    def batches(self, learn: Any) -> tuple[range, Iterator[Any]]:
        learn.n_iter = 3
        return range(3), iter(BATCHES[::-1])


def double_pred(learn: Any) -> Tensor:
    return 2 * learn.model(*learn.xb)


def half_loss(learn: Any, output: Tensor) -> Tensor:
    return learn.loss_func(output, *learn.yb) / 2


def step_twice(learn: Any) -> None:
    learn.opt.step()
    learn.opt.step()


@pytest.mark.parametrize(
    ('function', 'by_hand'),
    [
        ({'model': double_pred}, {'scale_pred': 2.0}),
        ({'loss': half_loss}, {'scale_loss': 0.5}),
        ({'step': step_twice}, {'steps': 2}),
    ],
)
def test_a_seam_changes_what_a_plain_loop_computes(
    function: dict[str, Any], by_hand: dict[str, Any]
) -> None:
    learn = make_learner()
    with learn.seams.taken('Mine', **function):
        assert list(learn.seams.holders) == list(function)
        torch.testing.assert_close(fit(learn), train_by_hand(**by_hand), rtol=0, atol=0)
    assert not learn.seams.holders
    again = make_learner()
    torch.testing.assert_close(fit(again), train_by_hand(), rtol=0, atol=0)


def test_the_source_gives_epochs_and_batches() -> None:
    seen: list[tuple[int, int]] = []
    learn = make_learner(cbs=Callback(before_batch=lambda cb: seen.append((cb.epoch, cb.iter))))
    with learn.seams.taken('Backwards', source=Backwards()):
        weight = fit(learn, 5)
    assert seen == [(7, 0), (7, 1), (7, 2)]
    torch.testing.assert_close(weight, train_by_hand(BATCHES[::-1]), rtol=0, atol=0)


def test_a_training_batch_is_one_function() -> None:
    learn = make_learner()
    calls: list[int] = []

    def train(learn: Any) -> None:
        calls.append(learn.iter)
        train_whole_batch(learn)

    with learn.seams.taken('Mine', batch=train):
        torch.testing.assert_close(fit(learn), train_by_hand(), rtol=0, atol=0)
    assert calls == [0, 1, 2]


def test_two_features_that_want_one_seam_are_refused_before_the_first_batch() -> None:
    learn = make_learner(microbatch=2)
    before = learn.model.weight.detach().clone()
    with (
        learn.seams.taken('Mine', batch=train_whole_batch, step=step_twice),
        pytest.raises(FitError, match=r'microbatch and Mine both take the seam `batch`'),
    ):
        fit(learn)
    assert torch.equal(learn.model.weight, before)
    assert not learn.seams.holders and learn.seams.batch is None


@pytest.mark.parametrize('fails', [False, True])
def test_seams_are_given_back_at_the_end_of_a_fit(fails: bool) -> None:
    def look(cb: Any) -> None:
        assert cb.learn.seams.holders == {'source': 'checkpoints', 'batch': 'microbatch'}
        if fails:
            raise ValueError

    learn = make_learner(microbatch=2, cbs=Callback(after_batch=look))
    default = Seams()
    try:
        fit(learn)
    except ValueError:
        assert fails
    assert not learn.seams.holders
    assert all(
        getattr(learn.seams, name) is getattr(default, name) for name in SEAMS if name != 'source'
    )
    assert type(learn.seams.source) is Source


def test_who_holds_a_seam_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    learn = synth_learner(microbatch=4)
    learn.fit(1, cbs=Callback(before_train=lambda cb: cb.learn.show_training_loop()))
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split(maxsplit=3) for line in lines if line.startswith('seam ')]
    holders = {name: holder for _, name, holder, _ in shown}
    assert [*holders] == [*SEAMS]
    assert holders['batch'] == 'microbatch' and holders['model'] == '-'
    assert [line[3] for line in shown] == [*SEAMS.values()]


def test_a_loop_without_default_callbacks_trains() -> None:
    learn = make_learner(default_cbs=False)
    learn.fit(2)
    torch.testing.assert_close(
        learn.model.weight.detach(), train_by_hand(BATCHES * 2), rtol=0, atol=0
    )
    assert (learn.train_iter, learn.time.ba, learn.time.ep) == (6, 6, 2)


def test_a_wrapper_is_called_in_training_and_refuses_another_call_of_the_model() -> None:
    learn = make_learner()
    doubled = nn.Sequential(learn.model, Doubled())
    learn.seams.wrap_model(doubled)
    torch.testing.assert_close(fit(learn), train_by_hand(scale_pred=2.0))
    assert learn.validate(dl=BATCHES)[0] == pytest.approx(
        sum(F.mse_loss(learn.model(x), y).item() for x, y in BATCHES) / len(BATCHES)
    )
    with (
        learn.seams.taken('Mine', model=double_pred),
        pytest.raises(FitError, match=r'Mine and Sequential both take the seam `model`'),
    ):
        learn.seams.wrap_model(doubled)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x
