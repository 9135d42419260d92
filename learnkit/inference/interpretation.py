"""What a trained model gets wrong: its largest losses, and the classes that it mixes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from learnkit.core.batch import (
    concat,
    describe,
    find_bs,
    form_of,
    map_tensors,
    microbatches,
    take_rows,
)
from learnkit.core.errors import LoaderError, MissingExtraError, OptionError
from learnkit.core.plotting import axes_or_new
from learnkit.core.random import (
    capture_own,
    capture_rng,
    preserved_generators,
    restore_own,
    restore_rng,
)
from learnkit.data.preserve import preserve_loaders
from learnkit.data.show import as_targets, binary_cut, class_axis, show_samples, wrong_ones
from learnkit.data.tables import class_names, shorten
from learnkit.inference.gather import reordered
from learnkit.inference.predict import plan_loader

__all__ = ['Interpretation', 'ClassificationInterpretation']

MOST_NAMES = 40  # classes beside a matrix that have their names, and numbers in their cells


class Interpretation:
    """Predictions, targets and losses of a loader, each sample once and in order, and the samples they are of.

    Make one by `from_learner`. `preds`, `targs`, `decoded` and `losses` are on the CPU; `decoded` are classes where
    targets are. Inputs are not kept: they are read from the loader again when they are shown, so it must give the same
    samples again.

    >>> from learnkit.testing import synth_learner
    >>> interp = Interpretation.from_learner(synth_learner(default_cbs=False))
    >>> losses, idxs = interp.top_losses(3)
    >>> torch.equal(losses, interp.losses.sort(descending=True).values[:3])
    True
    """

    def __init__(
        self,
        learn: Any,  # the Learner that predicted
        dl: Any,  # a loader that gives the same samples in the same order
        preds: Any,  # predictions
        targs: Any,  # targets
        decoded: Any,  # predictions as targets are
        losses: Tensor,  # one a sample
    ) -> None:
        self.learn, self.dl, self.preds, self.targs, self.decoded = learn, dl, preds, targs, decoded
        self.losses = losses.flatten()
        self.vocab: Any = getattr(learn.dls, 'vocab', None)
        self._order = torch.arange(len(self.losses))  # where each sample comes in the loader
        self._random: tuple[Any, Any] | None = None  # the generators' states as the loader began

    @classmethod
    def from_learner(
        cls,
        learn: Any,  # a Learner
        ds_idx: int = 1,  # which loader: 0 training, 1 validation
        dl: Any = None,  # a loader to use instead, or its name in `dls`
        act: Callable[[Any], Any] | None = None,  # on predictions; None: `loss_func.activation`
    ) -> Self:
        """Predict on a loader. Raises what `learn.get_preds(with_loss=True)` does: `LoaderError`, `LossError`."""
        loader, order = plan_loader(learn, ds_idx, dl, reorder=True)
        before = capture_rng(), capture_own(loader)
        preds, targs, decoded, losses = learn.get_preds(
            dl=loader, with_decoded=True, with_loss=True, act=act, reorder=False
        )
        decoded = as_targets(
            decoded, targs, 0.5 if act is not None else binary_cut(learn.loss_func)
        )
        if order is not None:
            preds, targs, decoded, losses = (
                reordered(o, order) for o in (preds, targs, decoded, losses)
            )
        new = cls(learn, loader, preds, targs, decoded, losses)
        new._random = before
        if order is not None:
            new._order = order
        return new

    def __len__(self) -> int:
        return len(self.losses)

    def __getitem__(
        self,
        idxs: Any,  # the number of a sample, or several
    ) -> tuple[Any, ...]:  # inputs, predictions, targets, decoded predictions, losses
        "Return everything about some samples; their inputs are read now."
        rows = self._numbers(idxs)
        xb = self._inputs(rows)
        take = lambda o: take_rows(o, len(self), rows)
        return (
            xb[0] if len(xb) == 1 else xb,
            *map(take, (self.preds, self.targs, self.decoded, self.losses)),
        )

    def _numbers(self, idxs: Any) -> list[int]:
        rows = [
            int(i)
            for i in (
                idxs.flatten().tolist()
                if isinstance(idxs, Tensor)
                else [idxs]
                if isinstance(idxs, int)
                else idxs
            )
        ]
        if bad := [i for i in rows if not -len(self) <= i < len(self)]:
            raise OptionError(f'There is no sample {bad[0]}: there are {len(self)}.')
        return [i % len(self) for i in rows]

    def _inputs(self, rows: list[int]) -> tuple[Any, ...]:
        "Read some samples from the loader again, and leave it as it was."
        places = self._order[rows].tolist()
        found: dict[int, tuple[Any, Any]] = {}
        with preserve_loaders([self.dl]), preserved_generators(self.dl):
            if self._random is not None:
                restore_rng(self._random[0])
                restore_own(self.dl, self._random[1])
            start = 0
            for batch in self.dl:
                xb, yb = form_of(self.learn.dls, 'valid').split(batch)
                n = find_bs(xb, yb, self.learn.size_func)
                here = [i for i in places if start <= i < start + n]
                pieces = microbatches(xb, yb, 1, n) if here else []
                found |= {i: pieces[i - start] for i in here}
                start += n
                if len(found) == len({*places}):
                    break
        if len(found) < len({*places}):
            raise _other_samples(self.dl)
        xbs, ybs = zip(*(found[i] for i in places), strict=True)
        self._check_same(concat(list(ybs)), rows)
        return tuple(map_tensors(concat(list(xbs)), lambda t: t.detach().cpu()))

    def _check_same(self, yb: tuple[Any, ...], rows: list[int]) -> None:
        "Raise if these are other targets than those of the predictions, as far as that can be told."
        known = self.targs[rows] if isinstance(self.targs, Tensor) else None
        if known is None or len(yb) != 1 or not isinstance(yb[0], Tensor):
            return
        same_kind = (
            yb[0].shape == known.shape
            and yb[0].dtype == known.dtype
            and not known.is_floating_point()
        )
        if same_kind and not torch.equal(yb[0].cpu(), known):
            raise _other_samples(self.dl)

    def top_losses(
        self,
        k: int | None = None,  # how many; None, or more than there are: all
        largest: bool = True,  # False: the smallest
    ) -> tuple[Tensor, Tensor]:  # losses, and the numbers of their samples
        "Return the largest or smallest losses in their order; NaN counts as the largest."
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
            raise OptionError(
                f'top_losses(k={k!r}): k is a whole number from 1 up, or None for all.'
            )
        losses, idxs = self.losses.topk(
            len(self) if k is None else min(k, len(self)), largest=largest
        )
        return losses, idxs

    def plot_top_losses(
        self,
        k: int | Sequence[int] = 9,  # how many, or which: `range(9, 18)` are the next nine
        largest: bool = True,  # False: the smallest losses
        **kwargs: Any,  # for images `figsize`, in inches
    ) -> Any:
        "Show the samples with the largest losses, as `show_results` does, with the loss of each."
        if isinstance(k, int):
            _, idxs = self.top_losses(k, largest)
        else:
            _, all_idxs = self.top_losses(None, largest)
            idxs = all_idxs[self._numbers(k)]
        return self._show(idxs.tolist(), with_loss=True, **kwargs)

    def show_results(
        self,
        idxs: Any,  # numbers of samples
        **kwargs: Any,  # for images `figsize`, in inches
    ) -> Any:
        "Show samples with targets and predictions, wrong ones marked: images in a grid, anything else as a table."
        return self._show(self._numbers(idxs), **kwargs)

    def _show(self, rows: list[int], with_loss: bool = False, **kwargs: Any) -> Any:
        xb, _, targs, decoded, losses = self[rows]
        told = {'target': targs, 'predicted': decoded} | ({'loss': losses} if with_loss else {})
        xb = xb if isinstance(xb, tuple) else (xb,)
        return show_samples(xb, told, self.vocab, wrong_ones(decoded, targs), **kwargs)


def _other_samples(dl: Any) -> LoaderError:
    return LoaderError(
        f'{type(dl).__name__} gave other samples than when the predictions were made, so they cannot be '
        'shown: pass `dl=` one that gives the same each time.'
    )


class ClassificationInterpretation(Interpretation):
    """What a classifier mixes up: one class a sample, of two or more, or one a pixel or token.

    Classes are the best scores, where the loss function does not say it itself; a single score, of torch's binary
    losses, is class 1 above one half. Names come from `dls.vocab`, otherwise they are numbers. Targets that the loss
    ignores (`ignore_index`) do not count.

    Raises `OptionError` for targets that are no classes, and where there are more classes than names.

    >>> from learnkit import Learner
    >>> scores = torch.tensor([[3., 1.], [2., 0.], [0., 1.]])
    >>> learn = Learner([(scores, torch.tensor([0, 1, 1]))], torch.nn.Identity(), torch.nn.CrossEntropyLoss())
    >>> ClassificationInterpretation.from_learner(learn, ds_idx=0).confusion_matrix()
    array([[1, 0],
           [1, 1]])
    """

    def __init__(
        self, learn: Any, dl: Any, preds: Any, targs: Any, decoded: Any, losses: Tensor
    ) -> None:
        super().__init__(learn, dl, preds, targs, decoded, losses)
        self._d, self._t = _classes(preds, decoded, targs, _ignored(learn.loss_func))
        n = int(max(self._d.max(), self._t.max())) + 1 if len(self._t) else 0
        axis = (
            class_axis(preds, targs)
            if isinstance(preds, Tensor) and preds.ndim == targs.ndim + 1
            else None
        )
        self.vocab = class_names(self.vocab)
        if self.vocab is not None and len(self.vocab) < n:
            raise OptionError(
                f'There is a class {n - 1}, and only {len(self.vocab)} names of classes: `dls.vocab` has '
                'one for each.'
            )
        if self.vocab is None:
            self.vocab = list(range(max(n, 2, 0 if axis is None else preds.shape[axis])))

    def confusion_matrix(self) -> np.ndarray[Any, Any]:
        "Return how often a class, the row, was taken for another, the column: counts, `[classes, classes]`."
        n = len(self.vocab)
        return torch.bincount(self._t * n + self._d, minlength=n * n).view(n, n).numpy()

    def plot_confusion_matrix(
        self,
        normalize: bool = False,  # shares of each true class instead of counts
        title: str = 'Confusion matrix',
        cmap: str = 'Blues',  # matplotlib's name of a color map
        norm_dec: int = 2,  # decimals of shares
        plot_txt: bool = True,  # write the numbers into the cells; never for more than 40 classes
        figsize: tuple[float, float] | None = None,  # inches; None: by the number of classes
        ax: Any = None,  # matplotlib axes; None: those of a new figure
    ) -> Any:
        """Draw the confusion matrix, and return the axes; the row of a class without samples has no numbers.

        Cells are coloured by their share of the true class, also where they show counts."""
        from matplotlib.colors import PowerNorm

        matrix = self.confusion_matrix()
        sums, n = matrix.sum(1, keepdims=True), len(matrix)
        shares = matrix / np.maximum(sums, 1)
        side = min(max(4.0, 0.42 * n + 1.6), 14.0)
        ax = axes_or_new(ax, figsize or (side, side))

        # shares, so that a rare class looks like a frequent one; by the root one mistake is seen beside many hits
        image = ax.imshow(shares, cmap=cmap, norm=PowerNorm(0.5, 0, 1))
        every = -(-n // MOST_NAMES)
        names = [shorten(name, 20) for name in self.vocab][::every]
        turned = max(map(len, names)) > (3 if n > 5 else 8)
        ax.set_xticks(range(0, n, every), names, rotation=90 if turned else 0)
        ax.set_yticks(range(0, n, every), names)
        ax.set(title=title, xlabel='predicted', ylabel='actual')
        ax.grid(False)
        if plot_txt and n <= MOST_NAMES:
            shown = shares if normalize else matrix
            _write_cells(
                image, np.where(sums, shown, np.nan), f'.{norm_dec}f' if normalize else '.0f'
            )
        return ax

    def most_confused(
        self,
        min_val: int = 1,  # leave out what happened less often
    ) -> list[tuple[Any, Any, int]]:  # actual and predicted class, count; the most frequent first
        "Return which classes were taken for which others."
        matrix = self.confusion_matrix()
        pairs = [
            (self.vocab[i], self.vocab[j], int(matrix[i, j]))
            for i, j in zip(*matrix.nonzero(), strict=True)
            if i != j and matrix[i, j] >= min_val
        ]
        return sorted(pairs, key=lambda pair: -pair[2])

    def print_classification_report(self) -> None:
        "Print precision, recall and F1 of each class, by scikit-learn; raise `MissingExtraError` without it."
        try:
            from sklearn.metrics import classification_report
        except ImportError as e:
            raise MissingExtraError(
                'A classification report needs scikit-learn: pip install scikit-learn'
            ) from e
        print(
            classification_report(
                self._t.numpy(),
                self._d.numpy(),
                labels=range(len(self.vocab)),
                zero_division=0.0,
                target_names=list(map(str, self.vocab)),
            )
        )


def _write_cells(image: Any, numbers: Any, spec: str) -> None:
    "Write numbers into the cells of a picture, in black or white by their ground; zeros are faint."
    size = 10 if len(numbers) <= 12 else 8 if len(numbers) <= 20 else 6
    colors = image.cmap(image.norm(image.get_array()))
    for (i, j), value in np.ndenumerate(numbers):
        if np.isnan(value):
            continue
        dark = colors[i, j, :3] @ (0.299, 0.587, 0.114) < 0.5
        image.axes.text(
            j,
            i,
            format(value, spec) if value else '0',
            ha='center',
            va='center',
            fontsize=size,
            color='white' if dark else 'black',
            alpha=1 if value else 0.35,
        )


def _ignored(loss_func: Any) -> int:
    "Return the target that a loss ignores; torch's default where it does not say."
    own = getattr(
        loss_func, 'ignore_index', getattr(getattr(loss_func, 'func', None), 'ignore_index', -100)
    )
    return int(own)


def _classes(preds: Any, decoded: Any, targs: Any, ignored: int) -> tuple[Tensor, Tensor]:
    "Return predicted and true classes as flat whole numbers; raise `OptionError` for what are none."
    are_tensors = isinstance(decoded, Tensor) and isinstance(targs, Tensor)
    if not are_tensors or decoded.shape != targs.shape:
        raise OptionError(
            f'These are no classes of one target: predictions {describe(decoded)}, targets '
            f'{describe(targs)}. Give `act=`, whose largest score, or value above 0.5, is the class; for '
            'anything else `Interpretation` has the losses.'
        )
    d, t = decoded.flatten(), targs.flatten()
    for name, values in (('targets', t), ('predictions', d)):
        if values.is_floating_point() and not bool((values == values.round()).all()):
            raise OptionError(
                f'The {name} are {describe(values)}, not whole numbers of classes: a regression has no '
                'confusion matrix. Use `Interpretation`.'
            )
    if targs.ndim == 2 and targs.shape[1] > 1 and preds.shape == targs.shape:
        raise OptionError(
            f'The targets {describe(targs)} are several labels a sample: there is no confusion matrix.'
        )
    d, t = d.long(), t.long()
    counts = t != ignored
    d, t = d[counts], t[counts]
    if len(t) and (least := int(min(d.min(), t.min()))) < 0:
        raise OptionError(f'There is a class {least}, below 0.')
    return d, t
