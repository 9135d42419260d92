"""Check that a Learner can count the unit of an amount of time."""

from __future__ import annotations

from collections.abc import Mapping

from learnkit.core.batch import form_of
from learnkit.core.errors import TimeError
from learnkit.core.learner_type import LoopLike
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.core.time import Time

__all__ = ['counts_tokens', 'check_countable']


def counts_tokens(learn: LoopLike) -> bool:
    "Return True if the tokens of training batches can be counted."
    if learn.token_func is not None:
        return True
    dl = learn.dls.train
    with preserved_rng(), preserved_generators(dl):
        batches = iter(dl)
        # a batch drawn from a plain iterator would be lost to the training
        batch = None if batches is dl else next(batches, None)
    if batch is None:
        return True
    x = form_of(learn.dls).split(batch)[0][0]
    return isinstance(x, Mapping) and 'input_ids' in x


def check_countable(learn: LoopLike, time: Time) -> None:
    "Raise `TimeError` for an amount of tokens if tokens are not counted. Samples are checked at the first batch."
    if time.unit == 'sp':
        learn.run.counts_samples = repr(str(time))
    if time.unit != 'tok' or counts_tokens(learn):
        return
    raise TimeError(
        f'{str(time)!r}: tokens are not counted. Give `Learner(token_func=f)`, where f(xb, yb) returns the '
        'number of tokens of a batch, or use ba, st, sp or ep.'
    )
