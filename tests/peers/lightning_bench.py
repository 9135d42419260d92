"""Train LightningModules, and run Lightning's callbacks, in a learnkit Learner and in `L.Trainer`, and compare.

Both train on the same loaders, which have generators of their own: learnkit restores the global generator after an
evaluation, and Lightning does not. Lightning's sanity check is left out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as cbs
from lightning.pytorch.demos import boring_classes as boring
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from learnkit import Callback, Checkpoint
from learnkit.interop import from_lightning
from tests.peers import lightning_modules as lm
from tests.peers.repeated import rewind_row
from tests.peers.rows import TOO_FAR, Row, compare_numbers, quiet_folder

EPOCHS = 3


@dataclass
class Case:
    "A module, options of the trainer and callbacks."

    module: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    data: Callable[[], Any] = lm.loaders
    name: str = ''
    part: str = 'Modules'
    why: str = ''
    resumes: str = ''  # why it is not resumed; '': it is

    @property
    def label(self) -> str:
        options = ', '.join(f'{k}={v}' for k, v in self.options.items())
        name = self.name or getattr(self.module, '__name__', '')
        return f'{name}({options})' if options else name


@dataclass
class Outcome:
    "What a run trained, logged, called and wrote."

    tensors: dict[str, Tensor]
    keys: list[Any]


def cb_case(make: Callable[[], Any], name: str = '', **options: Any) -> Case:
    "Return a case of one callback."
    module = options.pop('module', lm.Classifier)
    return Case(
        module,
        callbacks=lambda: [make()],
        name=name or type(make()).__name__,
        part='Callbacks',
        **options,
    )


class FreezeBody(cbs.BaseFinetuning):
    "The first layer, from the second epoch on."

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.005)


class MetricsHistory(L.Callback):
    "A callback as users write it: a list of the metrics, saved with the checkpoint, and values of its own."

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.log('seen', float(trainer.global_step), on_epoch=True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rows.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.log('n_rows', float(len(self.rows)))

    def state_dict(self) -> dict[str, Any]:
        return {'rows': self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict['rows']


def plain_net() -> Any:
    module = lm.Classifier()
    module.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return module


def boring_loaders() -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(4)
    rows = torch.randn(11, 32, generator=g)
    other = torch.Generator().manual_seed(5)
    return DataLoader(rows, 2, shuffle=True, generator=g), DataLoader(rows[:4], 2, generator=other)


plain_net.__name__ = 'Classifier without batch norm'

MODULES = [
    Case(lm.Classifier),
    Case(lm.NoValidation),
    Case(lm.ScheduledByStep),
    Case(lm.ScheduledByStep, {'accumulate_grad_batches': 2}),
    Case(lm.ScheduledByEpoch),
    Case(lm.Plateau),
    Case(lm.Frequency),
    Case(lm.Gan),
    Case(lm.ManualClosure),
    Case(lm.Classifier, {'accumulate_grad_batches': 3}),
    Case(lm.Classifier, {'gradient_clip_val': 0.1}),
    Case(lm.Classifier, {'gradient_clip_val': 0.01, 'gradient_clip_algorithm': 'value'}),
    Case(lm.ClipsItself, {'gradient_clip_val': 0.3}),
    Case(lm.StepsItself),
    Case(lm.EverySecond),
    Case(lm.Lbfgs),
    Case(lm.LogsAll),
    Case(lm.LogsAll, {'accumulate_grad_batches': 2}),
    Case(lm.TorchMetrics),
    Case(lm.SeveralLoaders, data=partial(lm.loaders, 2)),
    Case(lm.Autoencoder),
    Case(lm.SkipsBatches),
    Case(lm.SkipsEpoch),
    Case(lm.Hyperparameters),
    Case(lm.ReadsTrainer),
    Case(lm.StopsItself),
    Case(lm.Frozen),
    Case(lm.BringsCallback),
    Case(lm.OwnLoaders, data=lambda: None),
    Case(
        lm.ScheduledByEpoch, data=lm.streams, name='ScheduledByEpoch on a loader without a length'
    ),
    Case(lm.Classifier, data=lm.Data, name='Classifier on a LightningDataModule'),
    Case(lm.Hooked, callbacks=lambda: [lm.Recording()], name='Hooked: all hooks in order'),
    Case(
        lm.Hooked,
        {'accumulate_grad_batches': 2, 'gradient_clip_val': 1.0},
        lambda: [lm.Recording()],
    ),
    Case(boring.BoringModel, data=boring_loaders),
    Case(boring.ManualOptimBoringModel, data=boring_loaders),
    Case(boring.BoringModel, data=boring.BoringDataModule, name='BoringModel on BoringDataModule'),
]

CALLBACKS = [
    cb_case(lambda: cbs.EarlyStopping('val_loss', patience=0, min_delta=0.05)),
    cb_case(
        lambda: cbs.EarlyStopping(
            'both_epoch', patience=0, check_on_train_epoch_end=True, min_delta=1.0
        ),
        'EarlyStopping(check_on_train_epoch_end=True)',
        module=lm.LogsAll,
    ),
    cb_case(
        lambda: cbs.ModelCheckpoint(
            'kept',
            filename='{epoch}-{val_loss:.3f}',
            monitor='val_loss',
            save_top_k=2,
            save_last=True,
        )
    ),
    cb_case(
        lambda: cbs.ModelCheckpoint('kept', every_n_train_steps=4, save_top_k=-1),
        'ModelCheckpoint(every_n_train_steps=4)',
    ),
    cb_case(lambda: cbs.ModelCheckpoint(), 'ModelCheckpoint()'),
    cb_case(lambda: cbs.LearningRateMonitor(log_momentum=True), module=lm.ScheduledByEpoch),
    cb_case(
        lambda: cbs.LearningRateMonitor('step'),
        'LearningRateMonitor(step)',
        module=lm.ScheduledByStep,
    ),
    cb_case(
        lambda: cbs.StochasticWeightAveraging(0.05, swa_epoch_start=1),
        module=plain_net,
        resumes='its schedule is made at the start of an epoch',
    ),
    cb_case(
        lambda: cbs.StochasticWeightAveraging(0.05, swa_epoch_start=1),
        'StochasticWeightAveraging with batch norm',
        resumes='its scheduler is made anew',
    ),
    cb_case(
        lambda: cbs.EMAWeightAveraging(decay=0.9),
        resumes='its average is in its own checkpoints only',
    ),
    cb_case(lambda: cbs.GradientAccumulationScheduler({0: 1, 1: 2})),
    cb_case(FreezeBody, 'BaseFinetuning', resumes='a new run has other param groups'),
    cb_case(
        lambda: cbs.ModelPruning('l1_unstructured', amount=0.3, parameters_to_prune=None),
        resumes='it renames parameters',
    ),
    cb_case(lambda: cbs.Timer('00:01:00:00')),
    cb_case(lambda: cbs.ModelSummary(max_depth=2)),
    cb_case(lambda: cbs.OnExceptionCheckpoint('kept')),
    cb_case(
        lambda: cbs.LambdaCallback(
            on_train_batch_end=lambda t, m, *_: m.log('doubled', 2.0 * t.global_step, on_epoch=True)
        )
    ),
    cb_case(MetricsHistory, "a user's"),
]

# modules and callbacks whose runs are rewound, too
REWOUND = (
    'Classifier',
    'ScheduledByStep(accumulate_grad_batches=2)',
    'Gan',
    'ManualClosure',
    'Lbfgs',
    'Hooked: all hooks in order',
    'BoringModel on BoringDataModule',
    'EarlyStopping',
    'ModelCheckpoint',
    "a user's",
)

DIFFERENCES = [
    Case(
        lm.Classifier,
        data=lambda: (lm.make_loader(40, 1, shuffle=True), lm.make_loader(lm.N_VALID, 2)),
        name='shuffled by a generator, all batches full',
        part='What differs',
        why='Lightning never asks for the end of the loader, where the sampler draws another order, as in a plain '
        'loop: other orders from the second epoch on',
    ),
    Case(
        lm.Classifier,
        data=lm.global_loaders,
        name='shuffled by the global generator',
        part='What differs',
        why='in Lightning the validation draws from the global generator, and here it leaves no trace: other orders '
        'from the second epoch on',
    ),
]


def make_module(case: Case) -> Any:
    torch.manual_seed(0)
    module = case.module()
    module.calls = []
    return module


def link_calls(module: Any, callbacks: list[Any]) -> None:
    "Let a module and its recording callbacks note their calls in one list."
    for cb in callbacks:
        if isinstance(cb, lm.Recording):
            cb.calls = module.calls


def read_outcome(module: Any, trainer: Any, callbacks: list[Any]) -> Outcome:
    "Return weights, values, calls and files of a run."
    metrics = {
        f'{kind} {name}': torch.as_tensor(value).double()
        for kind in ('callback_metrics', 'logged_metrics', 'progress_bar_metrics')
        for name, value in getattr(trainer, kind).items()
    }
    counts = {'epoch': trainer.current_epoch, 'step': trainer.global_step}
    tensors = {**module.state_dict(), **metrics, **{k: torch.tensor(v) for k, v in counts.items()}}
    files = sorted(str(f) for f in Path('.').rglob('*.ckpt') if f.parts[0] != 'checkpoints')
    for file in files:
        saved = torch.load(file, weights_only=False)
        tensors |= {f'{file} {k}': t for k, t in saved['state_dict'].items()}
    own = [getattr(module, 'log_text', ''), *(getattr(cb, 'rows', None) for cb in callbacks)]
    return Outcome(tensors, [module.calls, files, own])


def make_trainer(callbacks: list[Any], max_epochs: int = EPOCHS, **options: Any) -> Any:
    return L.Trainer(
        max_epochs=max_epochs,
        accelerator='cpu',
        logger=CSVLogger('.', version=0),
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(cb, cbs.Checkpoint) for cb in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def run_lightning(case: Case) -> Outcome:
    "Train in Lightning's Trainer."
    with quiet_folder():
        module, callbacks, data = make_module(case), case.callbacks(), case.data()
        link_calls(module, callbacks)
        trainer = make_trainer(callbacks, **case.options)
        torch.manual_seed(1)
        if isinstance(data, tuple):
            trainer.fit(module, *data)
        else:
            trainer.fit(module, datamodule=data)
        return read_outcome(module, trainer, callbacks)


def make_learner(case: Case, more: list[Any]) -> tuple[Any, list[Any]]:
    module, callbacks, data = make_module(case), case.callbacks(), case.data()
    link_calls(module, callbacks)
    learn = from_lightning(module, data, [*callbacks, *more], **case.options)
    learn.logger = lambda *_: None
    return learn, callbacks


def run_learner(case: Case) -> Outcome:
    "Train in a Learner."
    with quiet_folder():
        learn, callbacks = make_learner(case, [])
        torch.manual_seed(1)
        with learn.no_bar():
            learn.fit(EPOCHS)
        return read_outcome(learn.model, learn.model.trainer, callbacks)


def run_killed(case: Case) -> Outcome:
    "Train in a Learner that fails within the second epoch, and resume in another one."

    def fail(cb: Callback) -> None:
        if cb.train_iter == 7:
            raise InterruptedError

    with quiet_folder():
        for more in ([Callback(before_batch=fail, run_valid=False)], []):
            learn, callbacks = make_learner(case, [Checkpoint('1ba'), *more])
            torch.manual_seed(1 if more else 5)
            if not more:
                learn.model.calls = ['resumed']
            with learn.no_bar(), suppress(InterruptedError):
                learn.fit(EPOCHS, resume=True)
        outcome = read_outcome(learn.model, learn.model.trainer, callbacks)
        outcome.keys[0] = None  # the calls are of the second run alone
        return outcome


def compare(a: Outcome, b: Outcome) -> tuple[bool, str]:
    "Return whether names, calls and files are the same, and how close the numbers are."
    keys = all(x == y or x is None for x, y in zip(a.keys, b.keys, strict=True))
    return keys and sorted(a.tensors) == sorted(b.tensors), compare_numbers(a.tensors, b.tensors)


def run_case(case: Case, run: Callable[[Case], Outcome], theirs: Outcome, part: str) -> Row:
    try:
        keys, numbers = compare(run(case), theirs)
    except Exception as e:
        return Row(case.label, False, False, TOO_FAR, case.why or f'{type(e).__name__}: {e}', part)
    why = f'not resumed: {case.resumes}' if case.resumes else case.why
    return Row(case.label, True, keys, numbers, why, part)


def run_steps() -> list[Row]:
    "Compare validation, test and prediction of a trained module, and the file that its checkpoint wrote."
    found: list[list[dict[str, Any]]] = []
    for is_ours in (True, False):
        with quiet_folder():
            module, (train, valid) = make_module(Case(lm.AllSteps)), lm.loaders()
            keeper = cbs.ModelCheckpoint('kept')
            test = lm.make_loader(10, 7)
            if is_ours:
                learn = from_lightning(module, (train, valid), keeper)
                trainer = module.trainer
                with learn.no_bar():
                    learn.fit(1)
                    learn.validate()
                    validated = dict(trainer.callback_metrics)
                    learn.validate(dl=test)
                    tested = dict(trainer.callback_metrics)
                    predicted = learn.get_preds(dl=test)[0]
            else:
                trainer = make_trainer([keeper], max_epochs=1)
                trainer.fit(module, train, valid)
                trainer.validate(module, valid, verbose=False)
                validated = dict(trainer.callback_metrics)
                trainer.test(module, test, verbose=False)
                tested = dict(trainer.callback_metrics)
                predicted = torch.cat(trainer.predict(module, test))
            loaded = lm.AllSteps.load_from_checkpoint(keeper.best_model_path)
            weights = {**loaded.state_dict(), 'hidden': torch.tensor(loaded.hparams.hidden)}
            found.append([validated, tested, {'predicted': predicted}, weights])
    names = (
        'learn.validate()',
        'learn.validate(dl=test)',
        'learn.get_preds()',
        'load_from_checkpoint',
    )
    return [
        Row(name, True, a.keys() == b.keys(), compare_numbers(a, b), '', 'Steps')
        for name, a, b in zip(names, *found, strict=True)
    ]


def silence() -> None:
    "Let Lightning log errors only."
    for name in ('lightning.pytorch', 'lightning.fabric'):
        logging.getLogger(name).setLevel(logging.ERROR)


def rows() -> list[Row]:
    "Return a row for each module and callback, in a whole run and in one that was killed and resumed."
    silence()
    whole, resumed = [], []
    for case in [*MODULES, *CALLBACKS, *DIFFERENCES]:
        theirs = run_lightning(case)
        whole.append(run_case(case, run_learner, theirs, case.part))
        if not (case.resumes or case in DIFFERENCES):
            resumed.append(run_case(case, run_killed, theirs, 'Killed and resumed'))
    rewound = [rewind_case(case) for case in [*MODULES, *CALLBACKS] if case.label in REWOUND]
    return [*whole, *run_steps(), *resumed, *rewound]


def rewind_case(case: Case) -> Row:
    return rewind_row(case.label, lambda more: make_learner(case, more)[0], EPOCHS)
