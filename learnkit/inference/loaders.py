# SPDX-License-Identifier: Apache-2.0
"""Choose the loader to evaluate or predict on."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from learnkit.core.batch import (
    describe,
    short_repr,
)
from learnkit.core.errors import (
    LoaderError,
)
from learnkit.core.random import (
    preserved_rng,
)
from learnkit.data.dataloaders import DataLoaders, check_loader, make_unshuffled
from learnkit.data.shard import unshard
from learnkit.data.tensors import is_rows

if TYPE_CHECKING:
    from learnkit.learner import Learner


def plan_loader(
    learn: Learner, ds_idx: int, dl: Any, reorder: bool, sort: bool = False
) -> tuple[Any, Tensor | None]:
    "Return the loader to predict on, and the permutation that reorders its samples, or None if they are in order."
    is_given = dl is not None
    dl = choose_loader(learn, ds_idx, dl)
    if not reorder:
        return dl, None
    if not callable(getattr(dl, 'get_idxs', None)):
        return make_unshuffled(dl), None
    with preserved_rng():  # `get_idxs` may draw samples
        # a loader that was passed is used unchanged: `new` would lose its sample weights
        if not is_given or dl.drop_last:
            dl = dl.new(shuffle=False, drop_last=False)
        idxs = list(_draw_idxs(dl))
        if not all(isinstance(i, (int, np.integer)) for i in idxs):
            return dl, None
        idxs = learn.world.broadcast([int(i) for i in idxs])
        # unlike a lambda, a partial can be pickled for loader workers
        ordered_dl = dl.new(get_idxs=partial(list, sorted(idxs) if sort else idxs))
    return ordered_dl, None if sort else torch.tensor(idxs).argsort(stable=True)


def choose_loader(learn: Learner, ds_idx: int, dl: Any) -> Any:
    "Return the requested loader; for a shard, the loader that was sharded."
    dl = get_loader(learn, ds_idx) if dl is None else resolve_loader(learn, dl)
    return unshard(dl)


def find_loader_name(learn: Learner, ds_idx: int | None, dl: Any) -> str | None:
    "Return the name in `dls` of the requested loader, or None if it has no name there."
    if not isinstance(learn.dls, DataLoaders):
        return None
    named_loaders = learn.dls.list_named()
    if isinstance(dl, str):
        return dl
    if dl is not None:
        return next((name for name, loader in named_loaders if loader is dl), None)
    if isinstance(ds_idx, int) and ds_idx in range(len(named_loaders)):
        return named_loaders[ds_idx][0]
    return None


def resolve_loader(learn: Learner, dl: Any) -> Any:
    "Return a loader, given by its name in `dls` or as an object; raise `LoaderError` if it is neither."
    if isinstance(dl, str):
        return get_loader(learn, dl)
    if is_rows(dl):
        raise LoaderError(
            f'dl is {describe(dl)}, no batches: pass `dl=[(x,)]`, with targets `dl=[(x, y)]`, or '
            '`dl=TensorLoader(x, bs=64)`.'
        )
    # `train_ds` is read first: reading `valid` of a single loader of fastai would split its data set
    if isinstance(dl, DataLoaders) or (hasattr(dl, 'train_ds') and hasattr(dl, 'valid')):
        raise LoaderError(
            f'dl is a {type(dl).__name__}, of several loaders: pass its `.train` or its `.valid`.'
        )
    check_loader('dl', dl)
    return dl


def get_loader(learn: Learner, ds_idx: int | str) -> Any:
    "Return a loader of `dls` by its index or name; raise `LoaderError` if it does not exist."
    try:
        return learn.dls[ds_idx]
    except TypeError:
        raise LoaderError(
            f'ds_idx={short_repr(ds_idx)} is not the number of a loader: a loader is given as `dl=`.'
        ) from None
    except (IndexError, KeyError):
        loader = 'validation loader' if ds_idx == 1 else f'loader {ds_idx!r}'
        raise LoaderError(
            f'There is no {loader}: pass one to `DataLoaders(train, valid)`, or pass `dl=`.'
        ) from None


def _draw_idxs(dl: Any) -> list[Any]:
    "Return the next indices of a fastai loader, and restore the loader's random generator."
    rng: Any = getattr(dl, 'rng', None)
    state = rng.getstate() if isinstance(rng, random.Random) else None
    try:
        return list(dl.get_idxs())
    finally:
        if state is not None:
            rng.setstate(state)
