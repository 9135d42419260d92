"""Every error the package raises by name, and the seven exceptions that steer the loop.

A `LearnkitError` says what was wrong, where, and what to do about it. A `CancelException` is no error: raised in a
callback it skips the rest of its level (see `learnkit.events` for the table)."""
from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ['LearnkitError', 'CallbackError', 'UnknownEventError', 'OrderError', 'CancelError', 'LoaderError',
           'EmptyLoaderError', 'BatchError', 'LossError', 'MetricError', 'OptimizerError', 'ModelError', 'FitError',
           'TimeError', 'OptionError', 'ScheduleError', 'WeightsError', 'CheckpointError', 'DamagedError',
           'FolderInUseError', 'MissingExtraError', 'CancelException', 'CancelBackwardException', 'CancelStepException',
           'CancelBatchException', 'CancelTrainException', 'CancelValidException', 'CancelEpochException',
           'CancelFitException']


def did_you_mean(
    word: str,              # what was written
    known: Iterable[str],   # what could have been meant
) -> str:
    """Return ` Did you mean `x`?` for the closest of `known`, or an empty string when nothing is close.

    >>> did_you_mean('befor_fit', ['before_fit', 'after_fit'])
    ' Did you mean `before_fit`?'
    """
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f' Did you mean `{close[0]}`?' if close else ''


class LearnkitError(Exception):
    "Base of every error that learnkit raises itself."


class CallbackError(LearnkitError, TypeError):
    "Something that was given as a callback is none, or cannot be added to this Learner."


class UnknownEventError(CallbackError):
    "An event was named that the lifecycle does not have."


class OrderError(CallbackError):
    "`run_before` or `run_after` contradicts `order`, or makes a cycle."


class CancelError(LearnkitError, RuntimeError):
    "A Cancel exception was raised where no level of its kind was open."


class LoaderError(LearnkitError, ValueError):
    "A loader or `DataLoaders` cannot be used as given."


class EmptyLoaderError(LoaderError):
    "A loader gave no batch."


class BatchError(LearnkitError, ValueError):
    "A batch lacks what the loop needs of it, its targets for one."


class LossError(LearnkitError, ValueError):
    "There is no loss function, or what it returned cannot be minimised."


class MetricError(LearnkitError, ValueError):
    "A metric cannot be computed from the predictions and targets it gets."


class OptimizerError(LearnkitError, ValueError):
    "An optimizer cannot be made or used with this model."


class ModelError(LearnkitError, ValueError):
    "The model cannot be trained as it is."


class FitError(LearnkitError, ValueError):
    "`fit` was called with arguments it cannot follow."


class TimeError(LearnkitError, ValueError):
    "A time or interval cannot be read, compared or combined."


class OptionError(LearnkitError, ValueError):
    "A callback or function got a value that it cannot work with."


class ScheduleError(OptionError):
    "A schedule cannot be followed: its pieces do not fill the run, for one."


class WeightsError(LearnkitError, ValueError):
    "A file of weights cannot be read, or is of another model; nothing was loaded."


class CheckpointError(LearnkitError):
    "A checkpoint cannot be written, found or gone on from; the message says what stands against it."


class DamagedError(CheckpointError):
    "A checkpoint's file is not as it was written, or holds what no checkpoint has; nothing of it was believed."


class FolderInUseError(CheckpointError):
    "Another run is writing its checkpoints into the folder."


class MissingExtraError(LearnkitError, ImportError):
    "A library that only some features need is not installed; the message says how to install it."


class CancelException(Exception):
    """Base of the exceptions that skip the rest of one level of the loop.

    A callback raises one of its seven subclasses: `raise CancelBatchException`. The level's `after_cancel_...` event
    follows, then its `after_...` event, and then what comes after that level.
    """
    level = ''  # the level whose wrapper catches it


class CancelBackwardException(CancelException):
    "Skip the rest of the backward pass and go to `after_backward`."
    level = 'backward'


class CancelStepException(CancelException):
    "Skip the optimizer step and go to `after_step`."
    level = 'step'


class CancelBatchException(CancelException):
    "Skip the rest of this batch and go to `after_batch`."
    level = 'batch'


class CancelTrainException(CancelException):
    "Skip the rest of this epoch's training and go to `after_train`."
    level = 'train'


class CancelValidException(CancelException):
    "Skip the rest of this validation loader and go to `after_validate`."
    level = 'validate'


class CancelEpochException(CancelException):
    "Skip the rest of this epoch and go to `after_epoch`."
    level = 'epoch'


class CancelFitException(CancelException):
    "End the fit and go to `after_fit`."
    level = 'fit'
