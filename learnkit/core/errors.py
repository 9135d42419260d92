# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the package: errors derived from `LearnkitError`, and cancel exceptions that control the loop.

The message of a `LearnkitError` names what was wrong, where, and the fix. A `CancelException` is not an error: a
callback raises it to skip the rest of a level of the loop (see the table in `learnkit.engine.events`)."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

PLACES = 'learnkit_places'  # attribute of an exception with the places where it was raised


class CancelException(Exception):
    """Base class of the exceptions that skip the rest of one level of the loop.

    A callback raises one of the seven subclasses: `raise CancelBatchException`. The `after_cancel_...` event of the
    level follows, then its `after_...` event, and then the loop continues after the level. If the level is not open,
    the loop raises `CancelError`.

    >>> [cls.level for cls in CancelException.__subclasses__()]
    ['backward', 'step', 'batch', 'train', 'validate', 'epoch', 'fit']
    """

    level = ''  # level of the loop that catches the exception


class CancelBackwardException(CancelException):
    """Skip the rest of the backward pass and go to `after_backward`.

    The optimizer step follows, with gradients set by the callback.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> def own_backward(cb):
    ...     (10 * cb.loss_grad).backward()
    ...     raise CancelBackwardException
    >>> with synth_learner(n_train=4, cbs=Callback(before_backward=own_backward)).no_bar() as learn: learn.fit(1)
    >>> learn.opt.n_steps
    4
    """

    level = 'backward'


class CancelStepException(CancelException):
    """Skip the optimizer step and go to `after_step`.

    The gradients are cleared afterwards, as after a step. To keep the gradients, raise `CancelBatchException`.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> def every_other(cb):
    ...     if cb.iter % 2 == 0: raise CancelStepException
    >>> with synth_learner(n_train=4, cbs=Callback(before_step=every_other)).no_bar() as learn: learn.fit(1)
    >>> learn.train_iter, learn.opt.n_steps
    (4, 2)
    """

    level = 'step'


class CancelBatchException(CancelException):
    """Skip the rest of this batch and go to `after_batch`.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> def every_other(cb):
    ...     if cb.training and cb.iter % 2: raise CancelBatchException
    >>> with synth_learner(n_train=4, cbs=Callback(before_batch=every_other)).no_bar() as learn: learn.fit(1)
    >>> learn.opt.n_steps
    2
    """

    level = 'batch'


class StepPutOff(CancelBatchException):
    """Postpone the optimizer step of a batch to a later batch, and keep the gradients.

    The exception ends a batch like any `CancelBatchException`. In a batch with several steps, the exception ends only
    the call of `optimize`, which returns False.

    >>> issubclass(StepPutOff, CancelBatchException)
    True
    """


class CancelTrainException(CancelException):
    """Skip the rest of this epoch's training and go to `after_train`.

    The evaluation follows as usual.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> def three_batches(cb):
    ...     if cb.training and cb.iter == 2: raise CancelTrainException
    >>> with synth_learner(n_train=10, cbs=Callback(after_batch=three_batches)).no_bar() as learn: learn.fit(1)
    >>> learn.train_iter, learn.history[0]['valid_loss'] is not None
    (3, True)
    """

    level = 'train'


class CancelValidException(CancelException):
    """Skip the rest of this validation loader and go to `after_validate`.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> def not_yet(cb):
    ...     if cb.epoch < 2: raise CancelValidException
    >>> with synth_learner(cbs=Callback(before_validate=not_yet)).no_bar() as learn: learn.fit(3)
    >>> [row['valid_loss'] is not None for row in learn.history]
    [False, False, True]
    """

    level = 'validate'


class CancelEpochException(CancelException):
    """Skip the rest of this epoch and go to `after_epoch`.

    A cancelled epoch adds no row to the history.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> def but_the_first(cb):
    ...     if cb.epoch == 0: raise CancelEpochException
    >>> with synth_learner(cbs=Callback(before_epoch=but_the_first)).no_bar() as learn: learn.fit(3)
    >>> [row['epoch'] for row in learn.history]
    [1, 2]
    """

    level = 'epoch'


class CancelFitException(CancelException):
    """End the fit and go to `after_fit`.

    Open levels end at once. `self.learn.stop()` instead ends a fit with the remaining events and evaluation.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> def enough(cb):
    ...     if cb.train_iter == 15: raise CancelFitException
    >>> with synth_learner(n_train=10, cbs=Callback(after_batch=enough)).no_bar() as learn: learn.fit(100)
    >>> learn.train_iter, len(learn.history)
    (15, 1)
    """

    level = 'fit'


def did_you_mean(
    word: str,  # unknown word
    known: Iterable[str],  # known words
) -> str:
    """Return ` Did you mean `x`?` for the closest word of `known`, or an empty string if no word is close.

    >>> did_you_mean('befor_fit', ['before_fit', 'after_fit'])
    ' Did you mean `before_fit`?'
    """
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f' Did you mean `{close[0]}`?' if close else ''


def add_note(e: BaseException, note: str) -> None:
    "Add a note to an exception; do nothing if the exception does not accept notes."
    try:
        e.add_note(note)
    except Exception:
        pass


def add_place(
    e: BaseException,
    place: str,  # callback and event, or phase, as 'Recorder.after_batch (epoch 0, batch 3)'
) -> None:
    """Add a note about where an exception was raised, and record the place.

    The record is an attribute of the exception, which is pickled with it. Notes of users are not places.

    >>> e = ValueError('broken')
    >>> e.add_note('in row 7 of data.csv')
    >>> add_place(e, 'Recorder.after_batch (epoch 0, batch 3)')
    >>> e.__notes__
    ['in row 7 of data.csv', 'in Recorder.after_batch (epoch 0, batch 3)']
    >>> list_places(e)
    ('Recorder.after_batch (epoch 0, batch 3)',)
    """
    add_note(e, f'in {place}')
    # written to `__dict__`, since an exception may reject attributes
    vars(e)[PLACES] = (*list_places(e), place)


def list_places(e: BaseException) -> tuple[str, ...]:
    "Return the recorded places of an exception, innermost first."
    places: tuple[str, ...] = vars(e).get(PLACES, ())
    return places


class LearnkitError(Exception):
    """Base class of the errors that learnkit raises.

    The message names what was wrong, where, and the fix. Most errors also derive from a built-in error, such as
    `ValueError`.

    >>> from learnkit import Learner
    >>> try: Learner([1, 2], 'model')
    ... except LearnkitError as e: print(type(e).__name__)
    ModelError
    """


class CallbackError(LearnkitError, TypeError):
    """An object is not a callback, or cannot be added to this Learner.

    >>> from learnkit.testing import synth_learner
    >>> synth_learner(cbs=print)
    Traceback (most recent call last):
    learnkit.core.errors.CallbackError: <built-in function print> (builtin_function_or_method) is not a callback:
    pass a Callback, its class, or `Callback(event=function)`.
    """


class UnknownEventError(CallbackError):
    """A callback names an event that does not exist.

    >>> from learnkit import Callback
    >>> Callback(befor_fit=print)
    Traceback (most recent call last):
    learnkit.core.errors.UnknownEventError: There is no event 'befor_fit' (Callback). Did you mean `before_fit`? ...
    """


class OrderError(CallbackError):
    """`run_before` or `run_after` of callbacks contradicts `order`, or forms a cycle.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> class Late(Callback): order = 20
    >>> class Early(Callback): order, run_after = 10, Late
    >>> synth_learner(cbs=[Early, Late])
    Traceback (most recent call last):
    learnkit.core.errors.OrderError: Late (order 20) must run before Early (order 10) by run_before or run_after,
    but after it by `order`. Change one of the two.
    """


class CancelError(LearnkitError, RuntimeError):
    """A cancel exception was raised while its level was not open.

    The table in `learnkit.engine.events` lists the open levels at each event.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> def too_late(cb): raise CancelBatchException
    >>> with synth_learner(cbs=Callback(after_epoch=too_late)).no_bar() as learn:
    ...     try: learn.fit(1)
    ...     except CancelError as e: print(e)
    CancelBatchException was raised in Callback(after_epoch=too_late) (epoch 0, batch 1), where no batch level
    is open (open: fit). It is legal from `before_batch` on, until `after_cancel_batch` or `after_batch` fires. ...
    """


class LoaderError(LearnkitError, ValueError):
    """A loader or `DataLoaders` cannot be used as given.

    >>> import torch
    >>> from learnkit import DataLoaders
    >>> DataLoaders(torch.zeros(8, 2))
    Traceback (most recent call last):
    learnkit.core.errors.LoaderError: The loader 'train' is a Tensor: use DataLoaders.from_tensors for tensors.
    """


class EmptyLoaderError(LoaderError):
    """A loader has no batches.

    >>> from learnkit import DataLoaders
    >>> DataLoaders([])
    Traceback (most recent call last):
    learnkit.core.errors.EmptyLoaderError: The loader 'train' (list) has no batches: are there samples in its data set?
    """


class BatchError(LearnkitError, ValueError):
    """A batch lacks entries that the loop needs, such as targets.

    >>> from learnkit import find_bs
    >>> find_bs({'name': 'text'})
    Traceback (most recent call last):
    learnkit.core.errors.BatchError: The batch has no size: there is no tensor with a dimension in ...
    """


class LossError(LearnkitError, ValueError):
    """The loss function is missing, or its return value cannot be minimized.

    >>> from torch import nn
    >>> from learnkit.testing import synth_learner
    >>> synth_learner(loss_func=nn.MSELoss)
    Traceback (most recent call last):
    learnkit.core.errors.LossError: loss_func=MSELoss is a class: write MSELoss().
    """


class MetricError(LearnkitError, ValueError):
    """A metric cannot be computed from the predictions and targets.

    Metrics are checked on the first training batch, before the first optimizer step.

    >>> import torch
    >>> from learnkit import accuracy
    >>> accuracy(torch.zeros(8, 3), torch.zeros(4))
    Traceback (most recent call last):
    learnkit.core.errors.MetricError: accuracy: (8,) predicted values do not fit targets of shape (4,): ...
    """


class OptimizerError(LearnkitError, ValueError):
    """An optimizer cannot be created, or cannot be used with this model.

    >>> from learnkit.testing import synth_learner
    >>> synth_learner(lr=-0.1).create_opt()
    Traceback (most recent call last):
    learnkit.core.errors.OptimizerError: lr=-0.1: pass a number, 0 or more.
    """


class ModelError(LearnkitError, ValueError):
    """The model cannot be trained as it is.

    >>> from learnkit.testing import synth_learner
    >>> synth_learner(model='a net')
    Traceback (most recent call last):
    learnkit.core.errors.ModelError: model=... is not a torch.nn.Module: ...
    """


class FitError(LearnkitError, ValueError):
    """`fit` was called with invalid arguments.

    >>> from learnkit.testing import synth_learner
    >>> synth_learner().fit(-1)
    Traceback (most recent call last):
    learnkit.core.errors.FitError: n_epoch=-1: pass a whole number, 0 or more.
    """


class TimeError(LearnkitError, ValueError):
    """A time or interval cannot be read, compared or combined.

    >>> from learnkit import Time
    >>> Time('2epochs')
    Traceback (most recent call last):
    learnkit.core.errors.TimeError: '2epochs' is not a time. The units are iter (iterations), ...
    """


class OptionError(LearnkitError, ValueError):
    """A callback or function got an invalid value.

    >>> from learnkit import GradientClip
    >>> GradientClip(max_norm=-1)
    Traceback (most recent call last):
    learnkit.core.errors.OptionError: GradientClip(max_norm=-1): pass a norm above 0.
    """


class ScheduleError(OptionError):
    """A schedule is invalid: it cannot be computed, or its pieces do not add up to the run.

    >>> from learnkit.callbacks.schedule import SchedCos, combine_scheds
    >>> combine_scheds([0.5, 0.6], [SchedCos(0, 1), SchedCos(1, 0)])
    Traceback (most recent call last):
    learnkit.core.errors.ScheduleError: pcts=[0.5, 0.6] sum to 1.1: shares of a whole are 0 or more, and sum to 1.
    """


class WeightsError(LearnkitError, ValueError):
    """A file of weights cannot be read, or contains the weights of another model; nothing was loaded.

    >>> import tempfile
    >>> from torch import nn
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = synth_learner().save(f'{folder}/line')
    ...     try: synth_learner(model=nn.Linear(1, 1)).load(path)
    ...     except WeightsError as e: print(str(e).replace(folder, '.'))
    ./line.pth does not fit Linear, in 4 places. Nothing was loaded. Pass `strict=False` to load what fits by name.
      missing: weight [1, 1]
      missing: bias [1]
      unexpected: a [1]
      unexpected: b [1]
    """


class CheckpointError(LearnkitError):
    """A checkpoint cannot be written, found or resumed from; the message names the reason.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try: synth_learner(path=folder).fit(1, resume='latest')
    ...     except CheckpointError as e: print(str(e).replace(folder, '.'))
    There is no checkpoint in ./checkpoints. The callback `Checkpoint()` writes them to its `folder`.
    """


class DamagedError(CheckpointError):
    """A checkpoint file is damaged, or holds objects that a checkpoint cannot have; nothing was loaded.

    `fit(resume=True)` skips damaged files and loads the newest valid checkpoint.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, 'a.ckpt')
    ...     _ = path.write_bytes(b'the first half of a file')
    ...     try: synth_learner().fit(1, resume=path)
    ...     except DamagedError as e: print(str(e).replace(folder, '.'))
    ./a.ckpt is not a whole checkpoint: it was cut short, or is another kind of file (...). ...
    """


class FolderInUseError(CheckpointError):
    """Another run is writing its checkpoints into the folder.

    The lock is released when the process that holds it ends, for any reason. A remaining file `.lock` has no effect.

    >>> import tempfile
    >>> from learnkit.core.files import FolderLock
    >>> with tempfile.TemporaryDirectory() as folder, FolderLock(folder):
    ...     try: FolderLock(folder).acquire()  # as a second `Checkpoint` would
    ...     except FolderInUseError as e: print(str(e).replace(folder, 'checkpoints'))
    checkpoints is in use: this process has been writing there since ... give this run its own folder, or end
    the other.
    """


class MissingExtraError(LearnkitError, ImportError):
    """An optional library is not installed; the message names the command that installs it.

    >>> from learnkit.core.optional import check_libraries
    >>> try: check_libraries('WandbLogger', 'wandb_of_mars')
    ... except MissingExtraError as e: print(e)
    WandbLogger needs wandb_of_mars: pip install wandb_of_mars
    """


class DistributedError(LearnkitError, RuntimeError):
    """Several ranks cannot train together, or another rank has failed.

    >>> from learnkit.comm.ranks import launched_as
    >>> launched_as({'RANK': '0', 'WORLD_SIZE': '2'})
    Traceback (most recent call last):
    learnkit.core.errors.DistributedError: RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT. ...
    """
