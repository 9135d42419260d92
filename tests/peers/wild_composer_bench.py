"""Run callbacks and algorithms that users wrote for Composer in a learnkit Learner and in Composer's Trainer.

python -m tests.peers.wild_composer_bench [CLASS ...]   # in the environment: print rows"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.peers import composer_bench as bench
from tests.peers.composer_bench import Case, Setting
from tests.peers.rows import Row
from tests.peers.wild import Files, replace_names
from tests.peers.wild_sources import REPOSITORIES

# isort: split
import composer
import composer.core
import composer.loggers
import composer.utils
from composer import callbacks
from composer.devices import DeviceCPU
from composer.models import ComposerModel
from torchmetrics.classification import MulticlassAccuracy

NAMES = {**vars(composer), **vars(composer.core), 'composer': composer}
FILES = {key: Files(repository.name, NAMES) for key, repository in REPOSITORIES.items()}
CASES: list[tuple[str, Case]] = []
Make = Callable[[SimpleNamespace], dict[str, Any]]


def wild(repository: str, file: str, name: str, make: Make, **options: Any) -> None:
    "Add the case of a class: `make` gets the names of the file and returns arguments of a run."

    def make_arguments() -> dict[str, Any]:
        return make(FILES[repository].load(file))

    CASES.append((repository, Case(name, make_arguments, **options)))


def cbs(*found: Any) -> dict[str, Any]:
    return {'cbs': list(found)}


def algs(*found: Any) -> dict[str, Any]:
    return {'algs': list(found)}


# -- models and data -------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    "Dicts of tensors; the proportions of two domains, as a streaming data set has them."

    def __init__(self, n: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 3, 4, 4, generator=generator)
        self.y = torch.randint(4, (n,), generator=generator)
        self.proportion = [0.5, 0.5]
        self.updates: list[list[float]] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            'input_ids': self.x[i].flatten(),
            'image': self.x[i],
            'labels': self.y[i],
            'idx': i,
            'index': i,
            'set': i % 2,
            'prompt': f'row {i}',
        }

    def update_proportion(self, proportion: list[float]) -> None:
        self.proportion = proportion
        self.updates.append(proportion)


def rows_of(setting: Setting) -> tuple[Any, Any]:
    return DataLoader(Rows(48, 0), 8), DataLoader(Rows(24, 1), 8)


class Outputs(ComposerModel):
    "A classifier of dicts, whose outputs are a dict that user callbacks read."

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
        self.metrics = {f'{name}_LanguageCrossEntropy': Mean() for name in ('a', 'b')}
        self.set_names = ['a', 'b']

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        logits = self.model(batch['image'])
        masks = {'head': torch.sigmoid(logits).detach()}
        statistics = (None, {'sparsity': masks['head'].mean()})
        return {'logits': logits, 'latents': batch['image'], 'l0_output': statistics, 'zs': masks}

    ref_forward = forward

    def loss(self, outputs: dict[str, Any], batch: dict[str, Any]) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs['logits'], batch['labels'])

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return {} if is_train else self.metrics

    def update_metric(self, batch: dict[str, Any], outputs: Any, metric: Any) -> None:
        metric.update(self.loss(outputs, batch))


class Pictures(Outputs):
    "A model whose outputs are pictures."

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Conv2d(3, 3, 1)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.model(batch['image'])

    def loss(self, outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, batch['image'])


def Mean() -> Any:
    from torchmetrics import MeanMetric

    return MeanMetric()


def outputs_model(setting: Setting) -> nn.Module:
    return Outputs()


DICTS = Setting(make_loaders=rows_of, make_model=outputs_model)
PICTURES = Setting(make_loaders=rows_of, make_model=lambda setting: Pictures())
TEXT = Setting(is_text=True)
FILES_WRITTEN = bench.files_of

# -- llm-foundry -----------------------------------------------------------------------------------

F = 'llmfoundry/callbacks/'
wild('llm-foundry', F + 'fdiff_callback.py', 'FDiffMetrics', lambda m: cbs(m.FDiffMetrics()))
wild(
    'llm-foundry',
    F + 'fdiff_callback.py',
    'FDiffMetrics(diff_train_metrics=True)',
    lambda m: cbs(m.FDiffMetrics(True, True)),
)
wild(
    'llm-foundry',
    F + 'kill_loss_spike_callback.py',
    'KillLossSpike',
    lambda m: cbs(m.KillLossSpike(window_size=2, patience=1)),
)
wild(
    'llm-foundry',
    F + 'kill_loss_spike_callback.py',
    'KillLossSpike(log_only=False)',
    lambda m: cbs(m.KillLossSpike(False, patience=0, outlier_multiplier=0.5, window_size=2)),
    look_at_error=True,
)
wild(
    'llm-foundry',
    F + 'resumption_callbacks.py',
    'GlobalLRScaling',
    lambda m: cbs(m.GlobalLRScaling(0.5, 0.1), callbacks.LRMonitor()),
)
wild(
    'llm-foundry',
    F + 'resumption_callbacks.py',
    'LayerFreezing',
    lambda m: cbs(m.LayerFreezing(['module.head.weight'])),
)
wild(
    'llm-foundry',
    F + 'run_timeout_callback.py',
    'RunTimeoutCallback',
    lambda m: cbs(m.RunTimeoutCallback(1000)),
)
wild(
    'llm-foundry',
    F + 'scheduled_gc_callback.py',
    'ScheduledGarbageCollector',
    lambda m: cbs(m.ScheduledGarbageCollector(2, 1)),
)
wild(
    'llm-foundry',
    F + 'env_logging_callback.py',
    'EnvironmentLoggingCallback',
    lambda m: cbs(
        m.EnvironmentLoggingCallback(
            '.', False, False, False, False, log_gpu=True, log_distributed=True
        )
    ),
)


def tokenized(setting: Setting) -> tuple[Any, Any]:
    "Return the loaders of texts, with the tokenizer at their data set."
    train, valid = bench.loaders(Setting(is_text=True))
    for loader in (train, valid):
        loader.dataset.tokenizer = bench.language_model().tokenizer
    return train, valid


wild(
    'llm-foundry',
    F + 'eval_output_logging_callback.py',
    'EvalOutputLogging',
    lambda m: cbs(m.EvalOutputLogging()),
    setting=Setting(is_text=True, make_loaders=tokenized),
)


def gauntlet(m: SimpleNamespace) -> dict[str, Any]:
    benchmark = {'name': 'eval', 'num_fewshot': 0, 'random_baseline': 0.25}
    category = {'name': 'images', 'benchmarks': [benchmark]}
    keys = ['metrics/eval/0-shot/MulticlassAccuracy']
    return cbs(m.EvalGauntlet(keys, [category], benchmark_sizes={}))


wild(
    'llm-foundry',
    F + 'eval_gauntlet_callback.py',
    'EvalGauntlet',
    gauntlet,
    setting=Setting(label='eval/0-shot'),
)


def optimizer_of(name: str, file: str) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        return getattr(FILES['llm-foundry'].load(file), name)(*args, **kwargs)

    return make


for _name, _file in (
    ('DecoupledLionW', 'lion'),
    ('DecoupledAdaLRLion', 'adaptive_lion'),
    ('DecoupledClipLion', 'adaptive_lion'),
):
    wild(
        'llm-foundry',
        f'llmfoundry/optim/{_file}.py',
        _name,
        lambda m: cbs(callbacks.OptimizerMonitor(batch_log_interval=1)),
        setting=Setting(optimizer=optimizer_of(_name, f'llmfoundry/optim/{_file}.py'), options={}),
    )


def no_steps(parameters: Any, **options: Any) -> Any:
    return FILES['llm-foundry'].load('llmfoundry/optim/no_op.py').NoOp(parameters)


wild(
    'llm-foundry',
    'llmfoundry/optim/no_op.py',
    'NoOp',
    lambda m: cbs(),
    setting=Setting(optimizer=no_steps, options={}),
)

# -- ModernBERT ------------------------------------------------------------------------------------

wild(
    'ModernBERT',
    'src/callbacks/dataloader_speed.py',
    'DataloaderSpeedMonitor',
    lambda m: cbs(m.DataloaderSpeedMonitor()),
)
wild(
    'ModernBERT',
    'src/callbacks/packing_efficiency.py',
    'PackingEfficency',
    lambda m: cbs(m.PackingEfficency(2)),
    setting=TEXT,
)
wild(
    'ModernBERT',
    'src/callbacks/scheduled_gc.py',
    'ScheduledGarbageCollector',
    lambda m: cbs(m.ScheduledGarbageCollector(2, 1)),
)


class WithNorms(torch.optim.SGD):
    "An optimizer that keeps the norms of its gradients."

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)  # Composer's closure runs the backward pass
        grads = [p.grad for group in self.param_groups for p in group['params']]
        self.grad_norms = {f'l2/{i}': g.norm() for i, g in enumerate(grads) if g is not None}
        return loss


def gradient_norms(m: SimpleNamespace) -> dict[str, Any]:
    return cbs(replace_names(m.LogGradNorm, StableAdamW=WithNorms)(batch_log_interval=2))


wild(
    'ModernBERT',
    'src/callbacks/log_grad_norm.py',
    'LogGradNorm',
    gradient_norms,
    setting=Setting(optimizer=WithNorms),
)


class Rotary(nn.Module):
    base = 10_000


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = Rotary()


def rope(m: SimpleNamespace) -> dict[str, Any]:
    names = {'FlexBertPreTrainedModel': nn.Module, 'FlexBertAttentionBase': Attention}
    replace_names(m.FlexBertRopeSchedule, **names)
    schedule = m.FlexBertRopeSchedule(10_000, 20_000, 400, 5_000, Rotary, batch_log_interval=1)
    return algs(schedule)


def rotary_model(setting: Setting) -> nn.Module:
    model = bench.language_model()
    model.attention = Attention()
    return model


wild(
    'ModernBERT',
    'src/algorithms/rope_schedule.py',
    'FlexBertRopeSchedule',
    rope,
    setting=Setting(is_text=True, make_model=rotary_model),
)

# -- diffusion -------------------------------------------------------------------------------------

D = 'diffusion/'
wild('diffusion', D + 'algorithms/ema.py', 'EMA', lambda m: algs(m.EMA('4ba')))
wild(
    'diffusion',
    D + 'algorithms/ema.py',
    'EMA(half_life in epochs)',
    lambda m: algs(m.EMA('1ep', ema_start='0.5dur')),
    setting=bench.LONG,
)
wild(
    'diffusion',
    D + 'callbacks/log_latent_statistics.py',
    'LogLatentStatistics',
    lambda m: cbs(m.LogLatentStatistics()),
    setting=DICTS,
)
wild('diffusion', D + 'callbacks/nan_catcher.py', 'NaNCatcher', lambda m: cbs(m.NaNCatcher()))
wild(
    'diffusion',
    D + 'callbacks/nan_catcher.py',
    'NaNCatcher, on NaN',
    lambda m: cbs(m.NaNCatcher()),
    setting=Setting(options={'momentum': 0.9, 'weight_decay': float('nan')}),
    look_at_error=True,
)
wild(
    'diffusion',
    D + 'callbacks/scheduled_garbage_collector.py',
    'ScheduledGarbageCollector',
    lambda m: cbs(m.ScheduledGarbageCollector(2)),
)


class Generators(bench.ComposerClassifier):
    "A model that draws from a generator that is given to it."

    rng_generator = None

    def set_rng_generator(self, generator: torch.Generator) -> None:
        self.rng_generator = generator

    def forward(self, batch: Any) -> torch.Tensor:
        noise = torch.randn(batch[0].shape, generator=self.rng_generator)
        return super().forward((batch[0] + 0.1 * noise, batch[1]))


def pinned(m: SimpleNamespace) -> dict[str, Any]:
    return algs(replace_names(m.PinDiffusionRNG, StableDiffusion=Generators)())


wild(
    'diffusion',
    D + 'algorithms/pin_diffusion_rng.py',
    'PinDiffusionRNG',
    pinned,
    setting=Setting(make_model=lambda setting: Generators(bench.Net(), num_classes=4)),
)


class Critic(nn.Module):
    discriminator_weight = 0.5

    def set_discriminator_weight(self, weight: float) -> None:
        self.discriminator_weight = weight


def two_groups(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    first, *rest = list(parameters)
    groups = [{'params': rest}, {'params': [first], 'weight_decay': 0.1}]
    return torch.optim.SGD(groups, **options)


def critic_model(setting: Setting) -> nn.Module:
    model = bench.ComposerClassifier(bench.Net(), num_classes=4)
    model.autoencoder_loss = Critic()
    return model


wild(
    'diffusion',
    D + 'algorithms/discriminator_schedule.py',
    'DiscriminatorSchedule',
    lambda m: algs(m.DiscriminatorSchedule('4ba')),
    setting=Setting(make_model=critic_model, optimizer=two_groups),
)

# -- LLM-Shearing, examples ------------------------------------------------------------------------

L = 'llmshearing/callbacks/'
wild(
    'LLM-Shearing',
    L + 'callbacks.py',
    'DebugCallback',
    lambda m: cbs(m.DebugCallback()),
    setting=TEXT,
)
wild(
    'LLM-Shearing',
    L + 'dynamic_loading_callback.py',
    'DynamicLoadingCallback',
    lambda m: cbs(m.DynamicLoadingCallback([1.0, 1.2], [0.5, 0.5], ['a', 'b'])),
    setting=DICTS,
    look=lambda arguments: arguments['cbs'][0].used_domain_ids,
)
wild(
    'LLM-Shearing',
    L + 'pruning_callback.py',
    'PruningCallback',
    lambda m: cbs(m.PruningCallback('.')),
    setting=DICTS,
    look=FILES_WRITTEN,
)
E_ = 'examples/end-to-end-examples/stable_diffusion_dreambooth/callbacks.py'


def class_images(m: SimpleNamespace) -> dict[str, Any]:
    Path('images').mkdir()
    return cbs(m.SaveClassImages('images'))


wild('examples', E_, 'SaveClassImages', class_images, setting=PICTURES, look=FILES_WRITTEN)
wild(
    'examples',
    E_,
    'LogDiffusionImages',
    lambda m: cbs(m.LogDiffusionImages()),
    setting=PICTURES,
)

# -- the callbacks of Composer's own tests ---------------------------------------------------------

wild(
    'composer',
    'tests/common/events.py',
    'EventCounterCallback',
    lambda m: cbs(m.EventCounterCallback()),
    look=lambda arguments: {
        event.value: n for event, n in arguments['cbs'][0].event_to_num_calls.items()
    },
)
wild(
    'composer',
    'tests/trainer/test_checkpoint.py',
    'DummyStatefulCallback',
    lambda m: cbs(m.DummyStatefulCallback()),
)
wild(
    'composer',
    'tests/trainer/test_trainer.py',
    'SleepyCallback',
    lambda m: cbs(m.SleepyCallback(timedelta(milliseconds=1), m.Event.BATCH_END)),
)
wild(
    'composer',
    'tests/trainer/test_ddp.py',
    'CheckBatch0',
    lambda m: cbs(m.CheckBatch0(Path('.'))),
    look=FILES_WRITTEN,
)
wild(
    'composer',
    'tests/callbacks/test_runtime_estimator.py',
    'CheckEvalFrequency',
    lambda m: (lambda estimator: cbs(estimator, m.CheckEvalFrequency(estimator)))(
        callbacks.RuntimeEstimator()
    ),
)


def two_classes(setting: Setting) -> nn.Module:
    return bench.ComposerClassifier(nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), num_classes=2)


def two_class_rows(setting: Setting) -> tuple[Any, Any]:
    train, valid = bench.loaders(Setting())
    train.dataset.dataset.tensors[1].remainder_(2)
    return train, valid


wild(
    'composer',
    'tests/metrics/test_current_metrics.py',
    'MetricsCallback',
    lambda m: cbs(m.MetricsCallback(True)),
    setting=Setting(make_model=two_classes, make_loaders=two_class_rows),
)


def setter(unit: str, label: str) -> Make:
    def make(m: SimpleNamespace) -> dict[str, Any]:
        values = [0.1, 0.2, 0.4, 0.5]
        measured = m.MetricSetterCallback(
            'MulticlassAccuracy',
            label,
            MulticlassAccuracy,
            values,
            composer.core.TimeUnit(unit),
            DeviceCPU(),
            {'num_classes': 2, 'average': 'micro'},
        )
        patience = composer.core.Time(3, unit)
        return cbs(measured, callbacks.EarlyStopper('MulticlassAccuracy', label, patience=patience))

    return make


for _unit, _label in (('ep', 'eval'), ('ba', 'train')):
    wild(
        'composer',
        'tests/metrics/metric_setter_callback.py',
        f'MetricSetterCallback, {_label}',
        setter(_unit, _label),
        setting=Setting(duration='12ep', make_model=two_classes, make_loaders=two_class_rows),
    )


def rows(names: list[str] | None = None) -> list[Row]:
    "Return a row for each class."
    logging.disable(logging.CRITICAL)
    warnings.simplefilter('ignore')
    found = []
    for key, case in CASES:
        if names and case.name.partition('(')[0].partition(',')[0] not in names:
            continue
        row = bench.compare(case, 'Callbacks of Composer users')
        row.callback = f'{REPOSITORIES[key].name}: {row.callback}'
        found.append(row)
    return found


if __name__ == '__main__':
    for row in rows(sys.argv[1:]):
        print(row)
