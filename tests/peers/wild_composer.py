"What callbacks and algorithms that users wrote for Composer are trained with."

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from datetime import timedelta  # noqa: F401  # the table names it
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.peers import composer_bench as bench
from tests.peers.rows import Row
from tests.peers.wild_bench import Case

# isort: split
import composer
import composer.core
import composer.loggers
import composer.utils
from composer import callbacks
from composer.devices import DeviceCPU
from composer.models import ComposerModel
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

NAMES = {**vars(composer), **vars(composer.core), 'composer': composer}
CATEGORY = {
    'name': 'images',
    'benchmarks': [{'name': 'eval', 'num_fewshot': 0, 'random_baseline': 0.25}],
}


def compare(case: Case, make: Callable[[], list[Any]]) -> list[Row]:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter('ignore')
    look_at_error = case.options.pop('look_at_error', False)

    def arguments() -> dict[str, Any]:
        found: dict[str, Any] = {'cbs': [], 'algs': []}
        for made in make():
            found['algs' if isinstance(made, composer.core.Algorithm) else 'cbs'].append(made)
        return found

    def look(made: dict[str, Any]) -> dict[str, Any]:
        return case.observe({**made, 'files': lambda: bench.files_of(made)})

    setting = bench.Setting(**case.options)
    compared = bench.Case(case.name, arguments, setting, look, look_at_error, case.why)
    return [bench.compare(compared, 'Callbacks of Composer users')]


def made(folder: str) -> str:
    Path(folder).mkdir()
    return folder


# -- dicts -----------------------------------------------------------------------------------------


class Rows(list[dict[str, Any]]):
    "Dicts of tensors; the proportions of two domains, as a streaming data set has them."

    proportion = [0.5, 0.5]

    def update_proportion(self, proportion: list[float]) -> None:
        self.proportion = proportion


def make_loader(n: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 3, 4, 4, generator=generator)
    rows = Rows()
    for i, label in enumerate(torch.randint(4, (n,), generator=generator)):
        numbers = {'labels': label, 'idx': i, 'index': i, 'set': i % 2, 'prompt': f'row {i}'}
        rows.append({'input_ids': images[i].flatten(), 'image': images[i], **numbers})
    return DataLoader(rows, 8)


def rows_of(setting: Any) -> tuple[Any, Any]:
    return make_loader(48, 0), make_loader(24, 1)


class Outputs(ComposerModel):
    "A classifier of dicts, whose outputs are a dict that user callbacks read."

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
        self.metrics = {f'{name}_LanguageCrossEntropy': MeanMetric() for name in ('a', 'b')}
        self.set_names = ['a', 'b']

    def forward(self, batch: dict[str, Any]) -> Any:
        logits = self.model(batch['image'])
        masks = {'head': torch.sigmoid(logits).detach()}
        statistics = (None, {'sparsity': masks['head'].mean()})
        return {'logits': logits, 'latents': batch['image'], 'l0_output': statistics, 'zs': masks}

    ref_forward = forward

    def loss(self, outputs: Any, batch: dict[str, Any]) -> torch.Tensor:
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

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.model(batch['image'])

    def loss(self, outputs: Any, batch: dict[str, Any]) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, batch['image'])


# -- models and optimizers of a package ------------------------------------------------------------


def tokenized(setting: Any) -> tuple[Any, Any]:
    "Return the loaders of texts, with the tokenizer at their data set."
    train, valid = bench.loaders(bench.Setting(is_text=True))
    for loader in (train, valid):
        loader.dataset.tokenizer = bench.language_model().tokenizer
    return train, valid


def own_optimizer(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda m: {'optimizer': getattr(m, name), 'options': {}}


class WithNorms(torch.optim.SGD):
    "An optimizer that keeps the norms of its gradients."

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)  # Composer's closure runs the backward pass
        grads = [p.grad for group in self.param_groups for p in group['params']]
        self.grad_norms = {f'l2/{i}': g.norm() for i, g in enumerate(grads) if g is not None}
        return loss


class Rotary(nn.Module):
    base = 10_000


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = Rotary()


def rotary_model(setting: Any) -> nn.Module:
    model = bench.language_model()
    model.attention = Attention()
    return model


class Generators(bench.ComposerClassifier):
    "A model that draws from a generator that is given to it."

    rng_generator = None

    def set_rng_generator(self, generator: torch.Generator) -> None:
        self.rng_generator = generator

    def forward(self, batch: Any) -> torch.Tensor:
        noise = torch.randn(batch[0].shape, generator=self.rng_generator)
        return super().forward((batch[0] + 0.1 * noise, batch[1]))


class Critic(nn.Module):
    discriminator_weight = 0.5

    def set_discriminator_weight(self, weight: float) -> None:
        self.discriminator_weight = weight


def critic_model(setting: Any) -> nn.Module:
    model = bench.ComposerClassifier(bench.Net(), num_classes=4)
    model.autoencoder_loss = Critic()
    return model


def two_groups(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    first, *rest = list(parameters)
    groups = [{'params': rest}, {'params': [first], 'weight_decay': 0.1}]
    return torch.optim.SGD(groups, **options)


# -- Composer's own tests --------------------------------------------------------------------------


def with_estimator(cls: type) -> list[Any]:
    estimator = callbacks.RuntimeEstimator()
    return [estimator, cls(estimator)]


def two_classes(setting: Any) -> nn.Module:
    return bench.ComposerClassifier(nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), num_classes=2)


def two_class_rows(setting: Any) -> tuple[Any, Any]:
    train, valid = bench.loaders(bench.Setting())
    train.dataset.dataset.tensors[1].remainder_(2)
    return train, valid


def set_and_stop(cls: type, unit: str, label: str) -> list[Any]:
    "Return a callback that sets a metric, and one that stops by it."
    name, options = 'MulticlassAccuracy', {'num_classes': 2, 'average': 'micro'}
    values, of_time = [0.1, 0.2, 0.4, 0.5], composer.core.TimeUnit(unit)
    setter = cls(name, label, MulticlassAccuracy, values, of_time, DeviceCPU(), options)
    patience = composer.core.Time(3, unit)
    return [setter, callbacks.EarlyStopper(name, label, patience=patience)]


CONDITIONS: dict[str, Any] = {
    'error': {'look_at_error': True},
    'nan': {'options': {'momentum': 0.9, 'weight_decay': float('nan')}},
    'long': {'duration': '6ep'},
    'label': {'label': 'eval/0-shot'},
    'text': {'is_text': True},
    'tokenized': {'is_text': True, 'make_loaders': tokenized},
    'dicts': {'make_loaders': rows_of, 'make_model': lambda setting: Outputs()},
    'pictures': {'make_loaders': rows_of, 'make_model': lambda setting: Pictures()},
    'lion': own_optimizer('DecoupledLionW'),
    'rate_lion': own_optimizer('DecoupledAdaLRLion'),
    'clip_lion': own_optimizer('DecoupledClipLion'),
    'no_op': lambda m: {'optimizer': lambda parameters, **_: m.NoOp(parameters), 'options': {}},
    'norms': {'optimizer': WithNorms},
    'rotary': {'is_text': True, 'make_model': rotary_model},
    'generators': {'make_model': lambda setting: Generators(bench.Net(), num_classes=4)},
    'critic': {'make_model': critic_model, 'optimizer': two_groups},
    'two_classes': {'make_model': two_classes, 'make_loaders': two_class_rows},
    'for_12_epochs': {'duration': '12ep'},
}
STAND_INS = {
    'StableAdamW': WithNorms,
    'FlexBertPreTrainedModel': nn.Module,
    'FlexBertAttentionBase': Attention,
    'StableDiffusion': Generators,
}
