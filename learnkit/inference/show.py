# SPDX-License-Identifier: Apache-2.0
"""Show a batch with targets and predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from learnkit.core.batch import form_of, microbatches
from learnkit.core.errors import OptionError
from learnkit.core.random import preserved_rng
from learnkit.core.validation import check_count
from learnkit.data.dataloaders import decodes_batches
from learnkit.data.show import (
    as_targets,
    find_errors,
    first_batch,
    first_samples,
    own_method,
    show_samples,
)

if TYPE_CHECKING:
    from learnkit.learner import Learner


def show_results(
    learn: Learner,
    *,
    ds_idx: int,
    dl: Any,
    max_n: int,
    shuffle: bool,
    **kwargs: Any,
) -> Any:
    "Show a batch with targets and predictions: images in a grid, other data as a table. Return the figure or table."
    check_count('max_n', max_n)
    dl = learn.dls[ds_idx] if dl is None else dl
    if shuffle:
        if not decodes_batches(dl):
            raise OptionError('show_results(shuffle=True): only loaders of fastai can be shuffled.')
        with preserved_rng():
            dl = dl.new(shuffle=True)
    batch = first_batch(dl)
    data_method = own_method(dl, 'show_results')
    _, targs, decoded = learn.get_preds(dl=[batch], with_decoded=True)
    if data_method is not None:
        return data_method(batch, decoded, max_n=max_n, **kwargs)

    xb, _ = first_samples(batch, form_of(learn.dls, 'valid'), max_n)
    preds = as_targets(decoded, targs)
    (preds,), (targs,) = microbatches((preds,), (targs,), max_n)[0]
    columns = {'predicted': preds} if targs is None else {'target': targs, 'predicted': preds}
    vocab = getattr(learn.dls, 'vocab', None)
    return show_samples(xb, columns, vocab, find_errors(preds, targs), **kwargs)
