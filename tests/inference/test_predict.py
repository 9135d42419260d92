"""Compare validation and prediction outside training with direct computation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import (
    Callback,
    CancelBatchException,
    DataLoaders,
    Learner,
    LoaderError,
    TensorLoader,
    mae,
)
from learnkit.core.errors import BatchError
from learnkit.core.model import name_of
from learnkit.testing import RegModel, synth_learner

N = 13  # no multiple of the batch size 4


def points(n: int = N) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randn(n, 2)


def learner(valid: Any, model: nn.Module | None = None, loss: Any = None, **kwargs: Any) -> Learner:
    dls = DataLoaders([points(4)], valid, n_inp=kwargs.pop('n_inp', None))
    learn = Learner(dls, model or nn.Linear(3, 2), loss or nn.MSELoss(), **kwargs)
    learn.logger = print
    learn.remove_cb(learn.progress)
    return learn


@pytest.fixture
def xy() -> tuple[Tensor, Tensor]:
    return points()


# validate


def test_validate_returns_loss_and_metrics_over_all_samples(
    xy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = xy
    learn = learner(TensorLoader(x, y, bs=4), metrics=[mae])
    res = learn.validate()
    pred = learn.model(x)
    expected = [F.mse_loss(pred, y).item(), F.l1_loss(pred, y).item()]
    assert list(res) == pytest.approx(expected, rel=1e-5)
    assert capsys.readouterr().out == '' and learn.history == []


def test_validate_gives_every_named_loaders_values(xy: Any) -> None:
    x, y = xy
    learn = learner({'a': [(x[:4], y[:4]), (x[4:6], y[4:6])], 'b': [(x[6:], y[6:])]}, metrics=[mae])
    of = lambda s: [
        F.mse_loss(learn.model(x[s]), y[s]).item(),
        F.l1_loss(learn.model(x[s]), y[s]).item(),
    ]
    assert list(learn.validate()) == pytest.approx([*of(slice(6)), *of(slice(6, None))], rel=1e-5)
    assert list(learn.validate(2)) == pytest.approx(of(slice(6, None)), rel=1e-5)


def test_validate_leaves_counters_history_and_optimizer_alone() -> None:
    learn = synth_learner(n_train=3)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)

    def state() -> list[Any]:
        rec = learn.recorder
        counters = [learn.train_iter, learn.pct_train, learn.epoch, learn.n_epoch, learn.time]
        return [*counters, len(learn.history), list(rec.losses), list(rec.lrs), list(rec.values)]

    before = state()
    for _ in range(2):
        learn.validate()
        learn.get_preds()
    assert state() == before
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    assert len(learn.history) == 3


# get_preds


def test_dropout_is_off_and_predictions_do_not_move_the_training_order(xy: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.9))
    learn = learner(TensorLoader(*xy, bs=4, shuffle=True), model)
    model.train()
    state = torch.get_rng_state()
    first, second = learn.get_preds()[0], learn.get_preds()[0]
    assert torch.equal(first, second) and torch.allclose(first, model[0](xy[0]), atol=1e-6)
    assert torch.equal(state, torch.get_rng_state()) and model.training and model[1].training


@pytest.mark.parametrize(
    'loss', [nn.MSELoss(), F.mse_loss, nn.L1Loss()], ids=['module', 'function', 'l1']
)
def test_with_loss_gives_one_number_a_sample(loss: Any, xy: Any) -> None:
    x, y = xy
    learn = learner(TensorLoader(x, y, bs=4), loss=loss)
    preds, _targs, losses = learn.get_preds(with_loss=True)
    each = (
        (preds - y).abs().mean(1) if isinstance(loss, nn.L1Loss) else (preds - y).square().mean(1)
    )
    assert losses.shape == (N,) and torch.allclose(losses, each, atol=1e-6)
    assert learn.loss_func is loss and getattr(loss, 'reduction', 'mean') == 'mean'


@pytest.mark.parametrize(
    'loss', [nn.CrossEntropyLoss(), F.cross_entropy, nn.NLLLoss()], ids=name_of
)
def test_losses_of_torch_decode_classes(loss: Any, xy: Any) -> None:
    x, y = xy[0], torch.randint(2, (N,))
    model = nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1))
    learn = learner(TensorLoader(x, y, bs=4), model, loss=loss)
    expected = model(x).argmax(1)
    assert torch.equal(learn.get_preds(with_decoded=True)[2], expected)
    batches = [decoded for _, _, decoded in learn.predict_iter(with_decoded=True)]
    assert torch.equal(torch.cat(batches), expected)
    learn.dls.vocab = ['no', 'yes']
    label, decoded, probs = learn.predict(x[0])
    assert label == learn.dls.vocab[int(expected[0])] and decoded == expected[0]
    assert torch.allclose(probs, model(x[:1])[0].exp(), atol=1e-6)


class TwoInTwoOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.lin(a), self.lin(b)


def test_several_inputs_and_targets(xy: Any) -> None:
    a, b = torch.randn(N, 3), torch.randn(N, 3)
    y, z = torch.randn(N, 2), torch.randn(N, 2)
    loss = lambda pred, y, z: F.mse_loss(pred[0], y) + F.mse_loss(pred[1], z)
    learn = learner(TensorLoader(a, b, y, z, bs=4), TwoInTwoOut(), loss, n_inp=2)
    inputs, preds, targs = learn.get_preds(with_input=True)
    assert torch.equal(inputs[0], a) and torch.equal(inputs[1], b)
    assert torch.equal(targs[0], y) and torch.equal(targs[1], z)
    assert torch.allclose(preds[0], learn.model.lin(a), atol=1e-6)
    assert torch.allclose(preds[1], learn.model.lin(b), atol=1e-6)


def test_no_targets_give_none(xy: Any) -> None:
    x, _ = xy
    learn = learner(TensorLoader(x, bs=4))
    preds, targs = learn.get_preds()
    assert targs is None and torch.allclose(preds, learn.model(x), atol=1e-6)
    inputs, preds, targs = learn.get_preds(dl=[x[:4], x[4:]], with_input=True)
    assert targs is None and torch.equal(inputs, x) and len(preds) == N


class Classes(nn.CrossEntropyLoss):
    def activation(self, out: Tensor) -> Tensor:
        return out.softmax(-1)

    def decodes(self, out: Tensor) -> Tensor:
        return out.argmax(-1)


def test_batches_of_dicts(xy: Any) -> None:
    x, y = xy

    class Named(nn.Linear):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {'logits': super().forward(ids)}

    learn = learner(TensorLoader({'ids': x, 'labels': y}, bs=4), Named(3, 2))
    inputs, preds, targs = learn.get_preds(with_input=True)
    assert torch.allclose(preds, learn.model(x)['logits'], atol=1e-6) and torch.equal(targs, y)
    assert torch.equal(inputs['ids'], x)


def test_the_loss_of_each_sample_when_the_model_only_gives_a_mean(xy: Any) -> None:
    class Own(nn.Linear):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = super().forward(ids)
            return {'logits': logits, 'loss': F.mse_loss(logits, labels)}

    batches = [{'ids': xy[0][:4], 'labels': xy[1][:4]}]
    learn = Learner((batches, batches), Own(3, 2), default_cbs=False)
    with pytest.raises(ValueError, match='loss') as e:
        learn.get_preds(with_loss=True)
    assert 'sample' in str(e.value)


def test_predictions_inside_a_fit(xy: Any) -> None:
    x, y = xy
    got: list[Tensor] = []

    def predict(cb: Any) -> None:
        before = cb.learn.model(x).detach()
        got.extend([cb.learn.get_preds(inner=True)[0], before])

    learn = learner(TensorLoader(x, y, bs=4))
    learn.fit(3, cbs=Callback(after_epoch=predict))
    assert len(got) == 6
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got[::2], got[1::2], strict=True))
    assert learn.train_iter == 3 and len(learn.history) == 3 and learn.phase != 'predict'


def test_a_cancelled_batch_is_left_out(xy: Any) -> None:
    x, y = xy

    def skip(cb: Any) -> None:
        if cb.iter == 1:
            raise CancelBatchException

    preds, targs = learner(TensorLoader(x, y, bs=4)).get_preds(cbs=Callback(before_pred=skip))
    keep = torch.tensor([*range(4), *range(8, N)])
    assert len(preds) == 9 and torch.equal(targs, y[keep])


def test_without_a_validation_loader_an_error_is_raised() -> None:
    learn = Learner([points(4)], nn.Linear(3, 2), nn.MSELoss(), default_cbs=False)
    with pytest.raises(LoaderError, match='validation'):
        learn.get_preds()
    assert learn.get_preds(ds_idx=0)[0].shape == (4, 2)


# predict


def test_one_sample_with_and_without_names_of_classes(xy: Any) -> None:
    valid = TensorLoader(*xy, bs=4)
    learn = learner(valid, nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.9)), Classes())
    before = torch.get_rng_state()
    with torch.no_grad():
        probs = learn.model[0](xy[0][5]).softmax(-1)
    decoded, label, pred = learn.predict(xy[0][5])
    assert torch.allclose(pred, probs, atol=1e-6)
    assert decoded is label
    assert label == probs.argmax()
    assert label.ndim == 0
    learn.dls.vocab = ['cat', 'dog']
    item, name, label, pred = learn.predict(xy[0][5].numpy(), with_input=True)
    assert torch.equal(item, xy[0][5])
    assert name == learn.dls.vocab[probs.argmax()]
    assert torch.allclose(pred, probs)
    assert (
        learn.model.training and torch.equal(before, torch.get_rng_state()) and learn.history == []
    )


def test_one_sample_of_several_classes_at_once(xy: Any) -> None:
    class Several(nn.BCEWithLogitsLoss):
        def activation(self, out: Tensor) -> Tensor:
            return out.sigmoid()

        def decodes(self, out: Tensor) -> Tensor:
            return out > 0.5

    learn = learner(TensorLoader(*xy, bs=4), loss=Several())
    learn.model.weight.data.zero_()
    learn.model.bias.data = torch.tensor([-1.0, 2.0])
    learn.dls.vocab = ['red', 'round']
    names, on, _ = learn.predict(xy[0][0])
    assert names == ['round'] and on.tolist() == [False, True]


def test_one_sample_of_several_inputs_a_dict_or_a_number(xy: Any) -> None:
    a, b = torch.randn(N, 3), torch.randn(N, 3)
    learn = learner(TensorLoader(a, b, *xy, bs=4), TwoInTwoOut(), n_inp=2)
    (i, j), _, _, (p, q) = learn.predict((a[2], b[2]), with_input=True)
    assert torch.equal(i, a[2]) and torch.equal(j, b[2])
    assert torch.allclose(p, learn.model.lin(a[2]), atol=1e-6)
    assert torch.allclose(q, learn.model.lin(b[2]), atol=1e-6)
    learn.dls.n_inp = None
    assert torch.equal(learn.predict((a[2], b[2]))[2][1], q)

    class Named(nn.Linear):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {'logits': super().forward(ids)}

    learn = learner([{'ids': xy[0], 'labels': xy[1]}], Named(3, 2))
    for item in ({'ids': xy[0][1]}, {'ids': xy[0][1], 'labels': xy[1][1]}):
        assert torch.allclose(learn.predict(item)[2], learn.model(xy[0][1])['logits'], atol=1e-6)

    line = synth_learner(model=RegModel().double(), default_cbs=False)
    assert line.predict(0.5)[2].item() == pytest.approx((0.5 * line.model.a + line.model.b).item())


def test_an_invalid_sample_is_refused(xy: Any) -> None:
    learn = learner(TensorLoader(*xy, bs=4))
    with pytest.raises(BatchError, match='object'):
        learn.predict(object())


def test_data_that_make_and_decode_their_own_batches_do_so(xy: Any) -> None:
    class Own(DataLoaders):
        def test_dl(self, items: list[Any], rm_type_tfms: Any = None, num_workers: int = 0) -> Any:
            return [(torch.stack([xy[0][i] for i in items]),)]

        def decode_batch(self, b: Any) -> Any:
            return [(f'item {b[0][0, 0]:.1f}', f'class {b[1][0]}')]

    learn = Learner(Own([xy], [xy], n_inp=1), nn.Linear(3, 2), Classes(), default_cbs=False)
    item, name, label, pred = learn.predict(4, with_input=True)
    assert item == f'item {xy[0][4, 0]:.1f}' and name == f'class {label}'
    assert torch.allclose(pred, learn.model(xy[0][4]).softmax(-1), atol=1e-6)
