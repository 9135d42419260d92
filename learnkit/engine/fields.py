# SPDX-License-Identifier: Apache-2.0
"""Fields of the training loop: the attributes of a Learner that the loop sets, each declared once.

The loop's defaults, what an evaluation restores, what a checkpoint holds and what is released at the end of a run
follow from this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learnkit.core.batch import BatchForm


class LoopFields:
    "Types of the fields in `FIELDS`, as attributes of the loop."

    # the place in the run
    training: bool
    fitting: bool
    phase: str  # 'train', 'valid' or 'predict'
    dl_name: str
    loader_name: str | None  # name of the loader in `dls`, if `dl_name` differs

    # counters
    n_epoch: int | None
    epoch: int
    iter: int
    train_iter: int
    n_iter: int | None
    pct_train: float

    # the batch and its results
    dl: Any
    batch_form: BatchForm | None  # how batches of the current loader are split
    batch: Any
    xb: tuple[Any, ...]
    yb: tuple[Any, ...]
    pred: Any
    loss: Any
    loss_grad: Any


ABSENT = object()  # default of an attribute that does not exist between batches


@dataclass(frozen=True)
class Field:
    "An attribute of a Learner that the loop sets."

    name: str
    default: Any
    restored: bool = False  # whether an evaluation restores it
    saved: type | None = None  # type of its entry in a checkpoint; None: no entry
    released: bool = False  # whether it gets its default again at the end of a run
    is_place: bool = False  # whether it says where an error was raised
    is_result: bool = False  # whether it is the batch, or a result of its forward pass


FIELDS = (
    # the place in the run
    Field('training', False, restored=True, saved=bool, is_place=True),
    Field('fitting', False),
    Field('phase', 'train', restored=True, saved=str, is_place=True),
    Field('dl_name', 'train', restored=True, saved=str, is_place=True),
    Field('loader_name', None, restored=True, released=True),  # in `dls`, if `dl_name` differs
    # counters
    Field('n_epoch', 1),
    Field('epoch', 0, saved=int, is_place=True),
    Field('iter', 0, restored=True, saved=int, is_place=True),
    Field('train_iter', 0, saved=int),
    Field('n_iter', None, restored=True, is_place=True),
    Field('pct_train', 0.0, saved=float, is_place=True),
    # the batch and its results
    Field('dl', None, restored=True, released=True, is_place=True),
    Field('batch_form', None, restored=True, released=True),  # how batches of `dl` are split
    Field('batch', None, restored=True, released=True, is_result=True),
    Field('xb', (None,), restored=True, released=True, is_result=True),
    Field('yb', (None,), restored=True, released=True, is_result=True),
    Field('pred', None, restored=True, released=True, is_result=True),
    Field('loss', None, restored=True, released=True, is_result=True),
    Field('loss_grad', ABSENT, restored=True, released=True, is_result=True),
)
RESTORED = tuple(f.name for f in FIELDS if f.restored)
SAVED = {f.name: f.saved for f in FIELDS if f.saved is not None}
PLACE = tuple(f.name for f in FIELDS if f.is_place)
RESULTS = tuple(f.name for f in FIELDS if f.is_result)
_RELEASED = tuple(f for f in FIELDS if f.released)


def set_defaults(learn: Any) -> None:
    "Set all fields of a new Learner."
    _set(learn, FIELDS)


def release_batch(learn: Any) -> None:
    "Release the batch and its results."
    _set(learn, _RELEASED)


def _set(learn: Any, fields: tuple[Field, ...]) -> None:
    for f in fields:
        if f.default is ABSENT:
            vars(learn).pop(f.name, None)
        else:
            setattr(learn, f.name, f.default)
