"Run every callback, logger and algorithm that runs in Composer here in a learnkit Learner and in Composer's Trainer."

from __future__ import annotations

import io
import logging
import os
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.peers.rows import (
    EQUAL,
    TOO_FAR,
    Row,
    compare_numbers,
    import_torchvision,
    quiet_folder,
    snippets,
)

import_torchvision()

import composer.algorithms as algorithms  # noqa: E402  # after the operators
import composer.callbacks as callbacks  # noqa: E402
from composer import Callback, Evaluator, Trainer  # noqa: E402
from composer.loggers import ConsoleLogger, FileLogger, InMemoryLogger, ProgressBarLogger  # noqa: E402
from composer.models import ComposerClassifier, HuggingFaceModel  # noqa: E402
from composer.optim import DecoupledAdamW  # noqa: E402
from tokenizers import Tokenizer, pre_tokenizers  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from torchmetrics import Metric  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast  # noqa: E402

from learnkit import Checkpoint, DataLoaders, Learner  # noqa: E402
from learnkit.interop import from_composer  # noqa: E402

# names, or beginnings of names, of values that no two runs share
OF_THE_MACHINE = tuple(
    'throughput/ time/train time/val time/total time/remaining cpu_ disk_ network_'.split()
)
# hyperparameters that describe Composer and the machine
OF_TRAINER = tuple(
    'composer_version composer_commit_hash num_nodes num_cpus_per_node node_name rank_zero_seed'.split()
)


class Net(nn.Module):
    "A small network of images 1 x 6 x 6."

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(torch.relu(self.norm(self.conv(x)))).flatten(1))


class Seed(Callback):
    "Seed the generators at each batch: loaders draw from them, in learnkit not in evaluation."

    def init(self, state: Any, logger: Any) -> None:
        seed(0)

    def before_dataloader(self, state: Any, logger: Any) -> None:
        seed(int(state.timestamp.batch))


def seed(n: int) -> None:
    torch.manual_seed(n)
    np.random.seed(n)
    random.seed(n)


@dataclass
class Setting:
    "What both sides train."

    duration: str = '2ep'
    microbatch: int | None = None
    is_text: bool = False  # a language model of Hugging Face, instead of a classifier of images
    train_metrics: bool = True  # whether the model measures training batches
    optimizer: Callable[..., Any] = torch.optim.SGD
    options: dict[str, Any] = field(default_factory=lambda: {'momentum': 0.9})
    eval_interval: str = '1ep'
    label: str = 'eval'  # of the validation set
    make_model: Callable[[Setting], nn.Module] | None = None
    make_loaders: Callable[[Setting], tuple[Any, Any]] | None = None


@dataclass
class Outcome:
    "What is left after a run."

    weights: dict[str, torch.Tensor]
    log: dict[str, list[tuple[int, Any]]]  # batches and values, by name
    hyperparameters: dict[str, Any]
    tables: dict[str, str] = field(default_factory=dict)
    error: str = ''


def loaders(setting: Setting) -> tuple[DataLoader[Any], DataLoader[Any]]:
    "6 training batches and 3 validation batches, of 8 samples each, in one order in each epoch."
    if setting.make_loaders is not None:
        return setting.make_loaders(setting)
    generator = torch.Generator().manual_seed(0)
    data: Any
    if setting.is_text:
        ids = torch.randint(1, 4, (72, 6), generator=generator)
        data = [{'input_ids': i, 'labels': i, 'attention_mask': torch.ones_like(i)} for i in ids]
    else:
        x = torch.randn(72, 1, 6, 6, generator=generator)
        data = TensorDataset(x, torch.randint(4, (72,), generator=generator))
    return DataLoader(Subset(data, range(48)), 8), DataLoader(Subset(data, range(48, 72)), 8)


class WithoutTrainMetrics(ComposerClassifier):
    "A classifier that measures validation batches alone."

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return {} if is_train else super().get_metrics(is_train)


def make_model(setting: Setting) -> nn.Module:
    torch.manual_seed(2)
    if setting.make_model is not None:
        return setting.make_model(setting)
    if setting.is_text:
        return language_model()
    kind = ComposerClassifier if setting.train_metrics else WithoutTrainMetrics
    return kind(Net(), num_classes=4)


def language_model() -> HuggingFaceModel:
    words = Tokenizer(WordLevel({'[PAD]': 0, 'a': 1, 'b': 2, 'c': 3, '[EOS]': 4}, '[PAD]'))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token='[PAD]', eos_token='[EOS]'
    )
    config = GPT2Config(vocab_size=5, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    return HuggingFaceModel(GPT2LMHeadModel(config), tokenizer=tokenizer, use_logits=True)


def in_composer(
    setting: Setting, cbs: Sequence[Any] = (), algs: Sequence[Any] = (), loggers: Sequence[Any] = ()
) -> Outcome:
    "Train with Composer's Trainer."
    model, memory = make_model(setting), InMemoryLogger()
    train, valid = loaders(setting)
    trainer = Trainer(
        model=model,
        train_dataloader=train,
        eval_dataloader=Evaluator(label=setting.label, dataloader=valid),
        optimizers=setting.optimizer(model.parameters(), lr=0.05, **setting.options),
        device_train_microbatch_size=setting.microbatch,
        eval_interval=setting.eval_interval,
        callbacks=[Seed(), *cbs],
        algorithms=list(algs),
        loggers=[memory, *loggers],
        max_duration=setting.duration,
        progress_bar=False,
        device='cpu',
        seed=0,
        run_name='peer',
    )
    try:
        trainer.fit()
        error = ''
    except Exception as e:
        error = describe(e)
    trainer.close()
    return outcome(model, memory, error)


def make_learner(setting: Setting, *cbs: Any) -> Learner:
    "Return a Learner with the same model, optimizer and data."
    train, valid = loaders(setting)
    model = make_model(setting)
    return Learner(
        DataLoaders(train, {setting.label: valid}),
        model,
        opt_func=setting.optimizer(model.parameters(), lr=0.05, **setting.options),
        microbatch=setting.microbatch,
        eval_every=setting.eval_interval,
        cbs=cbs,
        path='peer',
    )


def in_learnkit(
    setting: Setting, cbs: Sequence[Any] = (), algs: Sequence[Any] = (), loggers: Sequence[Any] = ()
) -> Outcome:
    "Train with a Learner."
    memory = InMemoryLogger()
    adapted = [from_composer(cb) for cb in (Seed(), *cbs, *algs, memory, *loggers)]
    learn = make_learner(setting, *adapted)
    error = ''
    with learn.no_bar(), learn.no_logging():
        try:
            learn.fit(setting.duration)
        except Exception as e:
            error = describe(e)
    learn.close()
    return outcome(learn.model, memory, error)


def describe(e: Exception) -> str:
    if os.environ.get('PEERS_TRACE'):
        traceback.print_exception(e)
    return f'{type(e).__name__}: {e}'.splitlines()[0]


def outcome(model: nn.Module, memory: InMemoryLogger, error: str) -> Outcome:
    log = {
        name: [(int(t.batch), value) for t, value in entries]
        for name, entries in memory.data.items()
    }
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    own = memory.hyperparameters.items()
    hyperparameters = {name: value for name, value in own if name not in OF_TRAINER}
    return Outcome(weights, log, hyperparameters, memory.tables, error)


# -- comparison ------------------------------------------------------------------------------------


@dataclass
class Case:
    "What is added to a run, and what is compared of it beside weights and log."

    name: str
    make: Callable[[], dict[str, Any]]  # arguments of `in_composer`, in an empty folder
    setting: Setting = field(default_factory=Setting)
    look: Callable[[dict[str, Any]], Any] | None = None  # f(arguments): what is compared, too
    look_at_error: bool = False  # whether both end with the same error, as they should
    why: str = ''


def is_of_machine(name: str) -> bool:
    return name.startswith(OF_THE_MACHINE)


def numbers_of(o: Outcome) -> dict[str, torch.Tensor]:
    "Return weights, steps and logged values by name, without values that depend on the machine."
    found = {f'weights/{name}': value for name, value in o.weights.items()}
    for name, entries in o.log.items():
        found[f'steps/{name}'] = torch.tensor([step for step, _ in entries])
        if not is_of_machine(name):
            values = [float(value) for _, value in entries]
            found[f'values/{name}'] = torch.tensor(values, dtype=torch.float64)
    return found


def run_case(case: Case, run: Callable[..., Outcome]) -> tuple[Outcome, Any]:
    "Run one side in an empty folder, without its output; return what `look` sees, too."
    with quiet_folder(), redirect_stderr(io.StringIO()):
        try:
            arguments = case.make()
            outcome = run(case.setting, **arguments)
            seen = case.look(arguments) if case.look and not outcome.error else None
            return outcome, seen
        except Exception as e:
            return Outcome({}, {}, {}, error=describe(e)), None


def print_differences(
    name: str, theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]
) -> None:
    for key in theirs.keys() | ours.keys():
        a, b = theirs.get(key), ours.get(key)
        if a is None or b is None or a.shape != b.shape or not torch.equal(a, b):
            print(name, key, a, b, sep='\n')


def compare_error(case: Case, theirs: Outcome, ours: Outcome, part: str) -> Row:
    "Return the row of a callback that ends the run with an error."
    numbers = compare_numbers(numbers_of(theirs), numbers_of(ours))
    if os.environ.get('PEERS_TRACE'):
        print(case.name, theirs.error, ours.error, sep='\n')
    same = theirs.error == ours.error
    return Row(case.name, same, theirs.log.keys() == ours.log.keys(), numbers, case.why, part)


def compare(case: Case, part: str) -> Row:
    "Run both sides and return the row."
    theirs, their_view = run_case(case, in_composer)
    ours, our_view = run_case(case, in_learnkit)
    if case.look_at_error and ours.error:
        return compare_error(case, theirs, ours, part)
    if theirs.error and ours.error:
        return Row(case.name, False, True, EQUAL, case.why or f'Composer too: {theirs.error}', part)
    if ours.error or theirs.error:
        why = case.why or ours.error or f'only Composer: {theirs.error}'
        return Row(case.name, not ours.error, False, TOO_FAR, why, part)
    same_log = theirs.log.keys() == ours.log.keys()
    same_parameters = theirs.hyperparameters == ours.hyperparameters
    if os.environ.get('PEERS_TRACE'):
        print_differences(case.name, numbers_of(theirs), numbers_of(ours))
    numbers = compare_numbers(numbers_of(theirs), numbers_of(ours))
    if their_view != our_view or theirs.tables != ours.tables:
        numbers = TOO_FAR
        if os.environ.get('PEERS_TRACE'):
            print(case.name, their_view, our_view, sep='\n')
    why = case.why
    if not why and any(map(is_of_machine, theirs.log)):
        why = 'values depend on the clock and the machine: names and steps are compared'
    return Row(case.name, True, same_log and same_parameters, numbers, why, part)


# -- what is run -----------------------------------------------------------------------------------


def one(make: Callable[[], Any], kind: str = 'cbs') -> Callable[[], dict[str, Any]]:
    "Return a function that makes the arguments with one callback, algorithm or logger."
    return lambda: {kind: [make()]}


def files_of(arguments: dict[str, Any]) -> list[str]:
    "Return the names of all files in the folder."
    return sorted(str(p) for p in Path().rglob('*') if p.is_file())


def checkpoints(arguments: dict[str, Any]) -> dict[str, Any]:
    "Return, by file, sums of the weights and of the optimizer, and the counts of the timestamp."
    found: dict[str, Any] = {}
    for name in files_of(arguments):
        state = torch.load(name, weights_only=False)['state']
        counts = state.get('timestamp', {}).get('Timestamp', {})
        found[name] = {
            'weights': {k: v.double().sum().item() for k, v in state['model'].items()},
            'optimizers': sorted(state.get('optimizers', {})),
            'counts': {k: v for k, v in counts.items() if isinstance(v, int)},
        }
    return found


def text_of(arguments: dict[str, Any]) -> str:
    "Return what a logger wrote, without what depends on the machine."
    [logger] = arguments['loggers']
    if isinstance(logger, FileLogger):
        text = Path('log.txt').read_text('utf-8')
    else:
        logger.stream.seek(0)
        text = logger.stream.read()
    lines = (line.strip() for line in text.splitlines())
    of_trainer = (*OF_TRAINER, '{}')  # no other hyperparameters
    return '\n'.join(line for line in lines if not any(name in line for name in of_trainer))


def log_file() -> FileLogger:
    return FileLogger('log.txt', capture_stdout=False, capture_stderr=False, log_traces=False)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 1, 6, 6), torch.zeros(2, dtype=torch.long)


def saved_weights() -> str:
    "Write a file that Composer's LoadCheckpoint reads."
    torch.manual_seed(9)
    model = ComposerClassifier(Net(), num_classes=4)
    torch.save({'state': {'model': model.state_dict()}}, 'weights.pt')
    return 'weights.pt'


LONG = Setting(duration='6ep')
CALLBACKS = [
    Case('ActivationMonitor', one(lambda: callbacks.ActivationMonitor('2ba'))),
    Case(
        'CheckpointSaver',
        one(lambda: callbacks.CheckpointSaver('files', save_interval='4ba')),
        look=checkpoints,
    ),
    Case(
        'CheckpointSaver, weights_only=True',
        one(lambda: callbacks.CheckpointSaver('files', weights_only=True)),
        look=checkpoints,
    ),
    Case(
        'EarlyStopper',
        one(lambda: callbacks.EarlyStopper('CrossEntropy', 'eval', patience=1, min_delta=9.0)),
        LONG,
    ),
    Case(
        'EarlyStopper, training metric',
        one(lambda: callbacks.EarlyStopper('MulticlassAccuracy', 'train', patience='3ba')),
        LONG,
    ),
    Case(
        'ExportForInferenceCallback',
        one(
            lambda: callbacks.ExportForInferenceCallback(
                'torchscript', 'model.pt', sample_input=example()
            )
        ),
        look=files_of,
    ),
    Case('FreeOutputs', one(callbacks.FreeOutputs), Setting(train_metrics=False)),
    Case(
        'Generate',
        one(lambda: callbacks.Generate(['a b'], '3ba', max_new_tokens=3)),
        Setting(is_text=True),
    ),
    Case('ImageVisualizer', one(lambda: callbacks.ImageVisualizer('2ba'))),
    Case(
        'LoadCheckpoint',
        one(lambda: callbacks.LoadCheckpoint(saved_weights(), load_weights_only=True)),
    ),
    Case('LRMonitor', one(callbacks.LRMonitor)),
    Case('MemoryMonitor', one(callbacks.MemoryMonitor), why='logs on a GPU only, in both'),
    Case('MemorySnapshot', one(callbacks.MemorySnapshot), why='writes on a GPU only, in both'),
    Case(
        'MLPerfCallback',
        one(lambda: callbacks.MLPerfCallback('files', 0)),
        why='Composer too: ImportError, its package mlperf_logging is not on the index',
    ),
    Case('NaNMonitor', one(callbacks.NaNMonitor)),
    Case('OOMObserver', one(callbacks.OOMObserver), why='writes on a GPU only, in both'),
    Case(
        'OptimizerMonitor',
        one(lambda: callbacks.OptimizerMonitor(batch_log_interval=1)),
        Setting(optimizer=DecoupledAdamW, options={}),
    ),
    Case('RuntimeEstimator', one(callbacks.RuntimeEstimator)),
    Case('SpeedMonitor', one(lambda: callbacks.SpeedMonitor(window_size=2))),
    Case('SystemMetricsMonitor', one(callbacks.SystemMetricsMonitor)),
    Case(
        'ThresholdStopper',
        one(lambda: callbacks.ThresholdStopper('CrossEntropy', 'eval', 10.0, comp='less')),
        LONG,
    ),
    Case(
        'ThresholdStopper, training metric',
        one(
            lambda: callbacks.ThresholdStopper(
                'MulticlassAccuracy', 'train', 0.6, stop_on_batch=True
            )
        ),
        LONG,
    ),
]

LOGGERS = [
    Case(
        'ConsoleLogger', one(lambda: ConsoleLogger('2ba', io.StringIO()), 'loggers'), look=text_of
    ),
    Case('FileLogger', one(log_file, 'loggers'), look=text_of),
    Case('InMemoryLogger', dict),
    Case(
        'ProgressBarLogger',
        one(lambda: ProgressBarLogger(open('bar.txt', 'w+')), 'loggers'),  # noqa: SIM115  # closed with it
        why='what it prints depends on the clock; it is run',
    ),
]


def algorithm(name: str, why: str = '', **options: Any) -> Case:
    make = getattr(algorithms, name)
    return Case(name, one(lambda: make(**options), 'algs'), why=why)


NEEDS_DATASET = 'Composer too: it needs the data set of images'
COUNTS_DRAWN = (
    'weights and metrics are equal; `time/sample` counts trained samples, in Composer the samples of '
    'the batch that the algorithm reduces'
)
NEEDS_MODEL = 'Composer too: it needs a model of Hugging Face'
ALGORITHMS = [
    algorithm('Alibi', max_sequence_length=8),
    algorithm('AugMix', NEEDS_DATASET),
    algorithm('BlurPool', replace_maxpools=False, min_channels=1),
    algorithm('ChannelsLast'),
    algorithm('ColOut'),
    algorithm('CutMix'),
    algorithm('CutOut'),
    algorithm('EMA', half_life='4ba'),
    algorithm('Factorize', min_channels=1, latent_channels=2, min_features=1, latent_features=2),
    algorithm('GatedLinearUnits', NEEDS_MODEL),
    algorithm('GhostBatchNorm', ghost_batch_size=4),
    algorithm('GradientClipping', clipping_type='norm', clipping_threshold=0.5),
    algorithm('GyroDropout'),
    algorithm('LabelSmoothing'),
    algorithm('LayerFreezing', freeze_start=0.1, freeze_level=0.8),
    algorithm('LowPrecisionGroupNorm'),
    algorithm('LowPrecisionLayerNorm'),
    algorithm('MixUp'),
    algorithm('ProgressiveResizing'),
    algorithm('RandAugment', NEEDS_DATASET),
    algorithm('SAM', 'it replaces the optimizer: use `SAM` of learnkit'),
    algorithm('SWA', swa_start='0.5dur', swa_end='0.9dur', update_interval='2ba'),
    algorithm('SelectiveBackprop', COUNTS_DRAWN, start=0.0, end=1.0),
    algorithm('SeqLengthWarmup', NEEDS_MODEL),
    algorithm('SqueezeExcite', latent_channels=2, min_channels=1),
    algorithm('StochasticDepth', target_layer_name='ResNetBottleneck'),
    algorithm('WeightStandardization', n_last_layers_ignore=2),
]


# -- events ----------------------------------------------------------------------------------------


class Reader(Callback):
    "Keep the events in order, each with readings of the state."

    def __init__(self) -> None:
        self.events: list[str] = []
        self.readings: list[dict[str, Any]] = []

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        self.events.append(event.value)
        self.readings.append(read_state(event.value, state))

    def close(self, state: Any, logger: Any) -> None:
        self.events.append('close')

    def post_close(self) -> None:
        self.events.append('post_close')


COUNTS = 'iteration epoch batch sample token epoch_in_iteration token_in_iteration batch_in_epoch sample_in_epoch'
# events at which the outputs of the batch exist in a Learner
WITH_OUTPUTS = ('after_forward', 'before_loss', 'after_loss', 'before_backward', 'after_backward')
WITH_OUTPUTS += ('after_train_batch', 'batch_end', 'eval_after_forward', 'eval_batch_end')


def read_state(event: str, state: Any) -> dict[str, Any]:
    "Return 30 readings of a state, by name."
    # a Learner is made before the length of its fit is known
    end = None if event == 'init' else state.max_duration
    elapsed = None if end is None else state.get_elapsed_duration()
    previous = state.previous_timestamp
    grads = [p.grad for p in state.model.parameters() if p.grad is not None]
    counts = {name: int(getattr(state.timestamp, name)) for name in COUNTS.split()}
    return counts | {
        'previous batch': None if previous is None else int(previous.batch),
        'previous batch_in_epoch': None if previous is None else int(previous.batch_in_epoch),
        'eval batch': int(state.eval_timestamp.batch),
        'eval sample': int(state.eval_timestamp.sample),
        'max_duration': end and end.to_timestring(),
        'elapsed': None if elapsed is None else elapsed.value,
        'label': state.dataloader_label,
        'length': state.dataloader_len and int(state.dataloader_len),
        'samples of the loader': state.dataloader and len(state.dataloader.dataset),
        'microbatch': state.device_train_microbatch_size,
        'batch': None if state.batch is None else [add(t) for t in state.batch],
        'outputs': add(state.outputs) if event in WITH_OUTPUTS else None,
        'loss': add(state.loss),
        'total_loss_dict': dict(state.total_loss_dict),
        'training': state.model.training,
        'gradients': [add(g) for g in grads],
        'evaluators': [evaluator.label for evaluator in state.evaluators],
        'weights': [add(p) for p in state.model.parameters()],
        'rates': [group['lr'] for opt in state.optimizers for group in opt.param_groups],
        'training metrics': computed(state.train_metrics),
        'evaluation metrics': {k: computed(v) for k, v in state.eval_metrics.items()},
        'precision': state.precision.value,
    }


def add(t: torch.Tensor) -> float:
    return t.detach().double().sum().item()


def computed(metrics: dict[str, Any]) -> dict[str, float | None]:
    "Return the values of metrics; None for a metric without an update."
    return {
        name: float(m.compute()) if getattr(m, '_update_count', 1) else None
        for name, m in metrics.items()
    }


def compare_events(name: str, setting: Setting) -> Row:
    "Compare every event, and the readings at each."
    theirs, ours = Reader(), Reader()
    run_case(Case(name, lambda: {'cbs': [theirs]}, setting), in_composer)
    run_case(Case(name, lambda: {'cbs': [ours]}, setting), in_learnkit)
    n = sum(a == b for a, b in zip(theirs.events, ours.events, strict=False))
    pairs = list(zip(theirs.readings, ours.readings, strict=False))
    equal = theirs.readings == ours.readings
    found = [
        (e, k) for e, (a, b) in zip(ours.events, pairs, strict=False) for k in a if a[k] != b[k]
    ]
    why = f'{n} of {len(theirs.events)} events in order, with {len(pairs[0][0])} readings of the state at each'
    if found:
        why += f'; differs: {list(found)[:9]}'
    in_order = theirs.events == ours.events
    return Row(name, bool(ours.events), in_order, EQUAL if equal else TOO_FAR, why, 'Events')


EVENTS = {
    'a fit with evaluation': Setting(),
    'a fit with microbatches': Setting(microbatch=4),
    'a fit that ends within an epoch': Setting(duration='8ba', microbatch=4),
}


# -- stoppers --------------------------------------------------------------------------------------


class Given(Metric):
    "A metric with a given value."

    def __init__(self, given: float) -> None:
        super().__init__()
        self.given = given

    def update(self, *args: Any) -> None:
        pass

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.given)


class Measure(Callback):
    "Replace a metric by one with the next value, at the ends of batches or of evaluations."

    def __init__(self, label: str) -> None:
        self.label, self.n = label, 0

    def next_metric(self) -> Given:
        values = (0.1, 0.2, 0.4, 0.5, 0.6, 0.55, 0.5, 0.7)
        metric = Given(values[min(self.n, len(values) - 1)])
        self.n += 1
        return metric

    def batch_end(self, state: Any, logger: Any) -> None:
        if self.label == 'train':
            state.train_metrics['m'] = self.next_metric()

    def eval_end(self, state: Any, logger: Any) -> None:
        if self.label == 'eval':
            state.eval_metrics['eval']['m'] = self.next_metric()


def stop_cases() -> Iterator[tuple[Callable[[], Any], Setting, str]]:
    "Yield stoppers, the setting, and the label of the metric that they follow: 36."
    within = Setting('400sp', eval_interval='4ba')
    for label, setting in (('train', LONG), ('eval', Setting('50ba')), ('eval', within)):
        for patience in (1, '2ep', '3ep', '1ba', '3ba', '4ba', '7ba'):
            yield partial(callbacks.EarlyStopper, 'm', label, patience=patience), setting, label
        for options in ({'comp': torch.less}, {'min_delta': 0.15}):
            make = partial(callbacks.EarlyStopper, 'm', label, patience='5ba', **options)
            yield make, setting, label
        for limit, comp, on_batch in (
            (0.45, None, False),
            (0.45, torch.greater, True),
            (0.3, 'less', True),
        ):
            options = {'comp': comp, 'stop_on_batch': on_batch}
            yield partial(callbacks.ThresholdStopper, 'm', label, limit, **options), setting, label


class LastTime(Callback):
    "Keep the time at which the fit ends."

    def fit_end(self, state: Any, logger: Any) -> None:
        time = state.timestamp
        self.end = int(time.epoch), int(time.batch), int(time.sample)


def find_stop(
    make: Callable[[], Any], setting: Setting, label: str, run: Callable[..., Outcome]
) -> Any:
    "Return epoch, batch and sample at which a fit ends, or its error."
    last = LastTime()
    case = Case('', lambda: {'cbs': [Measure(label), make(), last]}, setting)
    outcome, _ = run_case(case, run)
    return outcome.error or last.end


def compare_stops() -> Row:
    "Compare where fits end."
    cases = list(stop_cases())
    different = []
    for make, setting, label in cases:
        ends = [find_stop(make, setting, label, run) for run in (in_composer, in_learnkit)]
        if ends[0] != ends[1] or isinstance(ends[0], str):
            different.append((label, setting.eval_interval, make.keywords or make.args, *ends))
    n_equal = len(cases) - len(different)
    why = '; '.join(map(str, different))
    return Row(
        f'{n_equal} of {len(cases)} settings end the fit at the same sample',
        not different,
        True,
        TOO_FAR if different else EQUAL,
        why,
        'EarlyStopper and ThresholdStopper',
    )


# -- resume, and the guide -------------------------------------------------------------------------


def stopper_and_saver() -> list[Any]:
    stopper = callbacks.EarlyStopper('CrossEntropy', 'eval', patience='2ep', min_delta=9.0)
    return [stopper, callbacks.CheckpointSaver('files', overwrite=True)]


def resumed(setting: Setting) -> Outcome:
    "Train 2 epochs with a `Checkpoint`, and resume in a new Learner."
    for resume in (False, True):
        memory = InMemoryLogger()
        adapted = [from_composer(cb) for cb in (Seed(), *stopper_and_saver(), memory)]
        learn = make_learner(setting, *adapted, Checkpoint('1ep'))
        with learn.no_bar(), learn.no_logging():
            learn.fit(setting.duration if resume else '2ep', resume=resume)
        learn.close()
    return outcome(learn.model, memory, '')


def compare_resumed() -> Row:
    "Compare a resumed fit with a whole one of Composer."
    name = 'EarlyStopper and CheckpointSaver with Checkpoint'
    case = Case(name, lambda: {'cbs': stopper_and_saver()}, LONG, files_of)
    theirs, their_files = run_case(case, in_composer)
    ours, files = run_case(
        Case(name, dict, LONG, files_of), lambda setting, **arguments: resumed(setting)
    )
    own = [f for f in files or () if f.startswith('files')]
    numbers = compare_numbers(numbers_of(theirs), numbers_of(ours))
    same_files = own == their_files
    return Row(
        name,
        not ours.error,
        same_files and ours.log.keys() == theirs.log.keys(),
        numbers,
        ours.error,
        'Resume',
    )


GUIDE = Path(__file__).resolve().parents[2] / 'nbs' / 'from_composer.ipynb'
GUIDE_IMPORTS = """
from functools import partial
import numpy as np, torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from composer import *
from composer.algorithms import *
from composer.models import ComposerClassifier, ComposerModel
digits = load_digits()
x, y = digits.data.astype('float32') / 16, digits.target
def mlp(): return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
"""


def run_guide() -> None:
    "Run Composer's side of the guide, section by section; what needs a GPU may say so."
    names: dict[str, Any] = {}
    exec(GUIDE_IMPORTS, names)
    # a progress bar needs a file with a descriptor
    with quiet_folder(), open(os.devnull, 'w') as void, redirect_stderr(void):
        for _, code in snippets(GUIDE):
            try:
                exec(code, names)
            except ValueError as e:
                if 'not supported for CPU' not in str(e):
                    raise


def rows() -> list[Row]:
    "Return a row for each callback, logger and algorithm of Composer, and for its events."
    logging.disable(logging.CRITICAL)
    run_guide()
    found = [compare(case, 'Callbacks') for case in CALLBACKS]
    found += [compare(case, 'Loggers') for case in LOGGERS]
    found += [compare(case, 'Algorithms') for case in ALGORITHMS]
    found += [compare_events(name, setting) for name, setting in EVENTS.items()]
    return [*found, compare_stops(), compare_resumed()]
