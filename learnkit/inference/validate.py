# SPDX-License-Identifier: Apache-2.0
"""Evaluate a Learner: the loss and the metrics of its loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from learnkit.core.errors import (
    CancelEpochException,
    CancelFitException,
)
from learnkit.core.interrupts import deferred_interrupts
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.run import preserved_state
from learnkit.inference.gather import (
    shard_loader,
)

if TYPE_CHECKING:
    from learnkit.learner import Learner
from learnkit.inference.loaders import find_loader_name, get_loader, resolve_loader


def validate(
    learn: Learner,
    *,
    ds_idx: int | None,
    dl: Any,
    cbs: Any,
) -> Any:
    "Compute and return the loss and metrics, as a list with names: `[valid_loss, *metrics]` of each loader."
    loader_name = find_loader_name(learn, ds_idx, dl)
    loaders: Any = None
    if dl is not None:
        loaders = [('valid', shard_loader(learn, resolve_loader(learn, dl))[0])]
    elif ds_idx is not None:
        dl = get_loader(learn, ds_idx)
        loaders = [('train' if ds_idx == 0 else 'valid', shard_loader(learn, dl)[0])]
    elif not evaluation_loaders(learn.dls):
        get_loader(learn, 1)  # raises
    # set if a callback of a run validates
    outer_record = {k: v for k, v in learn.__dict__.items() if k == 'final_record'}
    learn.final_record = None
    try:
        with (
            deferred_interrupts() as deferred,
            open_evaluation(learn, 'evaluation', cbs),
            deferred.paused(),
        ):
            learn.loader_name = loader_name
            run_in_fit_and_epoch(learn, partial(learn.do_evaluation, loaders))
        return learn.final_record
    finally:
        if learn.run.kind:
            del learn.final_record
            learn.__dict__.update(outer_record)


@contextmanager
def open_evaluation(learn: Learner, kind: str, cbs: Any = None) -> Iterator[None]:
    "Run an evaluation or a prediction outside of a fit within a context, and restore the loop's state."
    with (
        learn.run.lock,
        preserved_state(learn, learn.parts.evaluations.is_independent),
        learn.validation_context(cbs=cbs, inner=True),
        learn.parts.processes.run(learn, kind),
    ):
        yield


def run_in_fit_and_epoch(learn: Learner, body: Callable[[], Any]) -> None:
    "Call `body` between the events of a fit and an epoch, as training does."
    epoch = partial(learn._with_events, body, 'epoch', CancelEpochException)
    learn._with_events(epoch, 'fit', CancelFitException)
