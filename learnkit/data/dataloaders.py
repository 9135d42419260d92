# SPDX-License-Identifier: Apache-2.0
"""`DataLoaders`, the training and validation loaders of a run, and `TensorLoader`, a loader of in-memory tensors.

A loader is any iterable of batches, with or without a length: a torch DataLoader, a list, a generator."""

from __future__ import annotations

from collections import UserList
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset

from learnkit.core.batch import BatchForm
from learnkit.core.device import check_device, find_accelerator, has_streams, pins_memory
from learnkit.core.errors import EmptyLoaderError, LoaderError
from learnkit.core.files import as_local_path
from learnkit.core.hints import check_keywords
from learnkit.core.html import never_raising, table
from learnkit.core.kinds import explain_kind
from learnkit.core.validation import check_count
from learnkit.data.evaluator import Evaluator, named_loaders
from learnkit.data.preserve import undisturbed_loader
from learnkit.data.show import first_batch, first_samples, own_method, show_samples
from learnkit.data.tensors import are_inputs_and_targets, are_rows_apart, as_rows, is_rows
from learnkit.data.torch_loader import iterates_as_torch, torch_in_order


def default_device() -> torch.device:
    """Return the device to train on: the accelerator (CUDA, ROCm, XPU, MPS ...), else the CPU.

    The call creates no context on the device.

    >>> isinstance(default_device(), torch.device)
    True
    """
    return find_accelerator() or torch.device('cpu')


class DataLoaders:
    """A training loader, any number of validation loaders, and the device that batches are moved to.

    `dls[0]` is the training loader. The validation loaders follow, then the others. `dls['valid']` works too.

    `n_inp` splits batches that are tuples. `n_inp` is a number or a dict from loader names to numbers:
    `n_inp={'train': 2, 'valid': 1}`. `targets` names the targets of batches that are dicts, in the order of the loss
    function's arguments: `targets=('boxes', 'labels')`. In prediction, a batch may lack all targets.

    `n_iter` defines epochs for a training loader without a length (a stream): each epoch has `n_iter` batches and
    continues where the previous epoch ended, within a fit and across fits. An exhausted loader is iterated from its
    start again. The worker processes of a DataLoader stay alive between epochs.

    A loader whose `len()` raises an error has no length. If a loader yields a different number of batches than its
    `len()`, a fit warns, and expects the real number from the next epoch on.

    Raises `LoaderError` for an object that is not a loader, such as a list of loaders. Raises `EmptyLoaderError` for a
    loader without batches. Raises `BatchError` for a batch that does not have the declared form; validation loaders
    are checked before the first step.

    >>> batches = [(torch.zeros(4, 2), torch.zeros(4))] * 3
    >>> dls = DataLoaders(batches, {'day': batches[:2], 'night': batches[:1]})
    >>> [(name, len(dl)) for name, dl in dls.evaluation]
    [('day', 2), ('night', 1)]
    >>> dls
    DataLoaders
      train: list, 3 batches
      day: list, 2 batches
      night: list, 1 batch
    """

    targets: tuple[str, ...] | None = None

    @check_keywords
    def __init__(
        self,
        train: Iterable[Any],  # the training loader
        valid: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,  # loader, or dict by name
        *others: Iterable[Any],  # further loaders, such as the loader of a test set
        device: torch.device | str | None = None,  # device of batches; None: `default_device()`
        path: str | Path = '.',  # folder of the data and of saved files
        n_inp: int | Mapping[str, int] | None = None,  # inputs in a tuple; None: all but the last
        targets: str | Iterable[str] | None = None,  # target keys of a dict; None: `labels`, ...
        n_iter: int | None = None,  # batches per epoch of a training loader without a length
    ):
        named = named_loaders(valid)
        self.train = train
        self.evaluators = {name: dl for name, dl in named if isinstance(dl, Evaluator)}
        self.evaluation = [(name, dl.dl if isinstance(dl, Evaluator) else dl) for name, dl in named]
        self.others = list(others)
        self.n_inp: int | Mapping[str, int] | None = n_inp
        self.n_iter = n_iter
        self.path = as_local_path(path)
        self.targets = as_names(targets)
        self._device = None if device is None else check_device(device)

        for name, dl in self.list_named():
            check_no_loaders(name, dl)
            check_loader(name, dl)
        check_n_inp(n_inp, self.targets, [name for name, _ in self.list_named()])
        if n_iter is not None:
            check_count('n_iter', n_iter, error=LoaderError)

    def batch_form(
        self,
        name: str = 'train',  # name of the loader
    ) -> BatchForm:
        """Return how the batches of a loader are split into inputs and targets.

        >>> dls = DataLoaders([(1, 2, 3)], [(1, 3)], n_inp={'train': 2, 'valid': 1})
        >>> dls.batch_form('train').n_inp, dls.batch_form('valid').n_inp
        (2, 1)
        """
        n_inp = self.n_inp
        n = n_inp.get(name) if isinstance(n_inp, Mapping) else n_inp
        dl = self.train if name == 'train' else dict(self.list_named()).get(name)
        return BatchForm(n, self.targets, has_parts=getattr(dl, 'gives_parts', False))

    @classmethod
    def from_datasets(
        cls,
        train_ds: Any,  # training samples: a torch Dataset or any sequence
        valid_ds: Any = None,  # validation samples, or a dict of data sets by name
        bs: int = 64,  # samples per batch
        *,
        shuffle: bool = True,  # shuffle the training samples
        drop_last: bool = False,  # drop a smaller last training batch
        num_workers: int = 0,  # worker processes per loader
        seed: int | None = None,  # seed of the training order; None: torch's global generator
        device: torch.device | str | None = None,  # as in `DataLoaders`, like the next four
        path: str | Path = '.',
        n_inp: int | Mapping[str, int] | None = None,
        n_iter: int | None = None,
        targets: str | Iterable[str] | None = None,
        **kwargs: Any,  # for torch's DataLoader; `sampler`, `generator`: the training loader only
    ) -> Self:
        """Make a torch DataLoader of each data set, with pinned memory if there is an accelerator.

        >>> dls = DataLoaders.from_datasets([(i, i % 2) for i in range(10)], bs=4, shuffle=False)
        >>> dls.one_batch()
        [tensor([0, 1, 2, 3]), tensor([0, 1, 0, 1])]
        """
        check_count('bs', bs, error=LoaderError)
        valid_sets = named_loaders(valid_ds)
        for name, ds in [('train', train_ds), *valid_sets]:
            check_dataset(name, ds)
        if seed is not None:
            kwargs['generator'] = make_generator(seed, kwargs.get('generator'))
        train_only = {k: kwargs.pop(k) for k in ('sampler', 'generator') if k in kwargs}
        shared = {
            'batch_size': bs,
            'num_workers': num_workers,
            'pin_memory': has_streams(default_device()),
            **kwargs,
        }

        shuffle = (
            shuffle
            and not isinstance(train_ds, IterableDataset)
            and train_only.get('sampler') is None
        )
        train: Any = DataLoader(
            train_ds, shuffle=shuffle, drop_last=drop_last, **train_only, **shared
        )
        valid: dict[str, Any] = {name: DataLoader(ds, **shared) for name, ds in valid_sets}
        return cls(
            train,
            valid or None,
            device=device,
            path=path,
            n_inp=n_inp,
            n_iter=n_iter,
            targets=targets,
        )

    @classmethod
    def from_tensors(
        cls,
        train: Any,  # (x, y), a tuple of tensors, arrays or data frames, or a dict of them by name
        valid: Any = None,  # the same for validation, or a dict of such sets by loader name
        bs: int = 64,  # samples per batch
        *,
        shuffle: bool = True,  # shuffle the training samples
        drop_last: bool = False,  # drop a smaller last training batch
        seed: int | None = None,  # seed of the training order; None: drawn from torch's generator
        device: torch.device | str | None = None,  # device of the tensors; None: unchanged
        **kwargs: Any,  # `path`, `n_inp`, `n_iter`, `targets`, as in `DataLoaders`
    ) -> Self:
        """Make a `TensorLoader` of each set of tensors.

        A dict of tensors is one set, whose batches are dicts. A dict of tuples or dicts makes one validation loader
        per entry.

        >>> x = torch.arange(6.)
        >>> dls = DataLoaders.from_tensors((x, 2 * x), {'low': (x[:3], x[:3]), 'high': (x[3:], x[3:])}, bs=4)
        >>> [len(b) for b in dls['low']], len(dls.train)
        ([2], 2)
        """

        def load(tensors: Any, **options: Any) -> TensorLoader:
            entries = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
            return TensorLoader(*entries, bs=bs, device=device, **options)

        if are_inputs_and_targets(train, valid):
            raise LoaderError(
                'from_tensors(x, y) trains on `x` and validates on `y`. With targets it is '
                '`from_tensors((x, y))`, and with a validation set `from_tensors((x, y), (xv, yv))`.'
            )
        train_loader = load(train, shuffle=shuffle, drop_last=drop_last, seed=seed)
        valid_loader: Any = None
        if isinstance(valid, Mapping) and not any(map(is_rows, valid.values())):
            valid_loader = {name: load(tensors) for name, tensors in valid.items()}
        elif valid is not None:
            valid_loader = load(valid)
        return cls(train_loader, valid_loader, device=device, **kwargs)

    @property
    def valid(self) -> Any:
        "The first validation loader, or None."
        return self.evaluation[0][1] if self.evaluation else None

    @property
    def loaders(self) -> list[Any]:
        "All loaders: training, validation, others."
        return [dl for _, dl in self.list_named()]

    @property
    def train_ds(self) -> Any:
        "The data set of the training loader, or None."
        return getattr(self.train, 'dataset', None)

    @property
    def valid_ds(self) -> Any:
        "The data set of the first validation loader, or None."
        return getattr(self.valid, 'dataset', None)

    @property
    def device(self) -> torch.device:
        "The device that batches are moved to; by default chosen at the first access."
        if self._device is None:
            self._device = default_device()
        return self._device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        self._device = check_device(device)

    def to(self, device: torch.device | str) -> Self:
        """Move all following batches to `device`.

        >>> DataLoaders([(torch.zeros(2), torch.ones(2))]).to('cpu').device
        device(type='cpu')
        """
        self.device = device
        return self

    def cpu(self) -> Self:
        "Move all following batches to the CPU."
        return self.to('cpu')

    def cuda(self) -> Self:
        "Move all following batches to a GPU of CUDA or ROCm."
        return self.to('cuda')

    def one_batch(self) -> Any:
        """Return the first batch of the training loader, and restore the loader and all random generators.

        A loader that is an iterator loses the batch.

        >>> DataLoaders([(torch.zeros(2), torch.ones(2))]).one_batch()
        (tensor([0., 0.]), tensor([1., 1.]))
        """
        with undisturbed_loader(self.train):
            for batch in self.train:
                return batch
        raise EmptyLoaderError(
            f'The training loader ({type(self.train).__name__}) returned no batch. Is it used up, or '
            'its data set empty?'
        )

    def show_batch(
        self,
        b: Any = None,  # batch to show; None: the first batch of the loader
        max_n: int = 9,  # maximum number of samples
        ds_idx: int | str = 0,  # loader: 0 for training, 1 for validation, or a name
        **kwargs: Any,  # `figsize` in inches for images; arguments of the data's own `show_batch`
    ) -> Any:
        """Show samples of a batch with their targets, images in a grid, other inputs as a table; return the drawing.

        Images are (N, C, H, W) or (N, H, W), uint8 or float. Float values outside of 0 to 1 are rescaled to that
        range, all images alike. Class names come from `dls.vocab` if the attribute exists. A method
        `show_batch(max_n=...)` of the loader or its data set takes precedence. Loaders and random generators are
        restored afterwards: the training order does not change.

        Raises `OptionError` if there is no batch to show.

        >>> dls = DataLoaders.from_tensors((torch.tensor([[0.5, 1.], [2., 4.]]), torch.tensor([0, 1])), shuffle=False)
        >>> dls.vocab = ['cat', 'dog']
        >>> dls.show_batch()
        x[0]  x[1]  target
         0.5     1     cat
           2     4     dog
        """
        check_count('max_n', max_n)
        dl = self[ds_idx]
        show = own_method(dl, 'show_batch')
        if show is not None:
            return show(max_n=max_n, **kwargs) if b is None else show(b, max_n=max_n, **kwargs)
        name = ds_idx if isinstance(ds_idx, str) else self.list_named()[ds_idx][0]
        xb, yb = first_samples(first_batch(dl) if b is None else b, self.batch_form(name), max_n)
        return show_samples(xb, {'target': yb}, getattr(self, 'vocab', None), **kwargs)

    def list_named(self) -> list[tuple[str, Any]]:
        "Return all loaders with their names: the training loader, the validation loaders, and others."
        return [
            ('train', self.train),
            *self.evaluation,
            *((f'other{i}', dl) for i, dl in enumerate(self.others)),
        ]

    def __getitem__(self, key: int | str) -> Any:
        if not isinstance(key, str):
            return self.loaders[key]
        named = dict(self.list_named())
        if key not in named:
            raise KeyError(f'There is no loader {key!r}, only {", ".join(map(repr, named))}.')
        return named[key]

    def __len__(self) -> int:
        return len(self.loaders)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loaders)

    def __repr__(self) -> str:
        lines = [f'  {name}: {describe_loader(dl)}' for name, dl in self.list_named()]
        return '\n'.join([type(self).__name__, *lines])

    @never_raising
    def _repr_html_(self) -> str:
        rows = [
            (name, describe_loader(dl), n_batches(getattr(dl, 'dataset', None)))
            for name, dl in self.list_named()
        ]
        return table(['name', 'loader', 'samples'], rows, type(self).__name__)


class TensorLoader:
    """Loader of in-memory tensors. It indexes whole batches, which is many times faster than collating samples.

    A batch is a tuple with one entry per tensor, or a dict if the tensors were given as a dict. Batches are
    copies: a change of a batch in place leaves the data as they are. Batches of CPU tensors are in pinned memory if
    this process has used an accelerator.

    `generator` draws one permutation per epoch, when iteration begins. Raises `LoaderError` for tensors of different
    lengths or devices, and `EmptyLoaderError` for empty tensors.

    >>> loader = TensorLoader(torch.arange(5), torch.arange(5) ** 2, bs=2)
    >>> [x.tolist() for x, y in loader]
    [[0, 1], [2, 3], [4]]
    """

    @check_keywords
    def __init__(
        self,
        *tensors: Any,  # tensors, arrays, data frames or lists of one length; or one dict of them
        bs: int = 64,  # samples per batch
        shuffle: bool = False,  # draw a new order each epoch
        drop_last: bool = False,  # drop a smaller last batch
        generator: torch.Generator | None = None,  # CPU generator that draws the order
        seed: int | None = None,  # seed of the order; None: drawn from torch's global generator
        device: torch.device | str | None = None,  # device of the tensors; None: unchanged
    ):
        self.bs = check_count('bs', bs, error=LoaderError)
        named = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], Mapping) else None
        self.names = None if named is None else tuple(named)
        entries = dict(enumerate(tensors)) if named is None else named
        self.tensors = convert_to_tensors(entries, None if device is None else check_device(device))
        self.n = len(self.tensors[0])
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        if seed is not None:
            generator = make_generator(seed, generator)
        elif generator is None and shuffle:
            generator = make_generator(int(torch.empty((), dtype=torch.int64).random_()))
        self.generator = generator

    def new(self, **changes: Any) -> TensorLoader:
        """Return a loader of the same tensors with changed options.

        If the new loader shuffles, its order starts from `seed`, or from a drawn seed if `seed` is None."""
        options: dict[str, Any] = {
            'bs': self.bs,
            'shuffle': self.shuffle,
            'drop_last': self.drop_last,
        }
        if 'generator' not in changes:
            options['seed'] = self.seed
        tensors = self.tensors if self.names is None else (self._make_dict(self.tensors),)
        return type(self)(*tensors, **{**options, **changes})

    @property
    def dataset(self) -> Dataset[Any]:
        "The data set of single samples, each a tuple or dict like the batches."
        tensors: tuple[Any, ...] = self.tensors
        if self.names is None:
            return StackDataset(*tensors)
        return StackDataset(**self._make_dict(tensors))

    def __len__(self) -> int:
        return self.n // self.bs if self.drop_last else -(-self.n // self.bs)

    def __iter__(self) -> Iterator[Any]:
        return self.from_batch(0)

    def from_batch(self, n: int) -> Iterator[Any]:
        """Begin an epoch at batch `n`; the order is drawn as for a whole epoch, and earlier batches are not read.

        >>> [x.tolist() for x, in TensorLoader(torch.arange(5), bs=2).from_batch(1)]
        [[2, 3], [4]]
        """
        device = self.tensors[0].device
        pinned = device.type == 'cpu' and pins_memory()
        batches = self._select_batches(n, pinned) if self.shuffle else self._copy_batches(n, pinned)
        batches = islice(batches, max(0, len(self) - n))
        return batches if self.names is None else map(self._make_dict, batches)

    def _select_batches(self, n: int, pinned: bool) -> Iterator[tuple[Tensor, ...]]:
        "Return the batches of a drawn order from batch `n` on. The order is drawn at once."
        device = self.tensors[0].device
        order = self.draw_order().to(device, non_blocking=has_streams(device))
        take = select_pinned if pinned else torch.index_select
        tensors = self.tensors
        # a generator expression takes less time for each batch than calls of a function
        return (tuple([take(t, 0, idx) for t in tensors]) for idx in self._split_rows(order, n))

    def _copy_batches(self, n: int, pinned: bool) -> Iterator[tuple[Tensor, ...]]:
        "Return copies of the batches from batch `n` on, so that a batch can be changed in place."
        copy = Tensor.pin_memory if pinned else Tensor.clone
        copies = (map(copy, self._split_rows(t, n)) for t in self.tensors)
        return zip(*copies, strict=True)

    def draw_order(self) -> Tensor:
        "Return the sample indices (n,) in the order of the next epoch, drawn if the loader shuffles."
        if self.shuffle:
            return torch.randperm(self.n, generator=self.generator)
        return torch.arange(self.n)

    def draw_indices(self, i: int) -> list[int]:
        "Return the sample indices of batch `i` of the next epoch, whose order is drawn by this call."
        return next(iter(self._split_rows(self.draw_order(), i))).tolist()

    def _split_rows(self, t: Tensor, n: int) -> Iterator[Tensor]:
        "Yield a view of the rows of each batch from batch `n` on."
        # blocks of 1024 batches: splitting at once would hold a view of every batch
        blocks = t[n * self.bs :].split(1024 * self.bs)
        return (rows for block in blocks for rows in block.split(self.bs))

    def _make_dict(self, entries: Iterable[Tensor]) -> dict[str, Any]:
        return dict(zip(self.names or (), entries, strict=True))

    def __repr__(self) -> str:
        return f'TensorLoader({self.n} samples, bs={self.bs}, shuffle={self.shuffle})'


def select_pinned(t: Tensor, dim: int, idx: Tensor) -> Tensor:
    "Index into pinned memory, which torch reuses only after copies from that memory have finished."
    out = torch.empty((len(idx), *t.shape[1:]), dtype=t.dtype, pin_memory=True)
    return torch.index_select(t, dim, idx, out=out)


# -- functions for any loader ----------------------------------------------------------------------


def n_batches(dl: Any) -> int | None:
    """Return the `len()` of a loader, or None if the loader has no length.

    A loader whose `__len__` raises an error has no length. Some lengths are known only during a pass, as with
    Lightning's `CombinedLoader`, or depend on data that has not been read yet.

    >>> n_batches([1, 2]), n_batches(iter([1, 2]))
    (2, None)
    """
    if not hasattr(type(dl), '__len__'):
        return None
    try:
        return len(dl)
    except Exception:  # loaders raise any type of error
        return None


def batch_size_of(dl: Any) -> int | None:
    "Return the number of samples in a full batch of a loader, or None if it is unknown."
    bs = getattr(dl, 'bs', getattr(dl, 'batch_size', None))
    return bs if isinstance(bs, int) else None


def describe_loader(dl: Any) -> str:
    "Return a string with a loader's type, length and batch size."
    n = n_batches(dl)
    bs = batch_size_of(dl)
    if n is None:
        count = 'unknown length'
    else:
        count = f'{n} batch' if n == 1 else f'{n} batches'
    return f'{type(dl).__name__}, {count}' + (f' of {bs}' if bs is not None else '')


def make_unshuffled(dl: Any) -> Any:
    """Return a loader of the same samples in the order of the data set, including an incomplete last batch.

    A sampler that selects samples (weighted, a subset, a rank's shard) is kept. A loader that cannot be rebuilt (a
    list, an iterable data set, a custom batch sampler, a subclass of DataLoader with its own iteration) is returned
    unchanged."""
    if isinstance(dl, TensorLoader) and not dl.shuffle and not dl.drop_last:
        return dl
    if callable(getattr(dl, 'new', None)):
        return dl.new(shuffle=False, drop_last=False)
    return torch_in_order(dl) if iterates_as_torch(dl) else dl


def as_dataloaders(dls: Any) -> Any:
    """Return `dls` if `dls` is a `DataLoaders` or a similar object (fastai's), else make a `DataLoaders`.

    A tuple is (train, valid). Any other iterable, such as a list of batches, is the training loader. Raises
    `LoaderError` for anything else, such as a list of loaders."""
    # a model has `train` too: a model passed by mistake is rejected below
    if hasattr(dls, 'train') and hasattr(dls, '__getitem__') and not isinstance(dls, nn.Module):
        return dls
    return DataLoaders(*dls) if isinstance(dls, tuple) else DataLoaders(dls)


def decodes_batches(dl: Any) -> bool:
    "Return True for a loader of fastai, whose batches are subclasses of tensors that it can decode and show."
    return hasattr(type(dl), 'decode_batch')


def evaluation_loaders(dls: Any) -> list[tuple[str, Any]]:
    "Return (name, loader) of each validation loader of `DataLoaders` or a similar object."
    if (named := getattr(dls, 'evaluation', None)) is not None:
        return list(named)
    try:
        return [('valid', dls[1])]
    except (IndexError, KeyError):
        return []


def check_loaders(dls: Any) -> None:
    """Raise `EmptyLoaderError` if a training or validation loader is empty.

    Raise `BatchError` for a validation loader without workers whose first batch does not have the declared form."""
    for name, dl in [('train', dls.train), *evaluation_loaders(dls)]:
        check_not_empty(name, dl)
    if not isinstance(dls, DataLoaders):
        return
    # without this check the error would come after an epoch of training
    for name, dl in dls.evaluation:
        form = dls.batch_form(name)
        if (form.n_inp, form.targets) == (None, None) or isinstance(dl, Iterator):
            continue
        if not getattr(dl, 'num_workers', 0):
            form.split(first_batch(dl))


# -- checks of arguments ---------------------------------------------------------------------------


def check_loader(name: str, dl: Any) -> None:
    "Raise `LoaderError` unless `dl` looks like an iterable of batches; `dl` is not iterated."
    what = f'The loader {name!r} is a {type(dl).__name__}'
    if is_rows(dl):
        raise LoaderError(f'{what}: use DataLoaders.from_tensors for tensors.')
    if are_rows_apart(dl):
        raise LoaderError(
            f'{what} of tensors, not of batches: use DataLoaders.from_tensors((x, y), (xv, yv)), or pass '
            'one batch as `[(x, y)]`.'
        )
    if isinstance(dl, Dataset) and not isinstance(dl, IterableDataset):
        raise LoaderError(
            f'{what}, which returns samples: use DataLoaders.from_datasets, or a DataLoader.'
        )
    if isinstance(dl, (str, bytes, Mapping, nn.Module)) or not (
        hasattr(dl, '__iter__') or hasattr(dl, '__getitem__')
    ):
        raise LoaderError(
            explain_kind(dl, 'data')
            or f'{what}, which returns no batches: a loader is a DataLoader or any other iterable.'
        )
    check_not_empty(name, dl)


def check_not_empty(name: str, dl: Any) -> None:
    "Raise `EmptyLoaderError` for a loader of length 0."
    if n_batches(dl) != 0:
        return
    why = ': are there samples in its data set?'
    if getattr(dl, 'drop_last', False):
        why = (
            ': drop_last is on, and there are fewer samples than a batch has. Lower the batch size.'
        )
    raise EmptyLoaderError(f'The loader {name!r} ({type(dl).__name__}) has no batches{why}')


def check_dataset(name: str, ds: Any) -> None:
    "Raise `LoaderError` unless `ds` has samples by index and a length, and `EmptyLoaderError` for length 0."
    if isinstance(ds, IterableDataset):
        return
    if isinstance(ds, DataLoader) or not (hasattr(ds, '__getitem__') and hasattr(ds, '__len__')):
        raise LoaderError(
            f'The data set {name!r} is a {type(ds).__name__}: it needs samples by index and a length.'
        )
    if len(ds) == 0:
        raise EmptyLoaderError(f'The data set {name!r} ({type(ds).__name__}) is empty.')


def as_names(targets: str | Iterable[str] | None) -> tuple[str, ...] | None:
    "Return target names as a tuple."
    if targets is None or isinstance(targets, str):
        return None if targets is None else (targets,)
    return tuple(targets)


def check_n_inp(n_inp: Any, targets: tuple[str, ...] | None, names: list[str]) -> None:
    "Raise `LoaderError` unless `n_inp` is a number or a dict from loader names to numbers."
    if n_inp is None:
        return
    if targets is not None:
        raise LoaderError(
            f'DataLoaders(n_inp={n_inp!r}, targets={targets!r}): n_inp counts the entries of tuples, '
            'targets names the entries of dicts. Pass one of them.'
        )
    if not isinstance(n_inp, Mapping):
        check_count('n_inp', n_inp, error=LoaderError)
        return
    if unknown := [name for name in n_inp if name not in names]:
        raise LoaderError(f'n_inp={dict(n_inp)}: there is no loader {unknown[0]!r}, only {names}.')


def check_no_loaders(name: str, dl: Any) -> None:
    """Raise `LoaderError` for a list or tuple of loaders in the place of one loader.

    >>> check_no_loaders('train', [TensorLoader(torch.arange(5))])
    Traceback (most recent call last):
    learnkit.core.errors.LoaderError: The loader 'train' is a list of TensorLoader, not of batches: ...
    """
    if not isinstance(dl, (list, tuple, UserList)):
        return
    loaders = [entry for entry in dl if isinstance(entry, (DataLoader, TensorLoader, DataLoaders))]
    if loaders:
        raise LoaderError(
            f'The loader {name!r} is a {type(dl).__name__} of {type(loaders[0]).__name__}, not of batches: '
            "write `DataLoaders(train, valid)`, or `DataLoaders(train, {'day': day, 'night': night})`. To train on "
            'several loaders, write `CombinedLoader([a, b])`.'
        )


def make_generator(seed: int, generator: torch.Generator | None = None) -> torch.Generator:
    "Return a new generator with seed `seed`; raise `LoaderError` if a generator was given too."
    if generator is not None:
        raise LoaderError('Pass seed= or generator=, not both.')
    return torch.Generator().manual_seed(seed)


def convert_to_tensors(
    entries: Mapping[Any, Any],  # tensors or arrays by name or position
    device: torch.device | str | None,
) -> tuple[Tensor, ...]:
    "Convert entries to tensors; raise `LoaderError` unless lengths and devices match."
    tensors = tuple(as_rows(name, t, device) for name, t in entries.items())
    lengths = [len(t) for t in tensors]
    if len(set(lengths)) > 1:
        raise LoaderError(
            f'TensorLoader: tensors of different lengths, {lengths}: pass tensors with one row per sample.'
        )
    if not lengths[0]:
        raise EmptyLoaderError('TensorLoader: the tensors are empty: pass one row per sample.')
    if len({t.device for t in tensors}) > 1:
        raise LoaderError('TensorLoader: the tensors are on several devices: pass device=.')
    return tensors
