# SPDX-License-Identifier: Apache-2.0
"""Kinds of objects that may be passed in a wrong place, and where they belong, for error messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    "Objects of one kind."

    noun: str  # what such an object is, as 'a model'
    place: str  # what to do with it, as a sentence; `{name}` is the name of its class
    classes: tuple[str, ...]  # full names of classes, or modules and packages of classes
    maker: str = ''  # function that converts it to a Callback


def _of_library(library: str, maker: str, *classes: str) -> Kind:
    place = f'pass it to `{maker}` of `learnkit.interop`'
    return Kind(f'a callback of {library}', place, classes, maker)


CALLBACK = Kind('a callback', 'pass it in `cbs=`', ('learnkit.engine.callback.Callback',))
LOSS = Kind('a loss', 'pass it as `loss_func=`', ('torch.nn.modules.loss', 'learnkit.losses'))
METRIC = Kind('a metric', 'pass it in `metrics=`', ('torchmetrics', 'learnkit.metrics'))
OPTIMIZER = Kind(
    'an optimizer', 'pass its class, `opt_func={name}`', ('torch.optim.optimizer.Optimizer',)
)
MODEL = Kind(
    'a model',
    'pass it as the second argument, `Learner(dls, model)`',
    ('torch.nn.modules.module.Module',),
)
DATA = Kind(
    'data',
    'pass it as the first argument, `Learner(dls, model)`',
    ('torch.utils.data', 'learnkit.data', 'datasets.arrow_dataset', 'datasets.dataset_dict'),
)
DATA_MODULE = Kind(
    'a data module',
    'pass it as the second argument, `from_lightning(module, data)`',
    ('lightning.pytorch.core.datamodule', 'pytorch_lightning.core.datamodule'),
)
LIGHTNING_TRAINER = Kind(
    'the trainer of Lightning',
    'pass its options by name, as in `from_lightning(module, data, gradient_clip_val=0.5)`; '
    '`max_epochs=3` is `learn.fit(3)`',
    ('lightning.pytorch.trainer', 'pytorch_lightning.trainer'),
)
# the first kind that fits counts
KINDS = (
    CALLBACK,
    _of_library(
        'Lightning', 'from_lightning', 'lightning.pytorch.callbacks', 'pytorch_lightning.callbacks'
    ),
    _of_library('Keras', 'from_keras', 'keras.src.callbacks', 'keras.callbacks'),
    _of_library('Composer', 'from_composer', 'composer.core.callback', 'composer.core.algorithm'),
    _of_library(
        "Hugging Face's Trainer", 'from_hf', 'transformers.trainer_callback.TrainerCallback'
    ),
    _of_library('ksuit', 'from_ksuit', 'ksuit.callbacks', 'noether.core.callbacks'),
    LOSS,
    METRIC,
    Kind(
        'a scheduler',
        'pass it in `cbs=`, as `LRScheduler(partial({name}, ...))`',
        ('torch.optim.lr_scheduler',),
    ),
    OPTIMIZER,
    DATA,
    DATA_MODULE,
    Kind(
        'a LightningModule',
        '`from_lightning(module, data)` returns a Learner that trains it',
        ('lightning.pytorch.core.module', 'pytorch_lightning.core.module'),
    ),
    MODEL,
    Kind('a model of Keras', 'a Learner trains PyTorch modules', ('keras.src.models',)),
    LIGHTNING_TRAINER,
    Kind(
        'the trainer of another library',
        'a Learner takes its place, so pass the model, the data and the callbacks to `Learner`',
        (
            'transformers.trainer.Trainer',
            'composer.trainer.trainer.Trainer',
            'ksuit.trainers',
            'noether.training.trainers',
            'fastai.learner.Learner',
        ),
    ),
    Kind(
        'a part of the trainer of another library',
        'callbacks receive it from their adapter',
        (
            'composer.core.engine',
            'composer.core.state',
            'composer.loggers.logger.Logger',
            'transformers.trainer_callback.TrainerState',
            'transformers.trainer_callback.TrainerControl',
        ),
    ),
    Kind(
        "the options of Hugging Face's Trainer",
        'a callback reads them with `from_hf(callback, args)`',
        ('transformers.training_args.TrainingArguments',),
    ),
    Kind('a training loop', 'call its own `fit`', ('learnkit.learner.Learner',)),
)


def find_kind(o: Any) -> Kind | None:
    """Return the kind of an object or class, or None.

    >>> import torch
    >>> find_kind(torch.nn.MSELoss()).noun, find_kind(torch.nn.Linear).noun, find_kind(print)
    ('a loss', 'a model', None)
    """
    cls = o if isinstance(o, type) else type(o)
    names = [f'{base.__module__}.{base.__qualname__}.' for base in cls.__mro__]
    for kind in KINDS:
        prefixes = tuple(f'{name}.' for name in kind.classes)
        if any(name.startswith(prefixes) for name in names):
            return kind
    return None


def explain_kind(
    o: Any,  # object in a wrong place
    expected: str,  # what was expected, as 'a callback'
) -> str:
    """Return a sentence with the kind of an object and its place, or an empty string for an unknown kind.

    >>> import torch
    >>> explain_kind(torch.optim.SGD, 'a callback')
    'SGD is an optimizer, not a callback: pass its class, `opt_func=SGD`.'
    """
    kind = find_kind(o)
    if kind is None:
        return ''
    name = (o if isinstance(o, type) else type(o)).__name__
    return f'{name} is {kind.noun}, not {expected}: {kind.place.format(name=name)}.'
