# SPDX-License-Identifier: Apache-2.0
"""Loaders of a run: given to a Trainer, or asked of a data module or of the module."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sized
from functools import partial
from importlib import import_module
from typing import Any, cast

from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from learnkit.core.errors import LoaderError, OptionError
from learnkit.data.combined import CombinedLoader
from learnkit.data.torch_loader import rebuild
from learnkit.interop.common.hooks import LIGHTNING_BASES, own_hooks
from learnkit.interop.lightning.options import PACKAGES, find_package

KINDS = {'fit': 'train', 'validate': 'val', 'test': 'test', 'predict': 'predict'}


class LoaderSource:
    "Where the loaders of a run come from; each kind of loader is asked for once."

    def __init__(
        self,
        trainer: Any,
        module: nn.Module,
        datamodule: Any = None,  # LightningDataModule, or an object with its methods
        attached: Any = None,  # data module of an earlier run: its hooks are called, as in Lightning
        **given: Any,  # loaders by kind: train, val, test, predict
    ) -> None:
        if datamodule is not None and any(dl is not None for dl in given.values()):
            raise OptionError('Pass either loaders or `datamodule=` to the Trainer, not both.')
        self.trainer = trainer
        self.module = module
        self.datamodule = attached if datamodule is None else datamodule
        self.asked = module if datamodule is None else datamodule  # before the module itself
        self.given = given
        self.made: dict[str, Any] = {}

    def prepare(self, fn: str) -> None:
        "Call `prepare_data` of data module and module, and the data module's `setup`."
        for source in (self.datamodule, self.module):
            self._find(source, 'prepare_data', bool)()
        self._find(self.datamodule, 'setup', str)(fn)

    def tear_down(self, fn: str) -> None:
        self._find(self.datamodule, 'teardown', str)(fn)

    def _find(self, source: Any, name: str, default: Any = None) -> Any:
        return own_hooks(source, [name], LIGHTNING_BASES).get(name, default)

    def has(self, kind: str) -> bool:
        "Return True if there are loaders of a kind, which may not have been asked for."
        return self.given.get(kind) is not None or self._find_maker(kind) is not None

    def _find_maker(self, kind: str) -> Any:
        name = f'{kind}_dataloader'
        maker = self._find(self.asked, name)
        return self._find(self.module, name) if maker is None else maker

    def get(self, kind: str) -> Any:
        "Return the loaders of a kind, or None; they are asked for at the first call."
        if kind not in self.made:
            maker = self._find_maker(kind)
            found = self.given.get(kind)
            if found is None and maker is not None:
                found = maker()
            self.made[kind] = self._convert(found, kind == 'train')
        return self.made[kind]

    def ask_again(self, kind: str) -> Any:
        "Return new loaders of a kind."
        self.made.pop(kind, None)
        return self.get(kind)

    def get_train(self) -> Any:
        "Return the training loader; raise `LoaderError` if there is none."
        loader = self.get('train')
        if loader is None:
            raise LoaderError(
                f'{type(self.asked).__name__} has no `train_dataloader`: pass a loader.'
            )
        return self._prepare_loader(loader)

    def list_named(self, kind: str) -> dict[str, Any]:
        "Return loaders of an evaluation or a prediction by the names of the Learner's history."
        loaders = flatten_loaders(self.get(kind))
        names = ['valid'] if len(loaders) == 1 else [f'valid_{i}' for i in range(len(loaders))]
        return dict(zip(names, map(self._prepare_loader, loaders), strict=True))

    def _convert(self, loader: Any, is_training: bool) -> Any:
        "Return several loaders that yield their batches together as one loader."
        if is_combined(loader):
            is_one = is_training or loader._mode != 'sequential'
            return CombinedLoader(loader.iterables, loader._mode) if is_one else loader
        is_collection = isinstance(loader, (Mapping, list, tuple))
        if is_training and is_collection and flatten_loaders(loader) != [loader]:
            return CombinedLoader(loader, 'max_size_cycle')
        return loader

    def _prepare_loader(self, loader: Any) -> Any:
        "Return a loader as Lightning would train on it: in order for `overfit_batches`, with seeded workers."
        if not isinstance(loader, DataLoader):
            return loader
        is_fit = self.trainer.fn == 'fit'
        if is_fit and self.trainer.overfit_batches and hasattr(loader.dataset, '__len__'):
            loader = rebuild_in_order(loader)
        seeds_workers = bool(int(os.environ.get('PL_SEED_WORKERS', '0'))) and find_package()
        if seeds_workers and loader.num_workers and loader.worker_init_fn is None:
            loader.worker_init_fn = partial(find_worker_init(), rank=0)
        return loader


def rebuild_in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    "Return a loader that draws its samples in order, or the loader itself if it does."
    if isinstance(loader.sampler, SequentialSampler):
        return loader
    in_order = SequentialSampler(cast('Sized', loader.dataset))
    batches = BatchSampler(in_order, loader.batch_size or 1, loader.drop_last)
    return rebuild(loader, batch_sampler=batches, generator=loader.generator)


def find_worker_init() -> Any:
    "Return the function with which Lightning seeds workers after `seed_everything(workers=True)`."
    package = find_package() or PACKAGES[0]
    fabric = 'lightning.fabric' if package == PACKAGES[0] else 'lightning_fabric'
    return import_module(f'{fabric}.utilities.seed').pl_worker_init_function


def is_combined(loader: Any) -> bool:
    "Return True for Lightning's `CombinedLoader`."
    names = [f'{cls.__module__}.{cls.__name__}' for cls in type(loader).__mro__]
    return any('lightning' in name and name.endswith('.CombinedLoader') for name in names)


def flatten_loaders(loaders: Any) -> list[Any]:
    "Return the loaders of a loader, list, dict or `CombinedLoader`, in Lightning's order."
    if loaders is None:
        return []
    if is_combined(loaders):
        return list(loaders.flattened)
    if isinstance(loaders, Mapping):
        return [dl for entry in loaders.values() for dl in flatten_loaders(entry)]
    if isinstance(loaders, (list, tuple)) and all(map(is_loader, loaders)) and loaders:
        return [dl for entry in loaders for dl in flatten_loaders(entry)]
    return [loaders]


def is_loader(entry: Any) -> bool:
    "Return True for an entry of a list of loaders, in contrast to a batch."
    return isinstance(entry, DataLoader) or is_combined(entry)
