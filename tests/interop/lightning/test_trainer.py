"""Lightning's Trainer by one changed import: options, runs, and resumes; with Lightning, against the real one."""

import inspect
import itertools
import os
import random
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

from learnkit import Callback, Checkpoint
from learnkit.core.errors import CheckpointError, FitError, LoaderError, OptionError
from learnkit.interop import from_lightning
from learnkit.interop.lightning import Trainer
from tests.faults.fault_helpers import others_in_full

PAGE = Path(__file__).parents[3] / 'docs' / 'compatibility.md'
QUIET: dict[str, Any] = {
    'accelerator': 'cpu',
    'logger': False,
    'enable_checkpointing': False,
    'enable_progress_bar': False,
    'enable_model_summary': False,
}


def make_set(n: int, seed: int = 0) -> Any:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def load(n: int, seed: int = 0, **options: Any) -> Any:
    return DataLoader(make_set(n, seed), 8, shuffle=True, **options)


class Steps:
    "Methods of a LightningModule that draws in training and in evaluations."

    log: Callable[..., None]
    net: nn.Module

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = batch.values() if isinstance(batch, dict) else [batch]
        loss = sum((F.cross_entropy(self.net(x), y) for x, y in batches), torch.zeros(()))
        self.log('train_loss', loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log('val_loss', F.cross_entropy(self.net(x) + 0.1 * torch.randn(2), y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log('rows', float(len(batch[0])), reduce_fx='sum')

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        opt = torch.optim.Adam(self.net.parameters(), lr=0.01)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)
    )


class Module(Steps, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()


class Stream(IterableDataset[Any]):
    "Rows from the global generator, without a length."

    def __iter__(self) -> Iterator[Any]:
        for _ in range(36):
            x = torch.randn(4)
            yield x, (x.sum() > 0).long()


class Data:
    "A data module that reads its trainer."

    trainer: Any

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append('prepare_data')

    def setup(self, stage: str) -> None:
        self.calls.append(f'setup {stage} of {self.trainer.world_size}')
        self.parts = random_split(make_set(50), [36, 14])

    def teardown(self, stage: str) -> None:
        self.calls.append(f'teardown {stage}')

    def train_dataloader(self) -> Any:
        return DataLoader(self.parts[0], 8 // self.trainer.num_devices, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.parts[1], 8, shuffle=True)

    test_dataloader = val_dataloader


def train_by_hand(n_epoch: int, sanity: bool = True) -> nn.Module:
    "Train in a plain loop whose generators flow as Lightning's."
    module = Module()
    train, valid = load(36), load(20, 1)
    opt = torch.optim.Adam(module.net.parameters(), lr=0.01)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    if sanity:
        torch.set_rng_state(state)  # the check before the fit leaves no trace
    for epoch in range(n_epoch):
        opt.param_groups[0]['lr'] = 0.01 * 0.5**epoch
        module.train()
        for x, y in train:
            opt.zero_grad()
            F.cross_entropy(module.net(x), y).backward()
            opt.step()
        module.eval()
        with torch.no_grad():
            for x, y in valid:
                F.cross_entropy(module.net(x) + 0.1 * torch.randn(2), y)
    return module


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def test_trains_as_a_plain_loop_that_shares_its_generator_with_evaluations() -> None:
    module, trainer = Module(), Trainer(max_epochs=3, **QUIET)
    torch.manual_seed(1)
    trainer.fit(module, load(36), load(20, 1))
    assert_equal(module, train_by_hand(3))
    assert module.trainer is trainer and trainer.learn.model is module
    assert (trainer.current_epoch, trainer.global_step, module.training) == (3, 15, True)
    learn = from_lightning(Module(), (load(36), load(20, 1)))
    torch.manual_seed(1)
    with learn.no_bar():
        learn.fit(3)
    pairs = zip(learn.model.parameters(), module.parameters(), strict=True)
    assert not all(torch.equal(p, q) for p, q in pairs)  # its evaluations leave no trace


def test_several_training_loaders_are_joined_until_the_longest_ends() -> None:
    def loaders() -> dict[str, Any]:
        return {name: DataLoader(make_set(n, n), 8) for name, n in (('a', 36), ('b', 20))}

    module, by_hand = Module(), Module()
    torch.manual_seed(1)
    options = {**QUIET, 'num_sanity_val_steps': 0, 'limit_val_batches': 0}
    Trainer(max_epochs=2, **options).fit(module, loaders())
    own = loaders()
    opt = torch.optim.Adam(by_hand.net.parameters(), lr=0.01)
    torch.manual_seed(1)
    for epoch in range(2):
        opt.param_groups[0]['lr'] = 0.01 * 0.5**epoch
        passes = {name: iter(dl) for name, dl in own.items()}
        for _ in range(5):
            batches = [next(passes['a']), next(passes['b'], None)]
            if batches[1] is None:
                passes['b'] = iter(own['b'])  # the shorter one begins again
                batches[1] = next(passes['b'])
            opt.zero_grad()
            losses = [F.cross_entropy(by_hand.net(x), y) for x, y in batches]
            sum(losses, torch.zeros(())).backward()
            opt.step()
    assert_equal(module, by_hand)


def test_a_learner_takes_a_trainer() -> None:
    trainer = Trainer(limit_train_batches=2, **QUIET)
    learn = from_lightning(Module(), (load(36), load(20, 1)), trainer=trainer)
    with learn.no_bar():
        learn.fit(2)
    assert learn is trainer.learn and (trainer.max_epochs, trainer.global_step) == (2, 4)


def test_evaluates_and_predicts_with_lightnings_results() -> None:
    module, data, trainer = Module(), Data(), Trainer(max_epochs=1, **QUIET)
    trainer.fit(module, datamodule=data)
    assert data.calls == ['prepare_data', 'setup fit of 1', 'teardown fit']
    [tested] = trainer.test(module, datamodule=data, verbose=False)
    assert tested == {'rows': 14.0} and data.calls[-1] == 'teardown test'
    found = trainer.validate(module, [load(20, 1), load(12, 2)], verbose=False)
    names = [f'val_loss/dataloader_idx_{i}' for i in range(2)]
    assert [[*values] for values in found] == [[name] for name in names]
    predicted = trainer.predict(module, DataLoader(make_set(20), 8))
    module.eval()
    with torch.no_grad():
        assert torch.allclose(torch.cat(predicted), module.net(make_set(20)[:][0]))
    with pytest.raises(FitError, match='without a module'):
        Trainer(**QUIET).test()


def test_modes_and_hooks_of_a_module_with_its_own_loaders() -> None:
    class Own(Module):
        trainer: Any

        def setup(self, stage: str) -> None:
            self.seen = [f'{stage} {self.trainer.world_size}']
            self.rows = make_set(20)

        def train_dataloader(self) -> Any:
            return DataLoader(self.rows, 8)

        def val_dataloader(self) -> Any:
            return DataLoader(self.rows, 8)

        def on_train_epoch_end(self) -> None:
            self.seen.append(f'epoch {self.training}')

        def on_validation_end(self) -> None:
            self.seen.append(f'validation {self.training} {self.trainer.sanity_checking}')

        def teardown(self, stage: str) -> None:
            self.seen.append(f'teardown {self.training}')

    module = Own()
    Trainer(max_epochs=1, **QUIET).fit(module)
    sanity, valid = 'validation False True', 'validation False False'
    assert module.seen == ['fit 1', sanity, valid, 'epoch True', 'teardown True']
    learn = from_lightning(Own())
    with learn.no_bar():
        learn.fit(1)
    assert learn.model.seen == ['fit 1', valid, 'epoch True', 'teardown True']


class Kill(Callback):
    "Fail at a number of batches, in an event."

    order = 200

    def __init__(self, ba: int, event: str) -> None:
        self.ba = ba
        setattr(self, event, self.fail)

    def fail(self) -> None:
        learn = self.learn
        if learn.fitting and learn.time.ba >= self.ba and not learn.model.trainer.sanity_checking:
            raise InterruptedError


KILLS = {
    'batches': [(3, 'before_batch'), (8, 'before_batch')],
    'evaluations': [(5, 'before_validate'), (7, 'before_eval')],
    'ends': [(5, 'after_eval'), (10, 'after_epoch')],
}
DATA: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    'epochs': (lambda: (load(36), load(20, 1)), {}),
    'within': (
        lambda: (load(36), load(20, 1)),
        {'val_check_interval': 2, 'limit_val_batches': 2},
    ),
    'streams': (lambda: (DataLoader(Stream(), 8), DataLoader(Stream(), 8)), {}),
    'several': (lambda: ({'a': load(36), 'b': load(20, 3)}, load(20, 1)), {}),
}
# every kind of data and every kind of kill
IN_SHORT = [
    ('epochs', 'ends'),
    ('within', 'evaluations'),
    ('streams', 'batches'),
    ('several', 'batches'),
]


@pytest.mark.parametrize(
    ('name', 'kills'),
    others_in_full(itertools.product(DATA, KILLS), lambda *case: case in IN_SHORT),
)
def test_a_killed_fit_resumes_exactly(
    name: str, kills: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, options = DATA[name]
    monkeypatch.chdir(tmp_path)
    whole = Module()
    torch.manual_seed(1)
    Trainer(max_epochs=3, **options, **QUIET).fit(whole, *data())
    drawn = torch.rand(3)
    for i, kill in enumerate([*KILLS[kills], None]):
        module = Module()
        torch.manual_seed(1 if i == 0 else 7)
        cbs = [Checkpoint('1ba'), *([Kill(*kill)] if kill else [])]
        trainer = Trainer(max_epochs=3, callbacks=cbs, resume=True, **options, **QUIET)
        if kill is None:
            trainer.fit(module, *data())
        else:
            with pytest.raises(InterruptedError):
                trainer.fit(module, *data())
    assert_equal(module, whole)
    assert torch.equal(torch.rand(3), drawn) and trainer.global_step == 15


def test_a_batch_can_be_rewound_and_a_fit_paused() -> None:
    whole, module = Module(), Module()
    torch.manual_seed(1)
    Trainer(max_epochs=3, **QUIET).fit(whole, load(36), load(20, 1))

    def pause(cb: Callback) -> None:
        if cb.learn.time.ba == 7:
            cb.learn.pause()

    trainer = Trainer(max_epochs=3, callbacks=Callback(batch_checkpoint=pause), **QUIET)
    torch.manual_seed(1)
    trainer.fit(module, load(36), load(20, 1))
    assert trainer.global_step == 7 and trainer.learn.paused is not None
    with trainer.learn.no_bar():
        trainer.learn.resume()
    assert_equal(module, whole)


# value of each option that is not the default, and what a fit of 5 batches an epoch has then
WORKING: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    'accelerator': ('cpu', lambda t: t.strategy.root_device.type == 'cpu'),
    'strategy': ('ddp', lambda t: t.world_size == 1),
    'devices': (1, lambda t: t.num_devices == 1),
    'precision': ('64-true', lambda t: next(t.model.parameters()).dtype == torch.float64),
    'logger': (False, lambda t: t.logger is None),
    'callbacks': ([Callback(before_fit=lambda cb: cb.learn.stop())], lambda t: t.global_step == 1),
    'fast_dev_run': (2, lambda t: t.global_step == 2 and t.num_val_batches == [2]),
    'max_epochs': (1, lambda t: t.global_step == 5),
    'min_epochs': (1, lambda t: t.min_epochs == 1),
    'max_steps': (7, lambda t: t.global_step == 7),
    'min_steps': (3, lambda t: t.min_steps == 3),
    'limit_train_batches': (2, lambda t: t.global_step == 4),
    'limit_val_batches': (0.5, lambda t: t.num_val_batches == [1]),
    'limit_test_batches': (1, lambda t: t.test(t.model, load(20), verbose=False) == [{'rows': 8}]),
    'limit_predict_batches': (2, lambda t: len(t.predict(t.model, load(20))) == 2),
    'overfit_batches': (3, lambda t: t.num_training_batches == 3),
    'val_check_interval': (0.5, lambda t: t.val_check_batch == 2),
    'check_val_every_n_epoch': (2, lambda t: len(t.model.evaluated) == 3),
    'num_sanity_val_steps': (0, lambda t: len(t.model.evaluated) == 6),
    'log_every_n_steps': (3, lambda t: t.log_every_n_steps == 3),
    'enable_checkpointing': (False, lambda t: t.checkpoint_callback is None),
    'enable_progress_bar': (False, lambda t: t.progress_bar_callback is None),
    'enable_model_summary': (False, lambda t: not t.list_kind('ModelSummary')),
    'accumulate_grad_batches': (2, lambda t: t.global_step == 6),
    'gradient_clip_val': (0.1, lambda t: t.gradient_clip_val == 0.1),
    'gradient_clip_algorithm': ('value', lambda t: t.gradient_clip_algorithm == 'value'),
    'deterministic': ('warn', lambda t: torch.is_deterministic_algorithms_warn_only_enabled()),
    'benchmark': (False, lambda t: not torch.backends.cudnn.benchmark),
    'inference_mode': (False, lambda t: not t.inference_mode),
    'use_distributed_sampler': (False, lambda t: t.global_step == 10),
    'detect_anomaly': (True, lambda t: t.model.detected and not torch.is_anomaly_enabled()),
    'reload_dataloaders_every_n_epochs': (1, lambda t: t.global_step == 10),
    'default_root_dir': ('runs', lambda t: t.default_root_dir == 'runs'),
    'enable_autolog_hparams': (False, lambda t: not t.enable_autolog_hparams),
}
# options whose work is Lightning's own classes
OF_LIGHTNING = {'max_time': '00:00:01:00', 'profiler': 'simple'}
REFUSED = {
    'num_nodes': 2,
    'barebones': True,
    'plugins': 'async',
    'sync_batchnorm': True,
    'model_registry': 'name',
}
ALSO_REFUSED = {
    'accelerator': 'tpu',
    'strategy': 'fsdp',
    'devices': 2,
    'precision': '8',
    'profiler': 'fastest',
    'limit_train_batches': 1.5,
    'val_check_interval': '12 minutes',
}


@pytest.fixture(autouse=True)
def _restored_switches() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop('CUBLAS_WORKSPACE_CONFIG', None)


@pytest.mark.parametrize('name', WORKING)
def test_an_option_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(Module):
        detected = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.detected = torch.is_anomaly_enabled()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.evaluated = [*getattr(self, 'evaluated', []), batch_idx]
            super().validation_step(batch, batch_idx)

    monkeypatch.chdir(tmp_path)
    value, holds = WORKING[name]
    options = {**QUIET, 'max_epochs': 2, 'num_sanity_val_steps': 0, name: value}
    trainer = Trainer(**options)
    trainer.fit(Watched(), load(36), load(20, 1))
    assert holds(trainer)


@pytest.mark.parametrize(('name', 'value'), [*REFUSED.items(), *ALSO_REFUSED.items()])
def test_an_option_that_does_not_work_is_an_error_of_one_line(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name) as error:
        Trainer(**{**QUIET, name: value})
    assert '\n' not in str(error.value)


def test_the_page_names_every_option() -> None:
    own = [p for p in inspect.signature(Trainer).parameters if p != 'resume']
    assert sorted(own) == sorted({*WORKING, *OF_LIGHTNING, *REFUSED}) and len(own) == 41
    part = PAGE.read_text('utf-8').partition('### Options of the Trainer')[2].partition('###')[0]
    listed = re.findall(r'^\| `(\w+)` \| (yes|an error)', part, re.M)
    assert sorted(listed) == sorted(
        (name, 'an error' if name in REFUSED else 'yes') for name in own
    )


def test_errors_say_what_to_pass() -> None:
    with pytest.raises(OptionError, match='not both'):
        Trainer(**QUIET).fit(Module(), load(8), datamodule=Data())
    with pytest.raises(LoaderError, match='train_dataloader'):
        Trainer(**QUIET).fit(Module())
    with pytest.raises(OptionError, match='best'):
        Trainer(**QUIET).fit(Module(), load(8), ckpt_path='best')
    with pytest.raises(AttributeError, match='after the hook `setup`'):
        _ = Trainer(**QUIET).callback_metrics


@pytest.mark.parametrize('fn', ['fit', 'validate', 'test', 'predict'])
def test_one_of_several_processes_is_an_error(fn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('WORLD_SIZE', '2')
    trainer = Trainer(max_epochs=1, **QUIET)
    module = Module()
    for _ in range(2):
        with pytest.raises(OptionError, match='one of 2'):
            getattr(trainer, fn)(module, load(8))
    with pytest.raises(OptionError, match='one of 2'):
        from_lightning(module, load(8), trainer=trainer)
    assert trainer.learn is None
    monkeypatch.setenv('WORLD_SIZE', '1')
    trainer.fit(module, load(8))
    assert trainer.global_step == 1


def test_continues_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    whole, first, second = Module(), Module(), Module()
    file = tmp_path / 'epoch.ckpt'
    for module, n in ((whole, 4), (first, 2)):
        trainer = Trainer(max_epochs=n, **QUIET)
        torch.manual_seed(1)
        trainer.fit(module, load(36), load(20, 1))
    trainer.save_checkpoint(file)
    state = torch.get_rng_state()
    later = Trainer(max_epochs=4, num_sanity_val_steps=0, **QUIET)
    torch.set_rng_state(state)
    later.fit(second, load(36), load(20, 1), ckpt_path=file)
    assert (later.current_epoch, later.global_step) == (4, 20)
    assert_equal(second, whole)

    class Saves(Module):
        trainer: Any

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.save_checkpoint(file)

    Trainer(max_epochs=1, **QUIET).fit(Saves(), load(36))
    with pytest.raises(CheckpointError, match='resume=True'):
        Trainer(max_epochs=4, **QUIET).fit(Module(), load(36), ckpt_path=file)


def test_optimizers_can_be_replaced() -> None:
    class Switches(Module):
        trainer: Any

        def on_train_epoch_start(self) -> None:
            if self.trainer.current_epoch == 1:
                self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.0)]

    one, two = Module(), Switches()
    for module, n in ((one, 1), (two, 3)):
        torch.manual_seed(1)
        Trainer(max_epochs=n, **QUIET).fit(module, load(36))
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


# -- with Lightning --------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    'default': {},
    'no check': {'num_sanity_val_steps': 0},
    'within': {'val_check_interval': 0.5},
    'steps': {'max_steps': 7, 'max_epochs': None},
    'shares': {'limit_train_batches': 0.6, 'limit_val_batches': 1},
    'fast': {'fast_dev_run': 2},
    'clipped': {'accumulate_grad_batches': 2, 'gradient_clip_val': 0.1},
    'bf16': {'precision': 'bf16-mixed'},
    'overfit': {'overfit_batches': 2},
}


@pytest.mark.parametrize('stream', [False, True], ids=['rows', 'streams'])
@pytest.mark.parametrize('name', RUNS)
def test_equals_lightning(
    name: str, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec('lightning') is None:
        pytest.skip('needs lightning')
    lightning = import_module('lightning')
    if stream and name in ('shares', 'within', 'overfit'):
        pytest.skip('a loader without a length has no shares')
    monkeypatch.chdir(tmp_path)

    class Real(Steps, lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

    found = []
    for kind in (lightning.Trainer, Trainer):
        module, trainer = Real(), kind(**{**QUIET, 'max_epochs': 3, **RUNS[name]})
        train = DataLoader(Stream(), 8) if stream else load(36)
        torch.manual_seed(1)
        random.seed(1)
        trainer.fit(module, train, load(20, 1))
        values = {k: float(v) for k, v in trainer.callback_metrics.items()}
        found.append((module, values, trainer.global_step, torch.rand(1).item()))
    (a, *theirs), (b, *ours) = found
    assert_equal(a, b)
    assert theirs[1:] == ours[1:] and theirs[0] == pytest.approx(ours[0], rel=1e-6)
