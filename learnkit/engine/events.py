# SPDX-License-Identifier: Apache-2.0
"""Table of the lifecycle: every moment of a run, in firing order, with its nesting and its name in Composer.

The loop, the handler tables, `Learner.show_training_loop` and the documentation all read this table, so they always
agree."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from types import SimpleNamespace

from learnkit.core.batch import short_repr
from learnkit.core.errors import (
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    UnknownEventError,
    did_you_mean,
)


@dataclass(frozen=True, slots=True)
class LifecycleRow:
    "Row of the lifecycle: an event, or a note about a loop or a condition."

    depth: int  # level of nesting
    event: str  # name of the event, or a note in brackets
    composer: str  # Composer's events at this moment; '': none
    doc: str  # state of the run when the event fires

    @property
    def is_note(self) -> bool:
        return self.event.startswith('[')


@dataclass(frozen=True, slots=True)
class Level:
    "Level of the loop: its three events, and the exception that skips the rest of the level."

    before: str
    after_cancel: str
    after: str
    exception: type[CancelException]


# a row a moment, nested by indentation: event | Composer's events | state of the run
_TABLE = """
after_create | INIT | the Learner is complete; fires once, for the callbacks given to its constructor
before_load | BEFORE_LOAD | a file of weights or a checkpoint was verified; nothing is loaded yet
after_load | AFTER_LOAD | weights and optimizers of the file are loaded
before_fit | FIT_START | counters are zero, the model is on its device; `fitting` is False in validate()
  [for each iteration, when set] | | an iteration is a number of whole epochs
  before_iteration | ITERATION_START | the first epoch of an iteration is about to start
  [for each epoch] | |
    before_epoch | EPOCH_START | `epoch` is set
      before_train | | model and learner are in training mode; `dl` is the training loader
        [for each batch] | |
        before_draw | BEFORE_DATALOADER | before every `next()`, also the one that finds the end
        after_draw | AFTER_DATALOADER | `batch` is as the loader returned it
        before_batch | BATCH_START, BEFORE_TRAIN_BATCH | `xb`, `yb` are on the device; `pred` is not set
          [for each microbatch] | | `xb`, `yb`, `pred`, `loss` and `loss_grad` belong to the microbatch
          before_pred | BEFORE_FORWARD | the forward pass is next
          after_pred | AFTER_FORWARD, BEFORE_LOSS | `pred` is what the model returned
          after_loss | AFTER_LOSS | `loss_grad` and `loss`, its copy, are set, with their graph until the batch ends
          before_backward | BEFORE_BACKWARD | training only
            after_cancel_backward | | CancelBackwardException was raised
          after_backward | AFTER_BACKWARD | gradients are computed
          [after the last microbatch] | | `xb` and `yb` are the whole batch again, `loss` is the weighted mean
          before_step | AFTER_TRAIN_BATCH | a step is due; gradients are unscaled from order 10 on, clipped from 11 on
            after_cancel_step | | CancelStepException was raised
          after_step | | weights are updated; gradients are cleared next
        after_cancel_batch | | CancelBatchException was raised
        after_batch | BATCH_END | counters are advanced
        batch_checkpoint | BATCH_CHECKPOINT | a checkpoint can be written, after any evaluation that was due
      after_cancel_train | | CancelTrainException was raised
      after_train | EPOCH_END | this epoch's training is over
      before_eval | EVAL_BEFORE_ALL, EVAL_STANDALONE_START | evaluation is next
        [for each validation loader] | | `dl_name` is its name
        before_validate | EVAL_START | model and learner are in evaluation mode; `dl` is the validation loader
          [for each batch: before_draw, after_draw] | |
          before_batch | EVAL_BATCH_START, PREDICT_BATCH_START | as in training
            before_pred | EVAL_BEFORE_FORWARD, PREDICT_BEFORE_FORWARD | as in training
            after_pred | EVAL_AFTER_FORWARD, PREDICT_AFTER_FORWARD | as in training
            after_loss | | as in training
          after_cancel_batch | | CancelBatchException was raised
          after_batch | EVAL_BATCH_END, PREDICT_BATCH_END | as in training
        after_cancel_validate | | CancelValidException was raised
        after_validate | EVAL_END | metrics are computed
      after_eval | EVAL_AFTER_ALL, EVAL_STANDALONE_END | evaluation is over
    after_cancel_epoch | | CancelEpochException was raised
    after_epoch | | the Recorder (order 50) adds its row, if it has trained, evaluated or logged anything
    epoch_checkpoint | EPOCH_CHECKPOINT | a checkpoint can be written
  after_iteration | ITERATION_END | the last epoch of an iteration is over
  iteration_checkpoint | ITERATION_CHECKPOINT | a checkpoint can be written
after_cancel_fit | | CancelFitException was raised
after_fit | FIT_END | after the last evaluation and checkpoint
before_predict | PREDICT_START | get_preds is about to run the validate events; `phase` is "predict"
after_predict | PREDICT_END | all predictions are made
after_error | | `error` is the exception (none of the Cancel ones) that ended the run
cleanup | | always, once per outermost run: undo what was changed, flush what was buffered
close | close | once per Learner: `learn.close()`, the end of `with learn:`, or interpreter exit
post_close | post_close | after every `close`
"""


def _parse_row(row: str) -> LifecycleRow:
    event_name, composer, doc = (cell.strip() for cell in row.split('|'))
    depth = (len(row) - len(row.lstrip())) // 2
    return LifecycleRow(depth, event_name, composer, doc)


LIFECYCLE = tuple(_parse_row(row) for row in _TABLE.strip().splitlines())

_CANCEL_EXCEPTIONS = (
    CancelFitException,
    CancelEpochException,
    CancelTrainException,
    CancelValidException,
    CancelBatchException,
    CancelBackwardException,
    CancelStepException,
)
LEVELS = {
    ex.level: Level(f'before_{ex.level}', f'after_cancel_{ex.level}', f'after_{ex.level}', ex)
    for ex in _CANCEL_EXCEPTIONS
}

# each name once, in firing order
EVENTS = tuple(dict.fromkeys(m.event for m in LIFECYCLE if not m.is_note))

# events of a training batch from the forward pass to the step, which a compiled step or a custom loop may skip
STEP_EVENTS = EVENTS[EVENTS.index('before_pred') : EVENTS.index('after_step') + 1]

# parts of a batch, and the methods of callbacks that return a context manager to enter around the part
CONTEXTS = {'forward': 'forward_context', 'backward': 'backward_context'}
WILL_STEP = (
    'will_step'  # method of callbacks that returns False if the current batch ends without a step
)
# what the loop calls besides events
METHODS = (*CONTEXTS.values(), WILL_STEP)

_batch_events = EVENTS[EVENTS.index('before_draw') : EVENTS.index('batch_checkpoint') + 1]
# events and methods of a batch, to which `run_train` and `run_valid` apply
INNER_EVENTS = frozenset([*_batch_events, *METHODS])

# names of handlers in other libraries: their endings, their levels, and names without either
_PREFIX_OF_ENDING = {'start': 'before', 'begin': 'before', 'end': 'after', 'finish': 'after'}
_NAMES_OF_LEVEL = {
    'fit': 'fit train training',
    'epoch': 'epoch',
    'train': 'train_epoch training_epoch',
    'batch': 'batch train_batch training_batch validation_batch val_batch test_batch step train_step training_step',
    'validate': 'validation val test validation_epoch val_epoch test_epoch',
    'eval': 'eval evaluate evaluation',
    'predict': 'predict',
    'step': 'optimizer_step',
}
_LEVEL_OF_NAME = {name: level for level, names in _NAMES_OF_LEVEL.items() for name in names.split()}
_EVENT_OF_METHOD = {
    'training_step': 'after_batch',
    'validation_step': 'after_batch',
    'on_after_backward': 'after_backward',
    'on_before_backward': 'before_backward',
    'on_before_optimizer_step': 'before_step',
    'on_exception': 'after_error',
}


# every event as an attribute, so that editors can complete the names
event = SimpleNamespace(**{name: name for name in EVENTS})


def lifecycle_markdown() -> str:
    "Return the lifecycle as a Markdown table, which `docs/lifecycle.md` contains."

    def format_row(m: LifecycleRow) -> str:
        name = m.event if m.is_note else f'`{m.event}`'
        return f'| {"&emsp;" * m.depth}{name} | {m.composer or "-"} | {m.doc} |'

    header = ['| event | Composer | when it fires |', '|---|---|---|']
    return '\n'.join([*header, *map(format_row, LIFECYCLE), ''])


def event_like(name: str) -> str | None:
    """Return the event that a method's name means, or None.

    The name is a handler's in another library, or close to the name of an event.

    >>> [event_like(name) for name in ('on_epoch_end', 'on_train_batch_end', 'fit_begin', 'after_bach', 'on_new_best')]
    ['after_epoch', 'after_batch', 'before_fit', 'after_batch', None]
    """
    if name in _EVENT_OF_METHOD:
        return _EVENT_OF_METHOD[name]
    level, _, ending = name.removeprefix('on_').rpartition('_')
    if ending in _PREFIX_OF_ENDING and level in _LEVEL_OF_NAME:
        return f'{_PREFIX_OF_ENDING[ending]}_{_LEVEL_OF_NAME[level]}'
    beginning, _, level = name.partition('_')
    if beginning == 'begin' and level in _LEVEL_OF_NAME:
        return f'before_{_LEVEL_OF_NAME[level]}'
    if not name.startswith(('before_', 'after_')):
        return None
    close = get_close_matches(name, EVENTS, n=1, cutoff=0.85)
    return close[0] if close else None


def canonical_event(
    name: object,
    where: str = '',  # class of the caller, for the error message
) -> str:
    """Return the name of an event as a plain string.

    Raises `UnknownEventError`, with the event of a handler's name in another library or the closest name, for an
    unknown event.

    >>> canonical_event(event.after_batch)
    'after_batch'
    """
    if isinstance(name, str) and name in EVENTS:
        return str.__str__(name)  # a member of an enum is not exactly a str
    place = f' ({where})' if where else ''
    if isinstance(name, str):
        meant = event_like(name)
        hint = f' Did you mean `{meant}`?' if meant else did_you_mean(name, EVENTS)
    else:
        hint = ' A Learner is called with events; the model with data: `learn.model(x)`.'
    raise UnknownEventError(
        f'There is no event {short_repr(name)}{place}.{hint} '
        'All events: `learn.show_training_loop()` or `learnkit.EVENTS`.'
    )
