"""Objects in the place of another one are refused in one line that names what they are and where they belong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import SGD, Callback, DataLoaders, EarlyStoppingCallback, Learner
from learnkit.core.errors import (
    CallbackError,
    LearnkitError,
    LoaderError,
    LossError,
    MetricError,
    ModelError,
    OptimizerError,
    OptionError,
)
from learnkit.core.kinds import KINDS, explain_kind, find_kind
from learnkit.interop import from_composer, from_hf, from_keras, from_ksuit, from_lightning
from learnkit.metrics import AccumMetric, accuracy


def stand_in(module: str, name: str, *bases: type, **methods: Any) -> Any:
    "Return an instance of a class as another library defines it."
    cls = type(name, bases, {'__module__': module, **methods})
    return type(name, (cls,), {})()  # of a subclass, as users write it


def do_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    pass


BATCHES = [(torch.zeros(2, 2), torch.zeros(2, 1))]
LINEAR = nn.Linear(2, 1)
OPT = torch.optim.SGD(LINEAR.parameters(), lr=0.1)
# what an object is, and a part of the advice
OTHERS: dict[str, tuple[Any, str]] = {
    'a model': (LINEAR, 'Learner(dls, model)'),
    'a loss': (nn.MSELoss(), '`loss_func=`'),
    'a metric': (torchmetrics.MeanMetric(), '`metrics=`'),
    'a metric of this package': (AccumMetric(accuracy), '`metrics=`'),
    'an optimizer': (OPT, '`opt_func=SGD`'),
    'a scheduler': (torch.optim.lr_scheduler.StepLR(OPT, 1), '`LRScheduler(partial(StepLR, ...))`'),
    'a loader': (DataLoader(TensorDataset(torch.zeros(2))), 'first argument'),
    'loaders': (DataLoaders(BATCHES), 'first argument'),
    'a Learner': (Learner(BATCHES, nn.Linear(2, 1)), 'its own `fit`'),
    'a LightningModule': (
        stand_in('lightning.pytorch.core.module', 'LightningModule', nn.Module, log=do_nothing),
        'from_lightning(module, data)',
    ),
    'a data module': (
        stand_in('lightning.pytorch.core.datamodule', 'LightningDataModule', setup=do_nothing),
        'from_lightning(module, data)',
    ),
    'the trainer of Lightning': (
        stand_in('lightning.pytorch.trainer.trainer', 'Trainer', fit=do_nothing),
        'gradient_clip_val=',
    ),
    "Hugging Face's Trainer": (
        stand_in(
            'transformers.trainer', 'Trainer', log_metrics=do_nothing, training_step=do_nothing
        ),
        'a Learner takes its place',
    ),
    'the Trainer of Composer': (
        stand_in('composer.trainer.trainer', 'Trainer', close=do_nothing),
        'a Learner takes its place',
    ),
    'a model of Keras': (
        stand_in('keras.src.models.model', 'Model', fit=do_nothing),
        'PyTorch modules',
    ),
}
CALLBACKS = {
    'from_lightning': stand_in(
        'lightning.pytorch.callbacks.callback', 'Callback', on_train_end=do_nothing
    ),
    'from_keras': stand_in('keras.src.callbacks.callback', 'Callback', on_train_end=do_nothing),
    'from_composer': stand_in('composer.core.callback', 'Callback', epoch_end=do_nothing),
    'from_hf': stand_in('transformers.trainer_callback', 'TrainerCallback', on_log=do_nothing),
    'from_ksuit': stand_in('ksuit.callbacks.base', 'CallbackBase', after_epoch=do_nothing),
}
MAKERS: dict[str, Callable[..., Any]] = {
    'from_lightning': from_lightning,
    'from_keras': from_keras,
    'from_composer': from_composer,
    'from_hf': from_hf,
    'from_ksuit': from_ksuit,
}


def make(**options: Any) -> Learner:
    options = {'dls': BATCHES, 'model': nn.Linear(2, 1), 'loss_func': nn.MSELoss(), **options}
    return Learner(options.pop('dls'), options.pop('model'), **options)


def refuses(
    call: Callable[[], Any], *parts: str, error: type[LearnkitError] = CallbackError
) -> None:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert '\n' not in message and len(message) < 240
    assert all(part in message for part in parts), message


@pytest.mark.parametrize('maker', MAKERS)
def test_an_adapter_takes_callbacks_alone(maker: str) -> None:
    make_callback = MAKERS[maker]
    for name, (o, advice) in OTHERS.items():
        if maker == 'from_lightning' and isinstance(o, nn.Module):
            advice, error = 'training_step', ModelError
        else:
            error = CallbackError
        refuses(partial(make_callback, o), type(o).__name__, advice, error=error)
        if name != 'a LightningModule':
            assert not isinstance(o, Callback)
    for o in (object(), 3, None, 'name', {'a': 1}, print):
        refuses(partial(make_callback, o), 'has no method such as')
    for other, cb in CALLBACKS.items():
        if other == maker:
            assert isinstance(make_callback(cb), Callback)
        else:
            refuses(partial(make_callback, cb), f'pass it to `{other}`')
    refuses(partial(make_callback, type(LINEAR)), 'Linear')
    refuses(partial(make_callback, EarlyStoppingCallback()), f'needs no {maker}')


def test_callbacks_are_callbacks() -> None:
    for o, advice in OTHERS.values():
        for do in (
            lambda o=o: make(cbs=[o]),
            lambda o=o: make().add_cb(o),
            lambda o=o: make().fit(1, cbs=[o]),
        ):
            refuses(do, f'{type(o).__name__} is', 'not a learnkit callback', advice)
    for maker, cb in CALLBACKS.items():
        refuses(lambda cb=cb: make(cbs=cb), f'pass it to `{maker}`')


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.n_prepared = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def prepare_data(self) -> None:
        self.n_prepared += 1

    def train_dataloader(self) -> Any:
        return BATCHES


def test_a_trainer_is_refused_before_anything_has_happened() -> None:
    trainer = OTHERS['the trainer of Lightning'][0]
    module = Module()
    refuses(lambda: from_lightning(module, BATCHES, trainer), 'gradient_clip_val=0.5')
    refuses(lambda: from_lightning(module, None, [trainer]), 'gradient_clip_val=0.5')
    refuses(lambda: from_lightning(module, trainer), 'gradient_clip_val=0.5', error=LoaderError)
    refuses(lambda: from_lightning(trainer, module), 'gradient_clip_val=0.5', error=ModelError)
    refuses(
        lambda: from_lightning(module, BATCHES, trainer=trainer),
        'gradient_clip_val=0.5',
        error=OptionError,
    )
    kind = type(CALLBACKS['from_lightning'])
    refuses(lambda: from_lightning(module, BATCHES, kind), 'is a class')
    assert not hasattr(trainer, 'trainer') and not hasattr(module, 'trainer')
    assert len(from_lightning(module, BATCHES, CALLBACKS['from_lightning']).cbs) > 0


@pytest.mark.parametrize(
    ('place', 'error', 'fits'),
    [
        ('model', ModelError, ('a model', 'a LightningModule')),
        ('dls', LoaderError, ('a loader', 'loaders')),
        (
            'loss_func',
            LossError,
            ('a loss', 'a model', 'a LightningModule', 'a metric', 'a metric of this package'),
        ),
        (
            'metrics',
            MetricError,
            ('a loss', 'a model', 'a LightningModule', 'a metric', 'a metric of this package'),
        ),
        ('opt_func', OptimizerError, ('an optimizer',)),
    ],
)
def test_other_arguments(place: str, error: type[LearnkitError], fits: tuple[str, ...]) -> None:
    for name, (o, advice) in OTHERS.items():
        if name in fits:
            continue
        refuses(lambda o=o: make(**{place: o}).create_opt(), advice, error=error)
    cb = EarlyStoppingCallback()
    refuses(lambda: make(**{place: cb}).create_opt(), '`cbs=`', error=error)
    make(opt_func=SGD, metrics=[nn.MSELoss(), torchmetrics.MeanMetric()]).create_opt()


def test_each_kind_has_a_name_and_a_place() -> None:
    assert len({kind.noun for kind in KINDS}) == len(KINDS)
    assert explain_kind(print, 'a callback') == '' and find_kind(Callback) is KINDS[0]
