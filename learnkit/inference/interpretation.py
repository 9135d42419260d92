# SPDX-License-Identifier: Apache-2.0
"""Interpretation of predictions: the samples with the largest losses, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from learnkit.core.batch import (
    concat,
    describe,
    detuplify,
    find_bs,
    form_of,
    map_tensors,
    microbatches,
    size_func_of,
    take_rows,
)
from learnkit.core.errors import LoaderError, OptionError
from learnkit.core.optional import import_library
from learnkit.core.plotting import axes_or_new
from learnkit.core.random import (
    capture_own,
    capture_rng,
    preserved_generators,
    restore_own,
    restore_rng,
)
from learnkit.core.validation import check_count
from learnkit.data.preserve import preserve_loaders
from learnkit.data.show import as_targets, class_axis, find_errors, show_samples
from learnkit.data.tables import class_names, shorten
from learnkit.inference.gather import find_ignore_index, reorder_samples
from learnkit.inference.loaders import plan_loader

if TYPE_CHECKING:
    from learnkit.learner import Learner

MAX_LABELED_CLASSES = 40  # maximum number of classes whose names and cell values are drawn


class Interpretation:
    """Predictions, targets and losses of a loader, with each sample once and in order.

    `from_learner` creates an Interpretation. `preds`, `targs`, `decoded` and `losses` are on the CPU; `decoded` holds
    classes if the targets are classes. Inputs are not kept: they are read from the loader again when samples are shown,
    so the loader must return the same samples each time.

    >>> from learnkit.testing import synth_learner
    >>> interp = Interpretation.from_learner(synth_learner(default_cbs=False))
    >>> losses, idxs = interp.top_losses(3)
    >>> torch.equal(losses, interp.losses.sort(descending=True).values[:3])
    True
    """

    def __init__(
        self,
        learn: Learner,  # Learner that predicted
        dl: Any,  # loader that returns the same samples in the same order
        preds: Any,  # predictions
        targs: Any,  # targets
        decoded: Any,  # predictions in the form of the targets
        losses: Tensor,  # losses, of shape [samples]
    ) -> None:
        self.learn = learn
        self.dl = dl
        self.preds = preds
        self.targs = targs
        self.decoded = decoded
        self.losses = losses.flatten()
        self.vocab: Any = getattr(learn.dls, 'vocab', None)
        self._order = torch.arange(len(self.losses))  # position of each sample in the loader
        self._random: tuple[Any, Any] | None = None  # random states before the loader was iterated

    @classmethod
    def from_learner(
        cls,
        learn: Learner,  # Learner to predict with
        ds_idx: int = 1,  # loader: 0 training, 1 validation
        dl: Any = None,  # loader to use instead, or its name in `dls`
        act: Callable[[Any], Any] | None = None,  # activation; None: the loss function's
    ) -> Self:
        """Predict on a loader.

        Raises `LoaderError` and `LossError`, as `learn.get_preds(with_loss=True)` does.
        """
        loader, order = plan_loader(learn, ds_idx, dl, reorder=True)
        random_states = capture_rng(), capture_own(loader)
        preds, targs, decoded, losses = learn.get_preds(
            dl=loader, with_decoded=True, with_loss=True, act=act, reorder=False
        )
        threshold = None if act is None else 0.5
        decoded = as_targets(decoded, targs, threshold)
        if order is not None:
            preds, targs, decoded, losses = (
                reorder_samples(o, order) for o in (preds, targs, decoded, losses)
            )
        interp = cls(learn, loader, preds, targs, decoded, losses)
        interp._random = random_states
        if order is not None:
            interp._order = order
        return interp

    def __len__(self) -> int:
        return len(self.losses)

    def __getitem__(
        self,
        idxs: Any,  # index of a sample, several, or a mask with one entry per sample
    ) -> tuple[Any, ...]:  # inputs, predictions, targets, decoded predictions, losses
        "Return inputs, predictions, targets and losses of some samples; the inputs are read from the loader."
        rows = self._find_rows(idxs)
        outputs = (self.preds, self.targs, self.decoded, self.losses)
        taken = [take_rows(o, len(self), rows) for o in outputs]
        return (detuplify(self._read_inputs(rows)), *taken)

    def _find_rows(self, idxs: Any) -> list[int]:
        "Return indices of samples from 0 on; raise `OptionError` if there are none."
        rows = torch.arange(len(self))[torch.as_tensor(idxs)].flatten().tolist()
        if not rows:
            raise OptionError('No sample is selected: pass at least one index.')
        return rows

    def _read_inputs(self, rows: list[int]) -> tuple[Any, ...]:
        "Return the inputs of some samples, read from the loader again; the loader's state is restored afterwards."
        positions = self._order[rows].tolist()
        found: dict[int, tuple[Any, Any]] = {}  # samples by position in the loader
        with preserve_loaders([self.dl]), preserved_generators(self.dl):
            if self._random is not None:
                restore_rng(self._random[0])
                restore_own(self.dl, self._random[1])
            start = 0
            for batch in self.dl:
                xb, yb = form_of(self.learn.dls, 'valid').split(batch)
                n = find_bs(xb, yb, size_func_of(self.learn))
                batch_positions = [i for i in positions if start <= i < start + n]
                samples = microbatches(xb, yb, 1, n) if batch_positions else []
                found |= {i: samples[i - start] for i in batch_positions}
                start += n
                if len(found) == len({*positions}):
                    break
        if len(found) < len({*positions}):
            raise _samples_error(self.dl)
        xbs, ybs = zip(*(found[i] for i in positions), strict=True)
        self._check_same(concat(list(ybs)), rows)
        return tuple(map_tensors(concat(list(xbs)), lambda t: t.detach().cpu()))

    def _check_same(self, yb: tuple[Any, ...], rows: list[int]) -> None:
        "Raise `LoaderError` if integer targets differ from the targets of the predictions."
        known = self.targs[rows] if isinstance(self.targs, Tensor) else None
        if known is None or len(yb) != 1 or not isinstance(yb[0], Tensor):
            return
        targs = yb[0]
        is_comparable = (
            targs.shape == known.shape
            and targs.dtype == known.dtype
            and not known.is_floating_point()
        )
        if is_comparable and not torch.equal(targs.cpu(), known):
            raise _samples_error(self.dl)

    def top_losses(
        self,
        k: int | None = None,  # maximum number of losses; None: all
        largest: bool = True,  # False: the smallest
    ) -> tuple[Tensor, Tensor]:  # losses, and the indices of their samples
        "Return the largest or smallest losses, sorted; NaN counts as the largest."
        if k is not None:
            check_count('k', k)
        n = len(self) if k is None else min(k, len(self))
        losses, idxs = self.losses.topk(n, largest=largest)
        return losses, idxs

    def plot_top_losses(
        self,
        k: int | Sequence[int] = 9,  # number of samples, or ranks: `range(9, 18)` for the next nine
        largest: bool = True,  # False: the smallest losses
        **kwargs: Any,  # `figsize` in inches, for images
    ) -> Any:
        "Show the samples with the largest losses, as `show_results` does, with their losses."
        if isinstance(k, int):
            _, idxs = self.top_losses(k, largest)
        else:
            _, all_idxs = self.top_losses(None, largest)
            idxs = all_idxs[self._find_rows(k)]
        return self._show(idxs.tolist(), with_loss=True, **kwargs)

    def show_results(
        self,
        idxs: Any,  # indices of samples, or a mask with one entry per sample
        **kwargs: Any,  # `figsize` in inches, for images
    ) -> Any:
        """Show samples with targets and predictions: images in a grid, other data as a table.

        Wrong predictions are marked. Masks of a segmentation are drawn next to their images, with one legend for the
        classes.
        """
        return self._show(self._find_rows(idxs), **kwargs)

    def _show(self, rows: list[int], with_loss: bool = False, **kwargs: Any) -> Any:
        xb, _, targs, decoded, losses = self[rows]
        columns = {'target': targs, 'predicted': decoded}
        if with_loss:
            columns['loss'] = losses
        xb = xb if isinstance(xb, tuple) else (xb,)
        return show_samples(xb, columns, self.vocab, find_errors(decoded, targs), **kwargs)


def _samples_error(dl: Any) -> LoaderError:
    return LoaderError(
        f'{type(dl).__name__} returned other samples than when the predictions were made, so they cannot be '
        'shown: pass a loader as `dl=` that returns the same samples each time.'
    )


class ClassificationInterpretation(Interpretation):
    """Interpretation of a binary or multi-class classifier with one class per sample, pixel or token.

    The loss function decodes the predicted class; by default, it is the class with the highest score, and for torch's
    binary losses, a probability above one half is class 1. Class names come from `dls.vocab`; without a vocab, they are
    numbers. Targets that the loss ignores (`ignore_index`) do not count.

    Raises `OptionError` for targets that are not classes, and for more classes than names.

    >>> from learnkit import Learner
    >>> scores = torch.tensor([[3., 1.], [2., 0.], [0., 1.]])
    >>> learn = Learner([(scores, torch.tensor([0, 1, 1]))], torch.nn.Identity(), torch.nn.CrossEntropyLoss())
    >>> ClassificationInterpretation.from_learner(learn, ds_idx=0).confusion_matrix()
    array([[1, 0],
           [1, 1]])
    """

    def __init__(
        self, learn: Learner, dl: Any, preds: Any, targs: Any, decoded: Any, losses: Tensor
    ) -> None:
        super().__init__(learn, dl, preds, targs, decoded, losses)
        ignore_index = find_ignore_index(learn.loss_func)
        self._d, self._t = _flatten_classes(preds, decoded, targs, ignore_index)
        n = int(max(self._d.max(), self._t.max())) + 1 if len(self._t) else 0
        has_scores = isinstance(preds, Tensor) and preds.ndim == targs.ndim + 1
        axis = class_axis(preds, targs) if has_scores else None
        self.vocab = class_names(self.vocab)
        if self.vocab is not None and len(self.vocab) < n:
            raise OptionError(
                f'There is a class {n - 1}, and only {len(self.vocab)} names of classes: `dls.vocab` has '
                'one for each.'
            )
        if self.vocab is None:
            n_scores = 0 if axis is None else preds.shape[axis]
            self.vocab = list(range(max(n, 2, n_scores)))

    def confusion_matrix(self) -> np.ndarray[Any, Any]:
        "Return the confusion matrix: counts of shape [true class, predicted class]."
        n = len(self.vocab)
        return torch.bincount(self._t * n + self._d, minlength=n * n).view(n, n).numpy()

    def plot_confusion_matrix(
        self,
        normalize: bool = False,  # write fractions of each true class instead of counts
        title: str = 'Confusion matrix',  # title of the plot
        cmap: str = 'Blues',  # name of a matplotlib color map
        norm_dec: int = 2,  # number of decimals of the fractions
        plot_txt: bool = True,  # write the numbers into the cells; never for more than 40 classes
        figsize: tuple[float, float] | None = None,  # inches; None: by the number of classes
        ax: Any = None,  # matplotlib axes; None: a new figure
    ) -> Any:
        """Plot the confusion matrix, and return the axes; the row of a class without samples has no numbers.

        Cells are colored by their fraction of the true class, even if they show counts. Raises `MissingExtraError`
        without matplotlib.
        """
        colors = import_library('matplotlib.colors', 'A plot')
        matrix = self.confusion_matrix()
        n = len(matrix)
        sums = matrix.sum(1, keepdims=True)
        shares = matrix / np.maximum(sums, 1)
        side = min(max(4.0, 0.42 * n + 1.6), 14.0)
        ax = axes_or_new(ax, figsize or (side, side))

        # with fractions, rare and frequent classes have equal colors; the root makes single errors visible
        image = ax.imshow(shares, cmap=cmap, norm=colors.PowerNorm(0.5, 0, 1))
        tick_step = -(-n // MAX_LABELED_CLASSES)
        names = [shorten(name, 20) for name in self.vocab][::tick_step]
        ax.set_xticks(range(0, n, tick_step), names, rotation=90 if max(map(len, names)) > 3 else 0)
        ax.set_yticks(range(0, n, tick_step), names)
        ax.set(title=title, xlabel='predicted', ylabel='actual')
        ax.grid(False)
        if plot_txt and n <= MAX_LABELED_CLASSES:
            cells = shares if normalize else matrix
            spec = f'.{norm_dec}f' if normalize else '.0f'
            _write_cells(image, np.where(sums, cells, np.nan), spec)
        return ax

    def most_confused(
        self,
        min_val: int = 1,  # minimum count
    ) -> list[tuple[Any, Any, int]]:  # true class, predicted class, count; most frequent first
        "Return the pairs of classes that were confused."
        matrix = self.confusion_matrix()
        pairs = [
            (self.vocab[i], self.vocab[j], int(count))
            for (i, j), count in np.ndenumerate(matrix)
            if i != j and count >= max(min_val, 1)
        ]
        return sorted(pairs, key=lambda pair: -pair[2])

    def print_classification_report(self) -> None:
        """Print precision, recall and F1 of each class with scikit-learn.

        Raises `MissingExtraError` if scikit-learn is not installed.
        """
        skm = import_library('sklearn.metrics', 'A classification report')
        print(
            skm.classification_report(
                self._t.numpy(),
                self._d.numpy(),
                labels=range(len(self.vocab)),
                zero_division=0.0,
                target_names=list(map(str, self.vocab)),
            )
        )


def _write_cells(image: Any, numbers: Any, spec: str) -> None:
    "Write numbers into the cells of an image, in white on dark cells."
    size = 10 if len(numbers) <= 12 else 6
    shades = image.norm(image.get_array())
    for (i, j), value in np.ndenumerate(numbers):
        if not np.isnan(value):
            color = 'white' if shades[i, j] > 0.6 else 'black'
            text = format(value, spec) if value else '0'
            image.axes.text(j, i, text, ha='center', va='center', fontsize=size, color=color)


def _flatten_classes(preds: Any, decoded: Any, targs: Any, ignored: int) -> tuple[Tensor, Tensor]:
    "Return predicted and true classes as flat integer tensors; raise `OptionError` if they are not classes."
    are_tensors = isinstance(decoded, Tensor) and isinstance(targs, Tensor)
    if are_tensors:
        _check_whole('targets', targs)
    if not are_tensors or decoded.shape != targs.shape:
        raise OptionError(
            f'These are not classes of one target: predictions {describe(decoded)}, targets '
            f'{describe(targs)}. Pass `act=`, whose largest score, or value above 0.5, is the class; for '
            'anything else `Interpretation` has the losses.'
        )
    _check_whole('predictions', decoded)
    if targs.ndim == 2 and targs.shape[1] > 1 and preds.shape == targs.shape:
        raise OptionError(
            f'The targets {describe(targs)} are several labels a sample: there is no confusion matrix.'
        )
    d = decoded.flatten().long()
    t = targs.flatten().long()
    is_counted = t != ignored
    return d[is_counted], t[is_counted]


def _check_whole(name: str, values: Tensor) -> None:
    "Raise `OptionError` for values that are not whole numbers."
    if values.is_floating_point() and not bool((values == values.round()).all()):
        raise OptionError(
            f'The {name} are {describe(values)}, not whole numbers of classes: a regression has no '
            'confusion matrix. Use `Interpretation`.'
        )
