"""Whether a Learner can count what an amount of time is given in."""

from __future__ import annotations

from collections.abc import Mapping

from learnkit.core.batch import form_of
from learnkit.core.errors import TimeError
from learnkit.core.learner_type import LoopLike
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.core.time import Time

__all__ = ['counts_tokens', 'check_countable']


def counts_tokens(learn: LoopLike) -> bool:
    "Tell whether the tokens of training batches can be counted."
    if learn.token_func is not None:
        return True
    dl = learn.dls.train
    with preserved_rng(), preserved_generators(dl):
        drawn = iter(dl)
        batch = None if drawn is dl else next(drawn, None)  # of an iterator, a batch would be lost
    if batch is None:
        return True
    x = form_of(learn.dls).split(batch)[0][0]
    return isinstance(x, Mapping) and 'input_ids' in x


def check_countable(learn: LoopLike, time: Time) -> None:
    "Raise `TimeError` for an amount of tokens where nothing counts them; the first batch is asked about samples."
    if time.unit == 'sp':
        learn.run.counts_samples = repr(str(time))  # the first batch will tell
    if time.unit != 'tok' or counts_tokens(learn):
        return
    raise TimeError(
        f'{str(time)!r}: tokens are not counted. Give `Learner(token_func=f)`, where f(xb, yb) returns the '
        'number of tokens of a batch, or use ba, st, sp or ep.'
    )
