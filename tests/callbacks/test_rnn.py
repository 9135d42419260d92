"""Recurrent models: several outputs, their penalties, and the reset of the hidden state."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import Callback, Learner
from learnkit.callbacks.rnn import ModelResetter, RNNCallback, RNNRegularizer, rnn_cbs
from learnkit.core.errors import ModelError, OptionError
from tests.helpers.learners import bare_learner


class Recurrent(nn.Module):
    "Returns the output, and lists of raw and dropped-out activations per layer, as AWD-LSTM does."

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.rnn, self.out = nn.GRU(3, 4, batch_first=True).double(), nn.Linear(4, 2).double()
        self.resets: list[str] = []

    def forward(self, x: Tensor) -> Any:
        raw, _ = self.rnn(x)
        return self.out(raw * 0.5), [x, raw], [x, raw * 0.5]

    def reset(self) -> None:
        self.resets.append('train' if self.training else 'eval')


def batches(n: int = 3, bs: int = 2, length: int = 5) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    rand = partial(torch.randn, generator=gen, dtype=torch.float64)
    return [(rand(bs, length, 3), rand(bs, length, 2)) for _ in range(n)]


def learner(bs: Any, model: nn.Module, *cbs: Any) -> Learner:
    return bare_learner(
        (bs, bs[:1]),
        model,
        F.mse_loss,
        opt_func=torch.optim.SGD,
        lr=0.1,
        cbs=cbs,
        recorder=None,
    )


def plain(bs: Any, alpha: float, beta: float) -> nn.Module:
    model = Recurrent()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in bs:
        pred, raw, out = model(x)
        loss = F.mse_loss(pred, y) + alpha * (out[-1].float() ** 2).mean()
        steps = raw[-1][:, 1:] - raw[-1][:, :-1]
        if steps.numel():
            loss = loss + beta * (steps.float() ** 2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    return model


@pytest.mark.parametrize(
    ('alpha', 'beta', 'bs', 'length'),
    [(0.0, 0.0, 2, 5), (2.0, 0.0, 2, 5), (0.0, 1.0, 2, 5), (2.0, 1.0, 2, 1)],
)
def test_the_weights_match_a_plain_loop(alpha: float, beta: float, bs: int, length: int) -> None:
    data, reported = batches(bs=bs, length=length), []
    look = Callback(after_loss=lambda cb: reported.append((cb.loss, F.mse_loss(cb.pred, cb.y))))
    learn = learner(data, Recurrent(), look, *rnn_cbs(alpha, beta))
    learn.fit(1)
    for p, q in zip(learn.model.parameters(), plain(data, alpha, beta).parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-9)
    assert len(reported) == 4 and all(torch.equal(a, b) for a, b in reported)


def test_the_loss_gets_the_output_and_the_callback_the_rest() -> None:
    seen: list[Any] = []
    look = Callback(after_loss=lambda cb: seen.append((cb.pred.shape, cb.rnn.raw_out, cb.rnn.out)))
    learn = learner(batches(1), Recurrent(), RNNCallback)
    learn.fit(1, cbs=look)
    for shape, raw, out in seen:
        assert shape == (2, 5, 2)
        assert raw.shape == out.shape == (2, 5, 4)
        assert torch.equal(raw * 0.5, out)
    assert len(seen) == 2 and learn.rnn.raw_out is None and learn.rnn.out is None
    preds, _ = learn.get_preds()
    assert preds.shape == (2, 5, 2)


def test_models_that_are_not_recurrent() -> None:
    def check(model: nn.Module) -> None:
        learner(
            [(torch.randn(4, 3), torch.randn(4, 2))] * 2,
            model,
            ModelResetter,
            RNNCallback,
            RNNRegularizer,
        ).fit(1)

    check(nn.Linear(3, 2))

    class Two(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    with pytest.raises(ModelError, match=r'Two returned \(Tensor\[4, 2\]'):
        check(Two(3, 2))
    learn = learner([(torch.randn(4, 3), torch.randn(4, 2))], nn.Linear(3, 2), *rnn_cbs(alpha=1.0))
    with pytest.raises(ModelError, match='no activations'):
        learn.fit(1)


def test_what_is_missing_or_wrong_is_reported_before_training() -> None:
    with pytest.raises(OptionError, match='rnn_cbs'):
        learner(batches(), Recurrent(), RNNRegularizer(alpha=1.0)).fit(1)
    assert [type(cb) for cb in rnn_cbs()] == [ModelResetter, RNNCallback]
