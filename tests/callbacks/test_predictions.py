"""Callbacks that fetch predictions in a fit, collect data, and sample with dropout."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, Learner, TensorLoader, mae
from learnkit.callbacks.predictions import (
    CollectDataCallback,
    FetchPredsCallback,
    MCDropoutCallback,
)
from learnkit.core.errors import CancelEpochException, CancelFitException
from tests.helpers.learners import quiet_learner

X, Y = torch.linspace(-1, 1, 28).view(14, 2), torch.linspace(0, 1, 14)[:, None]


def make(model: nn.Module | None = None, **kwargs: Any) -> Learner:
    torch.manual_seed(3)
    if model is None:
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    train = TensorLoader(X, Y, bs=4, shuffle=True)
    dls = DataLoaders(train, kwargs.pop('valid', TensorLoader(X, Y, bs=4)))
    return quiet_learner(
        dls, model, nn.MSELoss(), lr=0.1, has_bar=False, **{'metrics': mae, **kwargs}
    )


def training(learn: Learner) -> list[Any]:
    "Return weights, losses, rows, counters and generator states after a fit."
    rows = [{k: v for k, v in row.items() if k != 'time'} for row in learn.history]
    return [
        {k: v.tolist() for k, v in learn.model.state_dict().items()},
        list(learn.recorder.losses),
        rows,
        learn.train_iter,
        learn.epoch,
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
        [m.training for m in learn.model.modules()],
    ]


# FetchPredsCallback


def test_a_fit_is_the_same_to_the_bit_with_and_without_fetching() -> None:
    alone, fetching = make(), make(cbs=FetchPredsCallback())
    random.seed(0), np.random.seed(0), torch.manual_seed(1)
    alone.fit(3)
    expected = training(alone)
    random.seed(0), np.random.seed(0), torch.manual_seed(1)
    fetching.fit(3)
    assert training(fetching) == expected


def test_what_is_fetched_is_what_the_model_predicts_then() -> None:
    got, expected = [], []

    class Keep(Callback):
        order = 60

        def after_epoch(self) -> None:
            got.append(self.fetch_preds.preds)
            expected.append(
                self.learn.get_preds(ds_idx=0, with_input=True, with_decoded=True, inner=True)
            )

    make(cbs=[FetchPredsCallback(ds_idx=0, with_input=True, with_decoded=True), Keep()]).fit(2)
    for (x, pred, y, dec), same in zip(got, expected, strict=True):
        assert torch.equal(x, X)
        assert torch.equal(y, Y)
        assert torch.equal(pred, same[1])
        assert torch.equal(dec, pred)
    assert not torch.equal(got[0][1], got[1][1])


def test_a_callback_left_out_of_the_fetch_receives_no_event_of_it() -> None:
    class Count(Callback):
        def __init__(self) -> None:
            self.events_seen: list[str] = []

        def before_batch(self) -> None:
            self.events_seen.append(self.phase)

        def after_validate(self) -> None:
            self.events_seen.append('after_validate')

    class Marked(Count):
        remove_on_fetch = True

    class AfterDropout(Count):
        order, remove_on_fetch = 70, True

    class Named(Count):
        pass

    class Other(Count):
        pass

    marked, later, named, other = Marked(), AfterDropout(), Named(), Other()
    learn = make(cbs=[FetchPredsCallback(cbs=named), marked, later, named, other])
    learn.fit(2)
    expected = [*['train'] * 4, *['valid'] * 4, 'after_validate'] * 2
    assert marked.events_seen == later.events_seen == named.events_seen == expected
    fetched = [*['predict'] * 4, 'after_validate']
    epoch = [*['train'] * 4, *['valid'] * 4, *fetched, 'after_validate']
    assert other.events_seen == epoch * 2
    for cb in (marked, later, named, learn.fetch_preds):
        assert cb.learn is learn and cb in learn.cbs


def test_with_several_loaders_it_predicts_once_when_all_are_measured() -> None:
    valid = {'day': TensorLoader(X, Y, bs=4), 'night': TensorLoader(X[:5], Y[:5], bs=4)}
    seen: list[str] = []

    def note(cb: Any) -> None:
        seen.append('predict' if cb.learn.phase == 'predict' else cb.learn.dl_name)

    learn = make(valid=valid, cbs=[FetchPredsCallback(), Callback(before_validate=note)])
    learn.fit(2)
    assert seen == ['day', 'night', 'predict'] * 2
    assert torch.equal(learn.fetch_preds.preds[0], learn.get_preds()[0])
    seen.clear()
    learn.validate(), learn.validate(dl='night')
    assert seen == ['day', 'night', 'predict', 'valid', 'predict']


# CollectDataCallback


def test_collected_batches_in_order_with_predictions_and_losses() -> None:
    collect = CollectDataCallback()
    learn = make(nn.Linear(2, 1), cbs=collect)
    learn.fit(2)
    assert len(collect.data) == 2 * (4 + 4)
    assert sorted(torch.cat([d[0][0] for d in collect.data[:4]])[:, 0].tolist()) == X[:, 0].tolist()
    for xb, yb, pred, loss in collect.data:
        assert len(xb) == len(yb) == 1 and not pred.requires_grad
        assert loss.item() == pytest.approx((pred - yb[0]).square().mean().item(), rel=1e-5)
    learn.validate()
    assert torch.equal(torch.cat([d[0][0] for d in collect.data]), X) and len(collect.data) == 4


# MCDropoutCallback

KINDS: dict[str, Any] = {
    'Dropout': (nn.Dropout(0.5), (4, 6)),
    'AlphaDropout': (nn.AlphaDropout(0.5), (4, 6)),
    'LSTM': (nn.LSTM(6, 3, num_layers=2, dropout=0.5, batch_first=True), (4, 5, 6)),
    'TransformerEncoderLayer': (
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True),
        (4, 5, 6),
    ),
    'MultiheadAttention': (nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True), (4, 5, 6)),
}


class First(nn.Module):
    "Returns the first output of a module."

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        out = (
            self.module(x, x, x)
            if isinstance(self.module, nn.MultiheadAttention)
            else self.module(x)
        )
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize('kind', KINDS)
def test_every_kind_of_dropout_is_on_and_off_again(kind: str) -> None:
    module, shape = KINDS[kind]
    x = torch.randn(shape)
    learn = Learner(([x], [x]), First(module))
    learn.remove_cb(learn.progress)
    one, two = (learn.get_preds(cbs=MCDropoutCallback())[0] for _ in range(2))
    assert not torch.equal(one, two)
    assert torch.equal(learn.get_preds()[0], learn.get_preds()[0])
    assert all(m.training for m in learn.model.modules())  # as they were made


def test_normalisation_stays_in_evaluation_and_the_modes_are_restored() -> None:
    learn = make()
    learn.model.eval()
    learn.model[0].train()
    before = {k: v.clone() for k, v in learn.model.state_dict().items()}
    learn.get_preds(cbs=MCDropoutCallback())
    assert all(torch.equal(before[k], v) for k, v in learn.model.state_dict().items())
    assert [m.training for m in learn.model.modules()] == [False, True, False, False, False]


def test_samples_differ_and_a_seed_repeats_them() -> None:
    learn = make()

    def samples(cbs: Any) -> list[Tensor]:
        torch.manual_seed(5)
        state, res = torch.get_rng_state(), [learn.get_preds(cbs=cbs())[0] for _ in range(3)]
        assert cbs is MCDropoutCallback or torch.equal(state, torch.get_rng_state())
        return res

    fixed, free = samples(partial(lambda cb: cb, MCDropoutCallback())), samples(MCDropoutCallback)
    for got in (fixed, free):
        assert not torch.equal(got[0], got[1]) and not torch.equal(got[1], got[2])
    assert all(map(torch.equal, free, samples(MCDropoutCallback)))
    torch.manual_seed(5)
    # a class does as an instance does
    assert torch.equal(learn.get_preds(cbs=MCDropoutCallback)[0], free[0])


def test_a_fit_with_dropout_on_in_validation_trains_as_without() -> None:
    alone, noisy = make(), make()
    torch.manual_seed(1)
    alone.fit(2)
    torch.manual_seed(1)
    cb = MCDropoutCallback()
    torch.manual_seed(1)
    noisy.fit(2, cbs=cb)
    weights = [
        torch.equal(a, b)
        for a, b in zip(alone.model.parameters(), noisy.model.parameters(), strict=True)
    ]
    assert all(weights) and alone.history[-1]['valid_loss'] != noisy.history[-1]['valid_loss']


@pytest.mark.parametrize('level', [CancelEpochException, CancelFitException])
def test_an_evaluation_that_was_cancelled_leaves_dropout_off_and_the_next_one_has_it_on(
    level: Any,
) -> None:
    armed, on = [True], []

    def stop(cb: Any) -> None:
        if not cb.training and armed:
            armed.clear()
            raise level

    def look(cb: Any) -> None:
        if not cb.training:
            on.append(cb.learn.model[2].training)

    learn = make(cbs=MCDropoutCallback())
    learn.fit(1, cbs=Callback(before_pred=stop))
    assert not any(m.training for m in learn.model.modules())
    armed.append(True)
    learn.add_cb(Callback(before_pred=look))
    learn.fit(2, cbs=Callback(before_pred=stop))
    assert on and all(on) and not learn.model[2].training
    on.clear()
    learn.validate()
    assert on == [True] * 4
