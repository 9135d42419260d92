# SPDX-License-Identifier: Apache-2.0
"""Hints for keywords and classes that have another name in other libraries."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from inspect import signature
from itertools import chain
from typing import Any, TypeVar

from learnkit.core.errors import did_you_mean

F = TypeVar('F', bound=Callable[..., Any])

# name of a parameter in this package: names in other libraries
_KEYWORDS = {
    'n_epoch': 'epochs n_epochs num_epochs max_epochs num_train_epochs epoch',
    'cbs': 'callbacks callback cb',
    'opt_func': 'optimizer optimizers optim optimiser opt',
    'loss_func': 'loss loss_fn criterion loss_function',
    'lr': 'learning_rate base_lr',
    'lr_max': 'max_lr lr learning_rate',
    'wd': 'weight_decay',
    'bs': 'batch_size train_batch_size batchsize',
    'metrics': 'metric',
    'model': 'net module',
    'dls': 'data dataloaders loaders train_dataloader train_dataloaders train_loader train_dl',
    'train': 'train_dataloader train_dataloaders train_loader train_dl train_data',
    'dl': 'dataloader loader data',
    'valid': (
        'val validation valid_data val_data validation_data val_dataloader val_dataloaders val_loader val_dl '
        'valid_dataloader valid_loader valid_dl'
    ),
    'folder': 'dirpath save_dir save_folder directory path',
    'fname': 'filename filepath',
    'comp': 'mode',
    'keep_best': 'save_top_k',
    'active': 'steps n_steps',
    'resume': 'resume_from resume_from_checkpoint ckpt_path checkpoint',
}
_BEST_WEIGHTS = (
    '`SaveModelCallback()` saves the weights when they improve, and loads the best at the end of the fit; '
    'with `every_epoch=True` it saves every epoch, with `at_end=True` it keeps the last weights.'
)
_OF_LEARNER = (
    'Loss, optimizer and metrics belong to the Learner: '
    '`Learner(dls, model, loss_func, opt_func=Adam, metrics=accuracy)`.'
)
# parameters of another call, and names without an equal parameter: sentence to show
_ELSEWHERE = {
    'device': 'The device belongs to the data: `DataLoaders(..., device=...)`.',
    'bs': 'The batch size belongs to the data: `DataLoaders.from_tensors(..., bs=...)`.',
    'n_epoch': 'The number of epochs belongs to the fit: `learn.fit(5)`.',
    'valid': 'Validation data belongs to the data: `Learner((train, valid), model, ...)`.',
    'loss_func': _OF_LEARNER,
    'opt_func': _OF_LEARNER,
    'metrics': _OF_LEARNER,
    'keep_best': '`Checkpoint(keep_best=3)` keeps the three best checkpoints.',
    'restore_best_weights': _BEST_WEIGHTS,
    'save_best_only': _BEST_WEIGHTS,
    'load_best_model_at_end': _BEST_WEIGHTS,
}
# class of another library: class of this package with the same purpose
_CLASSES = {
    'Trainer': 'Learner',
    'LightningModule': 'Learner',
    'ModelCheckpoint': 'Checkpoint',
    'LearningRateMonitor': 'LRMonitor',
    'LearningRateScheduler': 'ParamScheduler',
    'TensorBoard': 'TensorBoardLogger',
    'WandbCallback': 'WandbLogger',
    'DataLoader': 'DataLoaders',
    'PyTorchProfiler': 'TorchProfiler',
}


def suggest_keyword(
    name: str,  # unknown keyword
    known: Collection[str],  # parameters of the function
) -> str:
    """Return a hint for an unknown keyword, as a sentence after a space, or an empty string.

    >>> suggest_keyword('callbacks', ['dls', 'cbs'])
    ' Write `cbs=`.'
    >>> suggest_keyword('metrcs', ['dls', 'metrics'])
    ' Did you mean `metrics`?'
    """
    for keyword, others in _KEYWORDS.items():
        if keyword in known and name in others.split():
            return f' Write `{keyword}=`.'
    keywords = [keyword for keyword, others in _KEYWORDS.items() if name in others.split()]
    for keyword in [name, *keywords]:
        if keyword in _ELSEWHERE and keyword not in known:
            return f' {_ELSEWHERE[keyword]}'
    return did_you_mean(name, known)


def suggest_class(
    name: str,  # unknown name of the package
    packages: dict[str, Collection[str]],  # public names of packages, by the name of the package
) -> str:
    """Return a hint for a name that the package does not have, as a sentence after a space, or an empty string.

    >>> suggest_class('EarlyStopping', {'learnkit.callbacks': ['EarlyStopping']})
    ' Write `from learnkit.callbacks import EarlyStopping`.'
    """
    class_name = _CLASSES.get(name, name)
    for package, names in packages.items():
        if class_name in names:
            return f' Write `from {package} import {class_name}`.'
    return did_you_mean(name, chain.from_iterable(packages.values()))


def check_keywords(f: F) -> F:
    "Decorate a function so that the `TypeError` for an unknown keyword has a hint."
    parameters = signature(f).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return f  # accepts every keyword
    known = frozenset(parameters)

    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not kwargs.keys() <= known:
            name = next(name for name in kwargs if name not in known)
            hint = suggest_keyword(name, sorted(known))
            raise TypeError(
                f'{f.__qualname__}() got an unexpected keyword argument {name!r}.{hint}'
            )
        return f(*args, **kwargs)

    return call  # type: ignore[return-value]  # the signature is that of `f`
