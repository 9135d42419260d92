"""What callbacks that users wrote for fastai and Composer rely on: one statement a behavior.

The behaviors, and the classes in which they were seen, are in tests/peers/wild_sources.py."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import nn
from torch.nn import functional as F

from learnkit import (
    SGD,
    Callback,
    CancelBatchException,
    CancelValidException,
    Learner,
    ValueMetric,
)
from learnkit.interop import from_composer
from tests.helpers.learners import quiet_learner

X = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
Loss = Callable[..., torch.Tensor]


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(X[i : i + 4].clone(), Y[i : i + 4].clone()) for i in range(0, 16, 4)]


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def make_learner(*cbs: Any, model: nn.Module | None = None, **kwargs: Any) -> Learner:
    "Return a Learner with 3 training batches and 1 validation batch of 4 rows."
    batches = make_batches()
    options = {'loss_func': F.cross_entropy, 'lr': 0.1, 'opt_func': SGD, **kwargs}
    dls = kwargs.pop('dls', None) or (batches[:3], batches[3:])
    options.pop('dls', None)
    return quiet_learner(dls, model or make_model(), cbs=list(cbs), **options)


def train_by_hand(
    loss_of: Loss, model: Any = None, after_step: Callable[[Any], Any] = noop
) -> nn.Module:
    "Train an epoch with SGD in plain torch; `loss_of(model, x, y)`."
    model = model or make_model()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in make_batches()[:3]:
        opt.zero_grad()
        loss_of(model, x, y).backward()
        opt.step()
        after_step(model)
    return model


def plain_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def assert_same(learn: Learner, expected: nn.Module) -> None:
    found = list(learn.model.parameters())
    torch.testing.assert_close(found, list(expected.parameters()), rtol=1e-6, atol=1e-7)


# -- fastai ----------------------------------------------------------------------------------------


def test_loss_function_of_a_callback() -> None:
    class Own(Callback):
        def before_fit(self) -> None:
            self.old, self.learn.loss_func = self.learn.loss_func, self.measure

        def measure(self, pred: torch.Tensor, *yb: torch.Tensor) -> torch.Tensor:
            return self.old(pred, *yb) + pred.pow(2).mean() * self.training

        def after_fit(self) -> None:
            self.learn.loss_func = self.old

    learn = make_learner(Own())
    learn.fit(1)
    expected = train_by_hand(lambda m, x, y: plain_loss(m, x, y) + m(x).pow(2).mean())
    assert_same(learn, expected)
    assert learn.loss_func is F.cross_entropy
    assert learn.history[-1]['valid_loss'] == pytest.approx(
        plain_loss(expected, X[12:], Y[12:]).item()
    )


def test_batch_of_another_shape() -> None:
    class Twice(Callback):
        def before_batch(self) -> None:
            self.learn.xb = (torch.cat([self.x, -self.x]),)
            self.learn.yb = (self.y.repeat(2),)

    learn = make_learner(Twice())
    learn.fit(1)
    loss = lambda m, x, y: plain_loss(m, torch.cat([x, -x]), y.repeat(2))
    assert_same(learn, train_by_hand(loss))


def test_targets_changed_in_place() -> None:
    class Mask(Callback):
        def before_batch(self) -> None:
            self.y[:2] = -100

    learn = make_learner(Mask())
    learn.fit(1)
    assert_same(learn, train_by_hand(lambda m, x, y: plain_loss(m, x[2:], y[2:])))


def test_targets_after_the_forward_pass() -> None:
    class Later(Callback):
        def before_batch(self) -> None:
            self.kept, self.learn.yb = self.yb, ()

        def after_pred(self) -> None:
            self.learn.yb = self.kept

    learn = make_learner(Later())
    learn.fit(1)
    assert_same(learn, train_by_hand(plain_loss))


class WithLosses(nn.Module):
    "A detector: it takes targets, and returns losses and predictions."

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        pred = self.net(x)
        return {'loss': F.cross_entropy(pred, y), 'boxes': pred}


def test_loss_function_of_the_models_losses() -> None:
    class WithTargets(Callback):
        def before_batch(self) -> None:
            self.learn.xb = (self.x, self.y)

    double = lambda pred, y: 2 * pred['loss'] + 0 * pred['boxes'].sum()
    learn = make_learner(WithTargets(), model=WithLosses(), loss_func=double)
    learn.fit(1)
    assert_same(learn, train_by_hand(lambda m, x, y: 2 * plain_loss(m, x, y)))


def test_loss_of_after_loss() -> None:
    class Decay(Callback):
        def after_loss(self) -> None:
            self.learn.loss_grad += self.model.weight.pow(2).sum()
            self.learn.loss = self.learn.loss_grad.clone()

    learn = make_learner(Decay())
    learn.fit(1)
    expected = train_by_hand(lambda m, x, y: plain_loss(m, x, y) + m.weight.pow(2).sum())
    assert_same(learn, expected)
    last = plain_loss(expected, X[12:], Y[12:]) + expected.weight.pow(2).sum()  # type: ignore[operator]
    assert learn.history[-1]['valid_loss'] == pytest.approx(last.item())


def test_prediction_out_of_a_tuple() -> None:
    class Pair(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x

    class First(Callback):
        def after_pred(self) -> None:
            self.learn.pred = self.pred[0]

    torch.manual_seed(0)
    learn = make_learner(First(), model=Pair(2, 2))
    learn.fit(1)
    assert_same(learn, train_by_hand(plain_loss))


def test_copy_of_the_model() -> None:
    class Average(Callback):
        def before_fit(self) -> None:
            self.ema = copy.deepcopy(self.learn.model)

        def after_step(self) -> None:
            follow(self.ema, self.model)

    def follow(average: nn.Module, model: nn.Module) -> None:
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.data = a.data * 0.5 + p.data * 0.5

    learn, by_hand = make_learner(Average()), make_model()
    learn.fit(1)
    train_by_hand(plain_loss, after_step=lambda model: follow(by_hand, model))
    torch.testing.assert_close(learn.average.ema.weight, by_hand.weight)


def test_weights_changed_in_place() -> None:
    def clamp(model: nn.Linear) -> None:
        model.weight.data.clamp_(-0.1, 0.1)

    learn = make_learner(Callback(after_step=lambda cb: clamp(cb.model)))
    learn.fit(1)
    assert_same(learn, train_by_hand(plain_loss, after_step=clamp))
    assert learn.model.weight.abs().max().item() == pytest.approx(0.1)


def test_model_that_is_wrapped() -> None:
    class Wrap(Callback):
        def after_create(self) -> None:
            self.learn.model = nn.Sequential(self.learn.model)

        def after_fit(self) -> None:
            self.learn.model = self.learn.model[0]

    learn = make_learner(Wrap())
    learn.fit(1)
    assert type(learn.model) is nn.Linear
    assert_same(learn, train_by_hand(plain_loss))


def test_several_optimizers() -> None:
    class Two(Callback):
        def before_train(self) -> None:
            self.own = self.learn.opt_func(self.learn.splitter(self.model), self.learn.lr)
            self.learn.opt = self.own

        def after_batch(self) -> None:
            if self.training:
                self.model.weight.sum().backward()
                self.own.step()
                self.own.zero_grad()

    def second_step(model: nn.Linear) -> None:
        model.weight.data -= 0.1

    learn = make_learner(Two())
    learn.fit(1)
    assert learn.opt is learn.two.own
    assert_same(learn, train_by_hand(plain_loss, after_step=second_step))


def test_cancelled_levels() -> None:
    class Cancel(Callback):
        run_valid = False
        n_steps = 0

        def before_step(self) -> None:
            if self.iter == 1:
                raise CancelBatchException

        def after_step(self) -> None:
            self.n_steps += 1

    class SkipValidation(Callback):
        def before_validate(self) -> None:
            raise CancelValidException

    learn = make_learner(Cancel(), SkipValidation())
    learn.fit(1)
    assert learn.cancel.n_steps == 2
    assert learn.history[-1]['valid_loss'] is None


def test_scaler_that_steps() -> None:
    class Scaler:
        def step(self, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                for p in group['params']:
                    p.grad /= 4
            optimizer.step()

    class Mixed(Callback):
        def before_batch(self) -> None:
            self.autocast = torch.autocast('cpu', torch.bfloat16)
            self.autocast.__enter__()

        def after_pred(self) -> None:
            self.learn.pred = self.pred.float()

        def after_loss(self) -> None:
            self.autocast.__exit__(None, None, None)

        def before_backward(self) -> None:
            self.learn.loss_grad = 4 * self.loss_grad

        def before_step(self) -> None:
            Scaler().step(self)

        @property
        def param_groups(self) -> Any:
            return self.opt.param_groups

        def step(self) -> None:
            self.n_steps = getattr(self, 'n_steps', 0) + 1

    def mixed_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast('cpu', torch.bfloat16):
            pred = model(x)
        return F.cross_entropy(pred.float(), y)

    learn = make_learner(Mixed())
    learn.fit(1)
    assert learn.mixed.n_steps == 3
    torch.testing.assert_close(
        learn.model.weight, train_by_hand(mixed_loss).weight, rtol=1e-3, atol=1e-4
    )


def test_records_that_are_read() -> None:
    class Read(Callback):
        order = 60

        def after_epoch(self) -> None:
            recorder = self.learn.recorder
            self.row = dict(zip(recorder.metric_names, recorder.log, strict=True))
            assert list(recorder.values[-1]) == list(recorder.final_record)
            assert list(recorder.values[-1]) == list(recorder.log[1:-1])

    learn = make_learner(Read())
    learn.fit(2)
    row = learn.read.row
    assert [*row] == ['epoch', 'train_loss', 'valid_loss', 'time']
    assert (row['epoch'], row['valid_loss']) == (1, learn.history[-1]['valid_loss'])
    assert len(learn.recorder.losses) == 6


def test_metrics_that_are_added() -> None:
    class Add(Callback):
        def before_fit(self) -> None:
            self.learn.metrics = [*self.learn.metrics, ValueMetric(lambda: self.n, 'n')]

        def before_validate(self) -> None:
            self.n = 0.0

        def after_batch(self) -> None:
            if not self.training:
                self.n += len(self.y)

    learn = make_learner(Add())
    learn.fit(1)
    assert learn.history[-1]['n'] == 4.0
    assert 'n' in learn.recorder.metric_names


def test_parts_of_a_loss() -> None:
    def parts(pred: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {'fit': F.cross_entropy(pred, y), 'size': pred.pow(2).mean()}

    learn = make_learner(loss_func=parts)
    learn.fit(1)
    row = learn.history[-1]
    assert row['valid_fit'] + row['valid_size'] == pytest.approx(row['valid_loss'])
    assert {'train_fit', 'train_size'} <= row.keys()


def test_files_that_are_saved(tmp_path: Path) -> None:
    class Save(Callback):
        def after_fit(self) -> None:
            self.last_saved_path = self.learn.save('end', with_opt=False)

    saver = Save()
    learn = make_learner(saver, path=tmp_path)
    learn.fit(1)
    assert saver.last_saved_path == tmp_path / 'models' / 'end.pth'
    weights = learn.model.weight.detach().clone()
    nn.init.zeros_(learn.model.weight)
    learn.load('end', with_opt=False)
    assert torch.equal(learn.model.weight, weights)


class Loader:
    "A loader with the order of its rows in a method, as fastai's loaders have it."

    def get_idxs(self) -> list[int]:
        return list(range(12))

    def __iter__(self) -> Any:
        indexes = self.get_idxs()
        return ((X[indexes[i : i + 4]], Y[indexes[i : i + 4]]) for i in range(0, 12, 4))

    def __len__(self) -> int:
        return 3


def test_loader_that_is_changed() -> None:
    class First(Callback):
        def before_fit(self) -> None:
            self.old = self.learn.dls.train.get_idxs
            self.learn.dls.train.get_idxs = lambda: [0] * 12

        def before_batch(self) -> None:
            if self.training:
                assert torch.equal(self.x, X[:1].expand(4, 2))

        def after_fit(self) -> None:
            self.learn.dls.train.get_idxs = self.old

    learn = make_learner(First(), dls=(Loader(), make_batches()[3:]))
    learn.fit(1)
    loss = lambda m, x, y: plain_loss(m, X[:1].expand(4, 2), Y[:1].expand(4))
    assert_same(learn, train_by_hand(loss))
    assert learn.dls.train.get_idxs() == list(range(12))


def test_forward_passes_of_a_handler() -> None:
    def hardest(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(x), y, reduction='none').argsort(descending=True)[:2]

    class Hardest(Callback):
        run_valid = False

        def before_batch(self) -> None:
            i = hardest(self.learn.model, self.x, self.y)
            self.learn.xb, self.learn.yb = (self.x[i],), (self.y[i],)

    def hard_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        i = hardest(model, x, y)
        return plain_loss(model, x[i], y[i])

    learn = make_learner(Hardest())
    learn.fit(1)
    assert_same(learn, train_by_hand(hard_loss))


def test_callback_of_predictions() -> None:
    class Keep(Callback):
        def __init__(self, learn: Learner) -> None:
            self.learn, self.kept = learn, []

        def after_pred(self) -> None:
            self.kept.append((self.learn.iter, self.learn.pred.clone()))

    learn = make_learner()
    keep = Keep(learn)
    preds, _ = learn.get_preds(0, cbs=keep, act=noop)
    assert [i for i, _ in keep.kept] == [0, 1, 2]
    torch.testing.assert_close(torch.cat([p for _, p in keep.kept]), preds)


def test_names_of_other_callbacks() -> None:
    class Look(Callback):
        def before_fit(self) -> None:
            self.names = [
                name for name in ('gather_preds', 'lr_finder', 'recorder') if hasattr(self, name)
            ]

    learn = make_learner(Look())
    learn.fit(1)
    assert learn.look.names == ['recorder']
    learn.get_preds()
    assert learn.look.names == ['gather_preds', 'recorder']


def test_methods_that_are_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Log(Callback):
        def after_epoch(self) -> None:
            self.learn._log_epoch(self.epoch)

    patched = SimpleNamespace(Learner=type('Learner', (), {'_log_epoch': noop}))
    monkeypatch.setitem(sys.modules, 'fastai.learner', patched)
    with pytest.raises(AttributeError, match=r'`@patch`: patch `learnkit.Learner`.*_log_epoch'):
        make_learner(Log()).fit(1)
    epochs: list[int] = []
    monkeypatch.setattr(Learner, '_log_epoch', lambda self, epoch: epochs.append(epoch), False)
    make_learner(Log()).fit(2)
    assert epochs == [0, 1]


def test_new_head_is_trained() -> None:
    class NewHead(Callback):
        def before_fit(self) -> None:
            self.learn.model[1] = nn.Linear(2, 2)
            nn.init.zeros_(self.learn.model[1].weight)

    learn = make_learner(NewHead(), model=nn.Sequential(make_model(), nn.Linear(2, 2)))
    learn.fit(1)
    assert learn.model[1].weight.abs().max() > 0


# -- Composer --------------------------------------------------------------------------------------


class Given:
    "A metric with a given value, in the interface of torchmetrics."

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def reset(self) -> None: ...

    def update(self, *args: Any) -> None: ...

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.value)


class Count(Given):
    def reset(self) -> None:
        self.value = 0.0

    def update(self, pred: torch.Tensor, y: torch.Tensor) -> None:
        self.value += float((pred.argmax(1) == y).sum())


class ComposerNet(nn.Module):
    "A model with Composer's interface, of batches that are dicts."

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.seen: list[bool] = []

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.seen.append('step' in batch)
        logits = self.net(batch['x'])
        return {'logits': logits, 'size': logits.detach().abs().mean()}

    def loss(self, outputs: dict[str, Any], batch: dict[str, Any]) -> torch.Tensor:
        return F.cross_entropy(outputs['logits'], batch['y'])

    def eval_forward(self, batch: dict[str, Any], outputs: Any = None) -> Any:
        return self.forward(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return {'right': Count()}

    def update_metric(self, batch: dict[str, Any], outputs: Any, metric: Any) -> dict[str, Any]:
        metric.update(outputs['logits'], batch['y'])
        return {'pred': outputs['logits'].argmax(1)}


class Rows(list[dict[str, Any]]):
    "Batches, with the shares of two domains."

    def __init__(self) -> None:
        super().__init__({'x': x, 'y': y} for x, y in make_batches()[:3])
        self.dataset = SimpleNamespace(proportion=[0.5, 0.5])


def composer_learner(*cbs: Any, **kwargs: Any) -> Learner:
    options = {'opt_func': torch.optim.SGD, 'lr': 0.1, **kwargs}
    adapted = [from_composer(cb) for cb in cbs]
    return quiet_learner((Rows(), Rows()[:1]), ComposerNet(), cbs=adapted, **options)


def listener(**hooks: Callable[[Any, Any], Any]) -> Any:
    "Return a callback of Composer's style with these hooks: `event=f(state, logger)`."
    return SimpleNamespace(**hooks)


def test_composer_metric_values() -> None:
    seen: list[bool] = []

    def after_training(state: Any, logger: Any) -> None:
        values = state.train_metric_values
        seen.append(values == {'right': state.train_metrics['right'].compute()})
        seen.append(
            int(values['right'])
            == int((state.outputs['logits'].argmax(1) == state.batch['y']).sum())
        )

    def after_evaluation(state: Any, logger: Any) -> None:
        seen.append(
            state.eval_metric_values == {'right': state.eval_metrics['eval']['right'].compute()}
        )

    composer_learner(listener(batch_end=after_training, eval_end=after_evaluation)).fit(1)
    assert seen == [True] * 7


def test_composer_metrics_written() -> None:
    seen: list[Any] = []

    def put(state: Any, logger: Any) -> None:
        seen.append(
            [float(m.compute()) for name, m in state.train_metrics.items() if name == 'own']
        )
        state.train_metrics['own'] = Given(float(len(seen)))

    def put_evaluated(state: Any, logger: Any) -> None:
        state.eval_metrics['eval']['own'] = Given(0.5)

    def read(state: Any, logger: Any) -> None:
        seen.append(float(state.eval_metrics['eval']['own'].compute()))

    writer = listener(batch_end=put, eval_end=put_evaluated)
    composer_learner(writer, listener(eval_end=read)).fit(1)
    assert seen == [[], [1.0], [2.0], 0.5]


def test_composer_metric_outputs() -> None:
    seen: list[Any] = []
    read = lambda state, logger: seen.append(state.metric_outputs)
    learn = composer_learner(listener(fit_start=read, eval_batch_end=read))
    learn.fit(1)
    assert seen[0] == {}
    expected = learn.model.net(Rows()[0]['x']).argmax(1)
    assert torch.equal(seen[1]['pred'], expected)


def test_composer_optimizer_written() -> None:
    def halve(state: Any, logger: Any) -> None:
        for group in state.optimizers[0].param_groups:
            group['lr'] *= 0.5
        state.model.net.bias.requires_grad_(False)

    learn = composer_learner(listener(fit_start=halve))
    learn.fit(1)
    expected = make_model()
    bias = expected.bias.detach().clone()
    opt = torch.optim.SGD([expected.weight], 0.05)
    for x, y in make_batches()[:3]:
        opt.zero_grad()
        plain_loss(expected, x, y).backward()
        opt.step()
    torch.testing.assert_close(learn.model.net.weight, expected.weight)
    assert torch.equal(learn.model.net.bias, bias)


def test_composer_errors() -> None:
    class SpikeError(Exception):
        "An error of a callback, with the loss."

    def check(state: Any, logger: Any) -> None:
        if state.timestamp.batch == 1:
            raise SpikeError(state.loss.item())

    learn = composer_learner(listener(after_loss=check))
    with pytest.raises(SpikeError):
        learn.fit(1)
    assert learn.time.ba == 1


def test_composer_weights_swapped() -> None:
    class Zero:
        "An algorithm that evaluates weights of zero."

        def match(self, event: Any, state: Any) -> bool:
            return event in ('eval_start', 'eval_end')

        def apply(self, event: Any, state: Any, logger: Any) -> None:
            if event == 'eval_start':
                self.kept = copy.deepcopy(state.model.state_dict())
                state.model.load_state_dict({k: 0 * v for k, v in self.kept.items()})
            else:
                state.model.load_state_dict(self.kept)

    sizes: list[float] = []
    read = lambda state, logger: sizes.append(float(state.outputs['size']))
    learn = composer_learner(Zero(), listener(eval_batch_end=read))
    learn.fit(2)
    plain = composer_learner()
    plain.fit(2)
    assert_same(learn, plain.model)
    assert sizes == [0.0, 0.0]


def test_composer_own_optimizer() -> None:
    class Counting(torch.optim.SGD):
        n_steps = 0

        def step(self, closure: Any = None) -> Any:
            self.n_steps += 1
            return super().step(closure)

    seen: list[int] = []
    read = lambda state, logger: seen.append(state.optimizers[0].n_steps)
    composer_learner(listener(batch_end=read), opt_func=Counting).fit(1)
    assert seen == [1, 2, 3]


def test_composer_dicts() -> None:
    sizes: list[float] = []

    def add(state: Any, logger: Any) -> None:
        state.batch['step'] = state.timestamp.batch.value

    read = lambda state, logger: sizes.append(float(state.outputs['size']))
    learn = composer_learner(listener(batch_start=add, after_train_batch=read))
    learn.fit(1)
    assert learn.model.seen[:3] == [True] * 3
    assert sizes[0] == pytest.approx(make_model()(X[:4]).abs().mean().item())


def test_composer_device_and_seed() -> None:
    seen: list[Any] = []
    read = lambda state, logger: seen.append((state.device._device, state.rank_zero_seed))
    learn = composer_learner(listener(fit_start=read))
    learn.fit(1)
    assert seen == [(torch.device('cpu'), torch.initial_seed())]


def test_composer_data_set() -> None:
    def change(state: Any, logger: Any) -> None:
        state.train_dataloader.dataset.proportion = [0.2, 0.8]

    learn = composer_learner(listener(eval_end=change))
    learn.fit(1)
    assert learn.dls.train.dataset.proportion == [0.2, 0.8]


def test_composer_run_event() -> None:
    class Every:
        def __init__(self) -> None:
            self.n: dict[str, int] = {}

        def run_event(self, event: Any, state: Any, logger: Any) -> None:
            self.n[event.value] = self.n.get(event.value, 0) + 1

    every = Every()
    composer_learner(every).fit(2)
    counted = {name: every.n[name] for name in ('init', 'fit_start', 'epoch_end', 'batch_end')}
    assert counted == {'init': 1, 'fit_start': 1, 'epoch_end': 2, 'batch_end': 6}
    assert every.n['eval_batch_end'] == 2


def test_composer_process() -> None:
    seen: list[str] = []
    names = ('fit_start', 'before_dataloader', 'after_dataloader', 'eval_start', 'fit_end')
    hooks = {name: lambda state, logger, name=name: seen.append(name) for name in names}
    composer_learner(listener(**hooks)).fit(1)
    # the last one finds the loader at its end
    draws = [*['before_dataloader', 'after_dataloader'] * 3, 'before_dataloader']
    assert seen == ['fit_start', *draws, 'eval_start', 'fit_end']
