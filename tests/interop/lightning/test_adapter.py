"""Modules and callbacks in Lightning's style, without Lightning; `tests/peers` compares with the real trainer."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import BinaryAccuracy

from learnkit import Callback, DataLoaders, GradientAccumulation, Learner, MixedPrecision, Replay
from learnkit.core.errors import (
    CallbackError,
    FitError,
    LoaderError,
    LossError,
    MetricError,
    ModelError,
    OptimizerError,
    OptionError,
)
from learnkit.interop import from_lightning
from learnkit.interop.lightning.host import NEEDED
from learnkit.interop.lightning.run import REPLACED
from learnkit.testing import synth_learner
from learnkit.testing.harness import kill_and_resume
from tests.helpers.resuming import check_every_place

X = torch.randn(38, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
BATCHES = [[X[i : i + 8], Y[i : i + 8]] for i in range(0, 38, 8)]


class Module(nn.Module):
    "A module with the methods of a LightningModule."

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log('loss', loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        self.log('val_loss', F.cross_entropy(self.net(x), y), prog_bar=True)

    def configure_optimizers(self) -> Any:
        opt = torch.optim.Adam(self.parameters(), lr=0.01)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)]


def make(module: Any = None, cbs: Any = None, **options: Any) -> Any:
    learn = from_lightning(module or Module(), (BATCHES, BATCHES[:2]), cbs, **options)
    learn.logger = noop
    return learn


def by_hand(n_epoch: int, accumulate: int = 1, limit: float = 0.0) -> tuple[Module, list[float]]:
    "Train in a plain loop; return the module and the mean loss of each epoch."
    module, means = Module(), []
    torch.manual_seed(1)
    opt = torch.optim.Adam(module.parameters(), lr=0.01)
    for epoch in range(n_epoch):
        losses = []
        opt.param_groups[0]['lr'] = 0.01 * 0.5**epoch
        for i, (x, y) in enumerate(BATCHES):
            loss = F.cross_entropy(module.net(x), y)
            losses.append(loss.item() * len(x))
            (loss / accumulate).backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(BATCHES):
                if limit:
                    nn.utils.clip_grad_norm_(module.parameters(), limit)
                opt.step()
                opt.zero_grad()
        means.append(sum(losses) / len(X))
    return module, means


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(('accumulate', 'limit'), [(1, 0.0), (2, 0.0), (3, 0.1)])
def test_trains_as_a_plain_loop(accumulate: int, limit: float) -> None:
    options = {'accumulate_grad_batches': accumulate, 'gradient_clip_val': limit or None}
    learn = make(**options)
    torch.manual_seed(1)
    learn.fit(3)
    module, means = by_hand(3, accumulate, limit)
    assert_equal(learn.model, module)
    assert [row['loss_epoch'] for row in learn.history] == pytest.approx(means, rel=1e-6)
    trainer = learn.trainer
    assert (trainer.global_step, trainer.current_epoch) == (3 * -(-5 // accumulate), 3)
    assert float(trainer.callback_metrics['loss']) == pytest.approx(means[-1], rel=1e-6)
    with torch.no_grad():
        module.eval()
        values = [F.cross_entropy(module.net(x), y) for x, y in BATCHES[:2]]
    assert learn.history[-1]['val_loss'] == pytest.approx(float(sum(values)) / 2, rel=1e-6)
    assert learn.history[-1]['valid_loss'] == pytest.approx(learn.history[-1]['val_loss'])
    assert learn.lr != 0.01 and learn.opt.lrs == [0.01 * 0.5**3]


class Gan(Module):
    "Manual optimization of two parts."

    automatic_optimization = False
    validation_step = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for opt, sign in zip(self.optimizers(), (1, -1), strict=True):
            assert isinstance(opt, torch.optim.SGD)
            loss = sign * F.cross_entropy(self.net(x), y)
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
            self.log(f'loss {sign}', loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)]


def test_manual_optimization_trains_as_a_plain_loop() -> None:
    learn = make(Gan())
    torch.manual_seed(1)
    learn.fit(2)
    torch.manual_seed(1)
    module = Module()
    torch.manual_seed(1)
    opts = [torch.optim.SGD(module.net[i].parameters(), lr=0.1) for i in (0, 3)]
    for _ in range(2):
        losses: dict[int, list[float]] = {1: [], -1: []}
        for x, y in BATCHES:
            for opt, sign in zip(opts, (1, -1), strict=True):
                loss = sign * F.cross_entropy(module.net(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                losses[sign].append(loss.item())
    assert_equal(learn.model, module)
    assert learn.trainer.global_step == learn.time.st == 20
    assert learn.history[-1]['loss 1'] == pytest.approx(sum(losses[1]) / 5)


class Repeated(Module):
    "Takes three steps in a batch, and changes weights itself."

    automatic_optimization = False
    validation_step = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        opt = self.optimizers(use_pl_optimizer=batch_idx % 2 == 0)
        for _ in range(3):
            loss = F.cross_entropy(self.net[3](self.net[0](x)), y)
            self.losses.append(loss.item())
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
            clamp(self)

    def configure_optimizers(self) -> Any:
        self.losses: list[float] = []
        return torch.optim.SGD(self.parameters(), lr=0.1)


@torch.no_grad()
def clamp(module: nn.Module) -> None:
    for p in module.parameters():
        p.clamp_(-0.5, 0.5)


def test_steps_under_autocast_see_the_weights_of_the_step_before() -> None:
    learn = make(Repeated(), MixedPrecision('bf16'))
    learn.fit(1)
    module = Module()
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for x, y in BATCHES:
        for _ in range(3):
            with torch.autocast('cpu', dtype=torch.bfloat16):
                loss = F.cross_entropy(module.net[3](module.net[0](x)), y)
            losses.append(loss.item())
            opt.zero_grad()
            loss.backward()
            opt.step()
            clamp(module)
    assert learn.model.losses == losses
    assert_equal(learn.model, module)


class Twice(Module):
    "Uses a weight twice, with automatic optimization."

    validation_step = None

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(self.net(batch[0]).tanh()), batch[1])


def test_autocast_keeps_no_casts_as_in_lightning() -> None:
    learn = make(Twice(), MixedPrecision('bf16'))
    learn.fit(1)
    module = Twice()
    opt = torch.optim.Adam(module.parameters(), lr=0.01)
    for batch in BATCHES:
        with torch.autocast('cpu', dtype=torch.bfloat16, cache_enabled=False):
            loss = module.training_step(batch, 0)
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert_equal(learn.model, module)


def note(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.calls.append(name)


NAMES = (
    'setup teardown on_fit_start on_fit_end on_train_start on_train_end on_train_epoch_start on_train_epoch_end '
    'on_train_batch_start on_train_batch_end on_validation_start on_validation_end on_validation_epoch_start '
    'on_validation_epoch_end on_validation_batch_start on_validation_batch_end on_before_zero_grad '
    'on_before_backward on_after_backward on_before_optimizer_step'
).split()
STEP = """on_train_batch_start on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step
    on_train_batch_end"""
EVALUATION = """on_validation_start on_validation_epoch_start on_validation_batch_start on_validation_batch_end
    on_validation_batch_start on_validation_batch_end on_validation_epoch_end on_validation_end"""
EPOCH = f'on_train_epoch_start {5 * (STEP + " ")} {EVALUATION} on_train_epoch_end '
FIT = f'setup on_fit_start on_train_start {2 * EPOCH} on_train_end on_fit_end teardown'.split()


def test_hooks_run_in_lightnings_order() -> None:
    calls: list[str] = []
    cb = type('Cb', (), {name: note(f'cb {name}') for name in NAMES} | {'calls': calls})()
    cls = type('Hooked', (Module,), {name: note(name) for name in NAMES} | {'calls': calls})
    learn = make(cls(), cb)
    learn.fit(2)
    assert [c for c in calls if not c.startswith('cb ')] == FIT
    assert calls[::2] == [f'cb {name}' for name in FIT]  # callbacks first
    calls.clear()
    learn.validate()
    assert calls[::2] == [f'cb {name}' for name in ['setup', *EVALUATION.split(), 'teardown']]
    calls.clear()
    plain = synth_learner(n_train=5, n_valid=2, cbs=from_lightning(cb))  # a Learner of any model
    with plain.no_bar():
        plain.fit(2)
    assert calls == [f'cb {name}' for name in FIT]


class LogsAll(Module):
    "Values by step and by epoch, reductions, and metrics of torchmetrics."

    def __init__(self) -> None:
        super().__init__()
        self.acc = BinaryAccuracy()
        self.n_seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.n_seen += len(batch[0])
        self.acc(self.net(batch[0]).argmax(1), batch[1])
        self.log('acc', self.acc, on_step=False, on_epoch=True)
        self.log('largest', float(batch_idx), on_epoch=True, on_step=False, reduce_fx='max')
        self.log('sum', torch.tensor(batch_idx), on_epoch=True, on_step=False, reduce_fx=torch.sum)
        self.log('weighed', float(batch_idx), on_epoch=True, on_step=False, batch_size=batch_idx)
        self.log_dict({'hidden': 1.0, 'train_loss': 7.0}, logger=batch_idx < 0, on_epoch=True)
        return {'loss': super().training_step(batch, batch_idx), 'n': len(batch[0])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert not outputs['loss'].requires_grad
        self.log('n', float(outputs['n']), on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log('seen', float(self.n_seen))


def test_logged_values_are_columns() -> None:
    learn = make(LogsAll())
    learn.fit(2)
    row, metrics = learn.history[-1], learn.trainer.callback_metrics
    n = torch.tensor([float(len(x)) for x, _ in BATCHES])
    assert (row['largest'], row['sum'], row['weighed'], row['seen']) == (4, 10, 3, 76)
    assert row['n'] == pytest.approx(float((n * n).sum() / n.sum()))
    assert 0 < row['acc'] < 1 and row['acc'] == float(metrics['acc'])
    assert 'hidden' not in row and float(metrics['hidden_epoch']) == 1
    assert row['train_loss'] != 7  # it was not logged
    assert 'valid_acc' not in row and row['val_loss'] == float(metrics['val_loss'])


class Watcher:
    "A callback as users write it, without Lightning's base class."

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, i: int
    ) -> None:
        self.seen.append((trainer.global_step, float(outputs['loss'])))
        if trainer.global_step == 7:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def test_a_callback_reads_and_stops_any_learner() -> None:
    cb = Watcher()
    learn = synth_learner(n_train=5, cbs=from_lightning(cb))
    with learn.no_bar():
        learn.fit(3)
    assert [n for n, _ in filter(lambda s: type(s) is tuple, cb.seen)] == [*range(1, 8)]
    assert cb.seen[5]['valid_loss'] == pytest.approx(learn.history[0]['valid_loss'])
    assert len(learn.history) == 2 and repr(learn.cbs[-2]) == 'from_lightning(Watcher)'


def test_the_trainer_has_what_modules_read_and_names_the_rest() -> None:
    learn = make(accumulate_grad_batches=2, path='.')
    t = learn.trainer
    assert t is learn.model.trainer and not hasattr(t, 'tuner')
    with pytest.raises(AttributeError, match='`Trainer` does not have an attribute `tuner`'):
        _ = t.tuner
    learn.fit(3)
    assert (t.max_epochs, t.estimated_stepping_batches, t.num_val_batches) == (3, 9, [2])
    learn.fit('4ba')
    assert (t.max_steps, t.max_epochs, t.state.fn, t.training) == (4, -1, None, False)


def test_steps_of_prediction_and_test() -> None:
    class Steps(Module):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]).softmax(1)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log('rows', float(len(batch[0])), reduce_fx='sum')

    learn = make(Steps(), Replay())
    learn.fit(1)
    preds, targets = learn.get_preds()
    learn.model.eval()
    assert torch.allclose(preds, learn.model.net(X[:16]).softmax(1))
    assert torch.equal(targets, Y[:16])
    assert learn.validate(dl=BATCHES)['rows'] == 38 and 'val_loss' in learn.validate().names
    assert learn.replay().isfinite()


def test_a_data_module_and_changes_of_the_batch() -> None:
    class Data:
        def prepare_data(self) -> None:
            self.ready = True

        def setup(self, stage: str) -> None:
            self.batches = BATCHES if self.ready and stage == 'fit' else []

        def train_dataloader(self) -> Any:
            return self.batches

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {'x': batch[0], 'half': batch[0] / 2}

    class Reads(Module):
        def training_step(self, batch: Any) -> Tensor:
            assert torch.equal(batch['x'], 2 * batch['half'])
            return self.net(batch['x']).mean()

    learn = from_lightning(Reads(), Data())
    learn.logger = noop
    learn.fit(1)
    assert len(learn.history) == 1 and learn.trainer.datamodule.ready


def test_resumes_exactly_from_every_place() -> None:
    check_every_place(
        lambda: make(LogsAll(), Watcher(), accumulate_grad_batches=2),
        lambda learn, resume: learn.fit(2, resume=resume),
    )


class Lazy(Module):
    "A module with lazy layers, whose gradients stay until its next step, as in Lightning."

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))


@pytest.mark.parametrize('accumulate', [1, 2])
def test_lazy_layers_resume_exactly_from_every_place(accumulate: int) -> None:
    check_every_place(lambda: make(Lazy(), accumulate_grad_batches=accumulate))


def test_resumes_exactly_after_sigkill() -> None:
    report = kill_and_resume(lambda: make(LogsAll()), n_epoch=2, kills=1)
    assert report.exact and report.kills, report.differences


class Bad(Module):
    "A module with one method of a given kind."

    def __init__(self, **methods: Any) -> None:
        super().__init__()
        for name, f in methods.items():
            object.__setattr__(self, name, f)


def opt(module: Any = None) -> Any:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ('run', 'error', 'words'),
    [
        (lambda: from_lightning(nn.Linear(1, 1)), ModelError, 'training_step'),
        (lambda: from_lightning(Watcher(), BATCHES), ModelError, 'training_step'),
        (lambda: from_lightning(object()), CallbackError, 'Lightning'),
        (lambda: from_lightning(Watcher), CallbackError, 'is a class'),
        (lambda: from_lightning(Module()), LoaderError, 'train_dataloader'),
        (lambda: make(max_epochs=3), OptionError, r'learn.fit\(3\)'),
        (lambda: make(Bad(configure_optimizers=None)), ModelError, 'configure_optimizers'),
        (lambda: make(Bad(configure_optimizers=lambda: 3)).fit(1), OptimizerError, 'returned 3'),
        (
            lambda: make(Bad(configure_optimizers=lambda: [opt(), opt()])).fit(1),
            OptimizerError,
            'automatic_optimization',
        ),
        (
            lambda: make(Bad(configure_optimizers=lambda: ([opt()], [{'by': 1}]))).fit(1),
            OptimizerError,
            'interval',
        ),
        (lambda: make(Bad(training_step=lambda b, i: {'n': 1})).fit(1), LossError, 'loss'),
        (lambda: make(Fit(lambda m: m.log('a', 1.0))).fit(1), FitError, 'on_fit_start'),
        (lambda: make(Logs(value=torch.ones(2))).fit(1), MetricError, '2 elements'),
        (lambda: make(Logs(reduce_fx='median')).fit(1), OptionError, 'median'),
        (lambda: make(gradient_clip_algorithm='all').fit(1), OptionError, 'all'),
        (
            lambda: from_lightning(Module(), Endless(), accumulate_grad_batches=2).fit(1),
            OptionError,
            'length',
        ),
    ],
)
def test_errors_name_the_fix(run: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run()


def test_gradient_accumulation_of_a_callback_is_refused() -> None:
    learn = make()
    with pytest.raises(OptionError, match='accumulate_grad_batches'):
        learn.fit(1, cbs=GradientAccumulation(batches=2))
    assert learn.time.ba == 0


class Endless:
    "A loader without a length."

    def __iter__(self) -> Any:
        return iter(BATCHES)


class Fit(Module):
    def __init__(self, hook: Callable[[Any], Any]) -> None:
        super().__init__()
        self.hook = hook

    def on_fit_start(self) -> None:
        self.hook(self)


class Logs(Module):
    def __init__(self, value: Any = 1.0, **options: Any) -> None:
        super().__init__()
        self.value, self.options = value, options

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log('value', self.value, **self.options)


def test_a_plateau_needs_its_value() -> None:
    def configure(self: Any) -> Any:
        opt = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, threshold=9)
        return {'optimizer': opt, 'lr_scheduler': schedule, 'monitor': self.monitor}

    cls = type('Plateau', (Module,), {'configure_optimizers': configure, 'monitor': 'val_loss'})
    learn = make(cls())
    learn.fit(3)
    assert learn.opt.lrs == pytest.approx([0.1 * 0.1**3])
    module = cls()
    module.monitor = 'absent'
    with pytest.raises(MetricError, match="monitor='absent' was not logged, but loss"):
        make(module).fit(1)


def test_values_reach_loggers_and_data_loaders_keep_their_names(tmp_path: Path) -> None:
    from learnkit.loggers import JSONLinesLogger, read_log

    loaders = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 19)
    learn = from_lightning(
        Module(), (BATCHES, [loaders, loaders]), JSONLinesLogger(every='1ba'), path=tmp_path
    )
    learn.logger = noop
    learn.fit(1)
    assert isinstance(learn, Learner) and isinstance(learn.dls, DataLoaders)
    rows = read_log(tmp_path / 'metrics.jsonl')
    assert sum('loss_step' in row for row in rows) == 5 and 'loss_epoch' in rows[-1]
    assert {'val_loss/dataloader_idx_0', 'val_loss/dataloader_idx_1'} <= rows[-1].keys()


def test_a_copy_of_the_learner_trains_by_itself() -> None:
    learn = make(LogsAll(), Watcher())
    learn.fit(1)
    copy = pickle.loads(pickle.dumps(learn))
    assert copy.trainer is copy.model.trainer is not learn.trainer
    for each in (learn, copy):
        torch.manual_seed(1)
        each.logger = noop
        each.fit(1)
    assert_equal(learn.model, copy.model)
    assert copy.history[-1]['seen'] == learn.history[-1]['seen'] == 54


# -- callbacks that need a LightningModule, or Lightning's Trainer ---------------------------------


def make_lightning_callback(name: str, base: type = object, **methods: Any) -> Any:
    "Return a callback whose class is one of Lightning's by its name and package."
    hooks = {'on_train_end': lambda self, trainer, module: None, **methods}
    return type(name, (base,), {'__module__': 'lightning.pytorch.callbacks', **hooks})()


def train_plain(cb: Any, model: Any = None) -> list[int]:
    "Train a plain model with a callback of Lightning; return the steps."
    steps: list[int] = []
    learn = Learner(
        DataLoaders(BATCHES, BATCHES[:2]), model or nn.Linear(4, 2), nn.CrossEntropyLoss()
    )
    learn.add_cbs([from_lightning(cb), Callback(after_step=lambda cb: steps.append(1))])
    learn.logger = noop
    with learn.no_bar():
        try:
            learn.fit(1)
        except ModelError as e:
            assert not steps, 'it has trained before'
            raise e
    return steps


@pytest.mark.parametrize(('name', 'attribute'), NEEDED.items())
def test_a_callback_that_needs_a_module_is_an_error_before_training(
    name: str, attribute: str
) -> None:
    own = make_lightning_callback(name)
    derived = type('Mine', (type(own),), {})()
    for cb in (own, derived):
        with pytest.raises(ModelError, match=f'{type(cb).__name__} reads `{attribute}` of a Light'):
            train_plain(cb)
    model = nn.Linear(4, 2)
    object.__setattr__(model, attribute, None)
    assert len(train_plain(own, model)) == len(BATCHES)


@pytest.mark.parametrize('name', REPLACED)
def test_a_callback_that_needs_the_trainer_names_what_replaces_it(name: str) -> None:
    with pytest.raises(CallbackError, match=f"{name} needs Lightning's own Trainer.*`"):
        from_lightning(make_lightning_callback(name))


def test_a_hook_that_reads_what_the_model_lacks_names_it() -> None:
    class Reads:
        def on_train_start(self, trainer: Any, module: Any) -> None:
            _ = trainer.lightning_module.hparams

    with pytest.raises(ModelError, match=r'Reads.on_train_start reads `hparams`.*is a Linear'):
        train_plain(Reads())

    class Fails:
        def on_train_start(self, trainer: Any, module: Any) -> None:
            _ = self.nothing

    with pytest.raises(AttributeError, match='nothing') as caught:
        train_plain(Fails())
    assert not isinstance(caught.value, ModelError)


def test_a_progress_bar_finds_itself_and_the_length_of_predictions() -> None:
    seen: list[Any] = []

    def look(self: Any, trainer: Any, module: Any) -> None:
        seen.append((trainer.progress_bar_callback is self, trainer.num_predict_batches[0]))

    bar = make_lightning_callback('ProgressBar', on_predict_batch_start=lambda *a: look(*a[:3]))
    learn = Learner(DataLoaders(BATCHES, BATCHES[:2]), nn.Linear(4, 2), nn.CrossEntropyLoss())
    learn.add_cb(from_lightning(bar))
    with learn.no_bar():
        learn.get_preds()
    assert seen == [(True, 2), (True, 2)]
