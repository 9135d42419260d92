"""Loaders: `DataLoaders` holds those of a training run, `TensorLoader` serves batches of tensors from memory.

A loader is anything that yields batches, with a length or without: a torch DataLoader, a list, a generator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset

from learnkit.core.batch import BatchForm, to_device
from learnkit.core.errors import EmptyLoaderError, LoaderError
from learnkit.core.html import never_raising, table
from learnkit.data.checks import (
    check_count,
    check_dataset,
    check_loader,
    check_not_empty,
    describe_loader,
    n_batches,
)
from learnkit.data.evaluator import Evaluator, named_loaders
from learnkit.data.show import Shows, first_batch
from learnkit.data.tensors import are_inputs_and_targets, as_rows, is_rows
from learnkit.data.torch_loader import torch_in_order, without_workers

__all__ = [
    'DataLoaders',
    'TensorLoader',
    'default_device',
    'as_dataloaders',
    'evaluation_loaders',
    'check_loader',
    'check_loaders',
    'n_batches',
    'in_order',
]


def default_device() -> torch.device:
    """Return the device to train on: CUDA, else MPS, else the CPU. Asking creates no CUDA context.

    >>> default_device().type in ('cuda', 'mps', 'cpu')
    True
    """
    if torch.cuda.is_available():
        return torch.device('cuda')
    return torch.device('mps' if torch.backends.mps.is_available() else 'cpu')


class DataLoaders(Shows):
    """The loaders of a training run: one to train on, any number to validate on, and the device they go to.

    `dls[0]` is the training loader, the validation loaders follow, then the others; a name works too.

    `n_inp` is for batches that are tuples, one number or a dict of numbers by loader: `n_inp={'train': 2, 'valid': 1}`.
    `targets` names the targets of batches that are dicts, in the order in which the loss function gets them:
    `targets=('boxes', 'labels')`. In predictions a batch may lack all of them.

    `n_iter` makes epochs of a training loader without a length (a stream): each has so many batches, and begins where
    the last one ended, in the same fit and in the next. The loader is iterated once for all of them; where it ends, it
    is iterated from its start again. Worker processes of a DataLoader run on in the meantime.

    Raises `LoaderError` for what is no loader and `EmptyLoaderError` for one with no batch. A batch that does not have
    the form that was declared is a `BatchError`, before the first step also of a validation loader.

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

    def __init__(
        self,
        train: Iterable[Any],  # the training loader
        valid: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,  # one, or several by name
        *others: Iterable[Any],  # further loaders, a test set's for one
        device: torch.device | str | None = None,  # where batches go; None: `default_device()`
        path: str | Path = '.',  # folder of the data, and of what is saved
        n_inp: int | Mapping[str, int] | None = None,  # inputs in a tuple; None: all but the last
        targets: str | Iterable[str] | None = None,  # target keys of a dict; None: `labels`, ...
        n_iter: int | None = None,  # batches an epoch of a training loader without a length
    ):
        self.train, named = train, named_loaders(valid)
        # with options of their own
        self.evaluators = {name: dl for name, dl in named if isinstance(dl, Evaluator)}
        self.evaluation = [(name, dl.dl if isinstance(dl, Evaluator) else dl) for name, dl in named]
        self.others = list(others)
        self.n_inp: int | Mapping[str, int] | None = n_inp
        self.n_iter, self.path = n_iter, Path(path)
        self.targets = as_names(targets)
        self._device = None if device is None else torch.device(device)

        for name, dl in self._named():
            check_loader(name, dl)
        check_n_inp(n_inp, self.targets, [name for name, _ in self._named()])
        if n_iter is not None:
            check_count('DataLoaders', 'n_iter', n_iter)

    def batch_form(
        self,
        name: str = 'train',  # the loader
    ) -> BatchForm:
        """Return how the batches of a loader are split into inputs and targets.

        >>> dls = DataLoaders([(1, 2, 3)], [(1, 3)], n_inp={'train': 2, 'valid': 1})
        >>> dls.batch_form('train').n_inp, dls.batch_form('valid').n_inp
        (2, 1)
        """
        n_inp = self.n_inp
        return BatchForm(n_inp.get(name) if isinstance(n_inp, Mapping) else n_inp, self.targets)

    @classmethod
    def from_datasets(
        cls,
        train_ds: Any,  # samples to train on: a torch data set, or any sequence
        valid_ds: Any = None,  # samples to validate on, or a dict of several by name
        bs: int = 64,  # samples a batch
        *,
        shuffle: bool = True,  # draw the training samples in random order
        drop_last: bool = False,  # leave out a last training batch that is smaller
        num_workers: int = 0,  # processes that fetch samples, for each loader
        seed: int | None = None,  # of the training order; None: it follows torch's global generator
        device: torch.device | str | None = None,
        path: str | Path = '.',  # these five as for `DataLoaders`
        n_inp: int | Mapping[str, int] | None = None,
        n_iter: int | None = None,
        targets: str | Iterable[str] | None = None,
        **kwargs: Any,  # for torch's DataLoader; `sampler`, `generator`: the training loader only
    ) -> Self:
        """Make a torch DataLoader for each data set, in pinned memory where CUDA is.

        >>> dls = DataLoaders.from_datasets([(i, i % 2) for i in range(10)], bs=4, shuffle=False)
        >>> dls.one_batch()
        [tensor([0, 1, 2, 3]), tensor([0, 1, 0, 1])]
        """
        check_count('from_datasets', 'bs', bs)
        for name, ds in [('train', train_ds), *named_loaders(valid_ds)]:
            check_dataset(name, ds)
        if seed is not None:
            kwargs['generator'] = _seeded(seed, kwargs.get('generator'))
        train_only = {k: kwargs.pop(k) for k in ('sampler', 'generator') if k in kwargs}
        shared = {
            'batch_size': bs,
            'num_workers': num_workers,
            'pin_memory': torch.cuda.is_available(),
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
        valid: dict[str, Any] = {
            name: DataLoader(ds, **shared) for name, ds in named_loaders(valid_ds)
        }
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
        valid: Any = None,  # likewise; or a dict of several such tuples (or dicts) by loader name
        bs: int = 64,  # samples a batch
        *,
        shuffle: bool = True,  # draw the training samples in random order
        drop_last: bool = False,  # leave out a last training batch that is smaller
        seed: int | None = None,  # of the training order; None: drawn from torch's global generator
        device: torch.device | str | None = None,  # keep the tensors there; None: where they are
        path: str | Path = '.',
        n_inp: int | Mapping[str, int] | None = None,  # these four as for `DataLoaders`
        n_iter: int | None = None,
        targets: str | Iterable[str] | None = None,
    ) -> Self:
        """Make a `TensorLoader` of each set of tensors.

        A dict of tensors is one set, whose batches are dicts; a dict of tuples or dicts is one validation loader each.

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
        several = isinstance(valid, Mapping) and not any(map(is_rows, valid.values()))
        return cls(
            load(train, shuffle=shuffle, drop_last=drop_last, seed=seed),
            {k: load(v) for k, v in valid.items()}
            if several
            else None
            if valid is None
            else load(valid),
            device=device,
            path=path,
            n_inp=n_inp,
            n_iter=n_iter,
            targets=targets,
        )

    @property
    def valid(self) -> Any:
        "The first validation loader, or None."
        return self.evaluation[0][1] if self.evaluation else None

    @property
    def loaders(self) -> list[Any]:
        "Every loader: training, validation, others."
        return [dl for _, dl in self._named()]

    @property
    def train_ds(self) -> Any:
        "The training loader's data set, or None where it has none."
        return getattr(self.train, 'dataset', None)

    @property
    def valid_ds(self) -> Any:
        "The first validation loader's data set, or None where it has none."
        return getattr(self.valid, 'dataset', None)

    @property
    def device(self) -> torch.device:
        "Where batches go; chosen once, when first asked for."
        if self._device is None:
            self._device = default_device()
        return self._device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def to(self, device: torch.device | str) -> Self:
        """Send batches to `device` from now on.

        >>> DataLoaders([(torch.zeros(2), torch.ones(2))]).to('cpu').device
        device(type='cpu')
        """
        self.device = device
        return self

    def cpu(self) -> Self:
        "Send batches to the CPU from now on."
        return self.to('cpu')

    def cuda(self) -> Self:
        "Send batches to the GPU from now on."
        return self.to('cuda')

    def one_batch(self) -> Any:
        """Return the first batch of the training loader, as the loader gives it.

        >>> DataLoaders([(torch.zeros(2), torch.ones(2))]).one_batch()
        (tensor([0., 0.]), tensor([1., 1.]))
        """
        for batch in self.train:
            return batch
        raise EmptyLoaderError(
            f'The training loader ({type(self.train).__name__}) gave no batch. Is it used up, or '
            'its data set empty?'
        )

    def _named(self) -> list[tuple[str, Any]]:
        return [
            ('train', self.train),
            *self.evaluation,
            *((f'other{i}', dl) for i, dl in enumerate(self.others)),
        ]

    def __getitem__(self, key: int | str) -> Any:
        if not isinstance(key, str):
            return self.loaders[key]
        named = dict(self._named())
        if key not in named:
            raise KeyError(f'There is no loader {key!r}, only {", ".join(map(repr, named))}.')
        return named[key]

    def __len__(self) -> int:
        return len(self.loaders)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loaders)

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            hint = (
                ' For new samples: `learn.get_preds(dl=[(x,)])`, or any loader.'
                if name == 'test_dl'
                else ''
            )
            raise AttributeError(
                f'{type(self).__name__} has no attribute `{name}`.{hint}', name=name, obj=self
            )

    def __repr__(self) -> str:
        return '\n'.join(
            [
                type(self).__name__,
                *(f'  {name}: {describe_loader(dl)}' for name, dl in self._named()),
            ]
        )

    @never_raising
    def _repr_html_(self) -> str:
        rows = [
            (name, describe_loader(dl), n_batches(getattr(dl, 'dataset', None)))
            for name, dl in self._named()
        ]
        return table(['name', 'loader', 'samples'], rows, type(self).__name__)


class TensorLoader:
    """Serve batches of tensors that are in memory, whole batches by index: many times faster than sample by sample.

    A batch is a tuple with an entry for each tensor, or a dict when the tensors were given as one. Batches that are not
    shuffled are views. Where CUDA is in use, batches from the CPU come in pinned memory.

    `generator` is the loader's own and draws one permutation an epoch, when iteration begins. Raises `LoaderError` for
    tensors of different lengths or devices, and `EmptyLoaderError` for empty ones.

    >>> loader = TensorLoader(torch.arange(5), torch.arange(5) ** 2, bs=2)
    >>> [x.tolist() for x, y in loader]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        *tensors: Any,  # tensors, arrays, data frames or lists of one length; or one dict of them
        bs: int = 64,  # samples a batch
        shuffle: bool = False,  # another order each epoch
        drop_last: bool = False,  # leave out a last batch that is smaller
        generator: torch.Generator | None = None,  # draws the order (a CPU generator)
        seed: int | None = None,  # of its generator; None: from torch's global one if it shuffles
        device: torch.device | str | None = None,  # keep the tensors there; None: where they are
    ):
        check_count('TensorLoader', 'bs', bs)
        named = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], Mapping) else None
        self.names = None if named is None else tuple(named)
        self.tensors = _as_tensors(dict(enumerate(tensors)) if named is None else named, device)
        self.n, self.bs, self.seed = len(self.tensors[0]), int(bs), seed
        self.shuffle, self.drop_last = shuffle, drop_last
        if seed is not None:
            generator = _seeded(seed, generator)
        elif generator is None and shuffle:
            generator = _seeded(int(torch.empty((), dtype=torch.int64).random_()))
        self.generator = generator

    def new(self, **changes: Any) -> TensorLoader:
        """Return a loader of the same tensors with other options.

        A shuffling copy starts from `seed` again, or draws another where there is none."""
        options: dict[str, Any] = {
            'bs': self.bs,
            'shuffle': self.shuffle,
            'drop_last': self.drop_last,
        }
        if 'generator' not in changes:
            options['seed'] = self.seed
        tensors = self.tensors if self.names is None else (self._named(self.tensors),)
        return type(self)(*tensors, **{**options, **changes})

    @property
    def dataset(self) -> Dataset[Any]:
        "The samples one by one, each a tuple or dict like the batches."
        rows: Any = self.tensors if self.names is None else self._named(self.tensors)
        return StackDataset(*rows) if self.names is None else StackDataset(**rows)

    def __len__(self) -> int:
        return self.n // self.bs if self.drop_last else -(-self.n // self.bs)

    def __iter__(self) -> Iterator[Any]:
        return self.from_batch(0)

    def from_batch(self, n: int) -> Iterator[Any]:
        """Begin an epoch at its batch number `n`; the order is drawn as for a whole one, and nothing before it is read.

        >>> [x.tolist() for x, in TensorLoader(torch.arange(5), bs=2).from_batch(1)]
        [[2, 3], [4]]
        """
        pinned = self.tensors[0].device.type == 'cpu' and torch.cuda.is_initialized()
        batches = self._shuffled(n, pinned) if self.shuffle else self._sliced(n, pinned)
        batches = islice(batches, max(0, len(self) - n))
        return batches if self.names is None else map(self._named, batches)

    def draw_order(self) -> Tensor:
        "Return the samples' numbers in the order of an epoch, which is drawn now where it is random."
        return (
            torch.randperm(self.n, generator=self.generator)
            if self.shuffle
            else torch.arange(self.n)
        )

    def draw_indices(self, i: int) -> list[int]:
        "Return the samples' numbers of batch `i` of an epoch whose order is drawn now."
        return next(iter(self._pieces(self.draw_order(), i))).tolist()

    def _shuffled(self, n: int, pinned: bool) -> Iterator[tuple[Tensor, ...]]:
        order = to_device(self.draw_order(), self.tensors[0].device)
        take = _take_pinned if pinned else torch.index_select
        return (tuple([take(t, 0, idx) for t in self.tensors]) for idx in self._pieces(order, n))

    def _sliced(self, n: int, pinned: bool) -> Iterator[tuple[Tensor, ...]]:
        batches = zip(*(self._pieces(t, n) for t in self.tensors), strict=True)
        return (tuple(t.pin_memory() for t in b) for b in batches) if pinned else batches

    def _pieces(self, t: Tensor, n: int) -> Iterator[Tensor]:
        "Yield views of each batch's rows from batch `n` on; made a thousand at a time, which is fast and keeps few."
        return (
            piece
            for block in t[n * self.bs :].split(1024 * self.bs)
            for piece in block.split(self.bs)
        )

    def _named(self, entries: Iterable[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.names or (), entries, strict=True))

    def __repr__(self) -> str:
        return f'TensorLoader({self.n} samples, bs={self.bs}, shuffle={self.shuffle})'


def _take_pinned(t: Tensor, dim: int, idx: Tensor) -> Tensor:
    "Gather into pinned memory, which torch hands out again only after copies from it have ended."
    out = torch.empty((len(idx), *t.shape[1:]), dtype=t.dtype, pin_memory=True)
    return torch.index_select(t, dim, idx, out=out)


# What any loader can be asked


def in_order(dl: Any) -> Any:
    """Return a loader of the same samples in the data set's order, the last incomplete batch included.

    A sampler that chooses samples (weighted, a subset, one rank's share) is kept. A loader that cannot be made anew (a
    list, an iterable data set, a batch sampler of its own) is returned as it is."""
    if type(dl) is DataLoader:
        return torch_in_order(dl)
    if isinstance(dl, TensorLoader) and not dl.shuffle and not dl.drop_last:
        return dl
    return dl.new(shuffle=False, drop_last=False) if callable(getattr(dl, 'new', None)) else dl


def as_dataloaders(dls: Any) -> Any:
    """Return `dls` if it is a `DataLoaders` or works like one (fastai's), else make one.

    A tuple is (train, valid); any other iterable, a list of batches for one, is the training loader. Raises
    `LoaderError` for anything else."""
    # a model has a `train` too: given here by mistake, it is refused below
    if hasattr(dls, 'train') and hasattr(dls, '__getitem__') and not isinstance(dls, nn.Module):
        return dls
    if not isinstance(dls, tuple):
        return DataLoaders(dls)
    if len(dls) in (1, 2):
        return DataLoaders(*dls)
    raise LoaderError(
        f'A tuple of loaders is (train,) or (train, valid), not {len(dls)} entries: use DataLoaders.'
    )


def evaluation_loaders(dls: Any) -> list[tuple[str, Any]]:
    "Return (name, loader) of each validation loader of `DataLoaders`, or of what works like one."
    if (named := getattr(dls, 'evaluation', None)) is not None:
        return list(named)
    try:
        return [('valid', dls[1])]
    except (IndexError, KeyError):
        return []


def check_loaders(dls: Any) -> None:
    "Raise `EmptyLoaderError` if a training or validation loader has no batch by now."
    for name, dl in [('train', dls.train), *evaluation_loaders(dls)]:
        check_not_empty(name, dl)
    if isinstance(dls, DataLoaders):
        check_forms(dls)


def check_forms(dls: DataLoaders) -> None:
    """Raise `BatchError` for a validation loader whose batches do not have the form that was declared.

    A batch of each is looked at, where something was declared: else the first evaluation would find out, after an
    epoch of training. The training loader's first batch comes before the first step anyway.
    """
    for name, dl in dls.evaluation:
        form = dls.batch_form(name)
        if form == BatchForm() or isinstance(dl, Iterator):
            continue
        if getattr(dl, 'num_workers', 0):
            if type(dl) is not DataLoader or isinstance(dl.dataset, IterableDataset):
                continue
            dl = without_workers(dl)
        form.split(first_batch(dl))


# Checks, each with the thing's name in its message


def as_names(targets: str | Iterable[str] | None) -> tuple[str, ...] | None:
    "Return names of targets as a tuple; raise `LoaderError` for what names nothing."
    if targets is None:
        return None
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        targets = [targets]
    names = tuple(targets)
    if not names or not all(isinstance(name, str) for name in names):
        raise LoaderError(
            f'DataLoaders(targets={targets!r}): give the names of entries of a dict batch.'
        )
    return names


def check_n_inp(n_inp: Any, targets: tuple[str, ...] | None, names: list[str]) -> None:
    "Raise `LoaderError` for an `n_inp` that is neither a number nor a dict of numbers by loader."
    if n_inp is None:
        return
    if targets is not None:
        raise LoaderError(
            f'DataLoaders(n_inp={n_inp!r}, targets={targets!r}): n_inp counts the entries of tuples, '
            'targets names the entries of dicts. Give one of them.'
        )
    if not isinstance(n_inp, Mapping):
        return check_count('DataLoaders', 'n_inp', n_inp)
    for name, n in n_inp.items():
        if name not in names:
            known = ', '.join(map(repr, names))
            raise LoaderError(
                f'DataLoaders(n_inp={dict(n_inp)}): there is no loader {name!r}, only {known}.'
            )
        check_count('DataLoaders', f'n_inp[{name!r}]', n)


def _seeded(seed: int, given: torch.Generator | None = None) -> torch.Generator:
    "Return a new generator with that seed."
    if given is not None:
        raise LoaderError('Give seed= or generator=, not both.')
    return torch.Generator().manual_seed(seed)


def _as_tensors(given: Mapping[Any, Any], device: torch.device | str | None) -> tuple[Tensor, ...]:
    "Return arrays and tensors, given by name or position, as tensors on one device that fit together."
    if not given:
        raise LoaderError('TensorLoader needs at least one tensor.')
    tensors = tuple(as_rows(name, t, device) for name, t in given.items())
    lengths = [len(t) for t in tensors]
    if len(set(lengths)) > 1:
        raise LoaderError(
            f'TensorLoader: tensors of different lengths, {lengths}: give one row a sample in each.'
        )
    if not lengths[0]:
        raise EmptyLoaderError('TensorLoader: the tensors are empty: give one row a sample.')
    if len({t.device for t in tensors}) > 1:
        raise LoaderError('TensorLoader: several devices, give device=.')
    return tensors
