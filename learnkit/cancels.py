"""The seven exceptions that steer the loop: raised in a callback, each skips the rest of its level.

`learnkit.events` has the table of what is skipped, and what fires then; `CancelError` is what is raised where no level
of that kind is open."""
from __future__ import annotations

__all__ = ['CancelException', 'CancelBackwardException', 'CancelStepException', 'CancelBatchException',
           'CancelTrainException', 'CancelValidException', 'CancelEpochException', 'CancelFitException',
           'StepPutOff']


class CancelException(Exception):
    """Base of the exceptions that skip the rest of one level of the loop.

    A callback raises one of its seven subclasses: `raise CancelBatchException`. The level's `after_cancel_...` event
    follows, then its `after_...` event, and then what comes after that level. Where no level of its kind is open, a
    `CancelError` says so.

    >>> [cls.level for cls in CancelException.__subclasses__()]
    ['backward', 'step', 'batch', 'train', 'validate', 'epoch', 'fit']
    """
    level = ''  # the level whose wrapper catches it


class CancelBackwardException(CancelException):
    """Skip the rest of the backward pass and go to `after_backward`.

    With gradients of your own, the step goes on as usual.

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

    Gradients are kept, and the next batch adds to them.

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
    """Put the step of a batch off to a later one, and keep its gradients.

    An ordinary batch ends with it, as with any `CancelBatchException`. In a batch with several
    steps only the call of `optimize` ends, and returns False.

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

    An epoch that was cancelled has no row in the history.

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

    What is under way ends at once. `self.learn.stop()` ends a fit with its last events and evaluation.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> def enough(cb):
    ...     if cb.train_iter == 15: raise CancelFitException
    >>> with synth_learner(n_train=10, cbs=Callback(after_batch=enough)).no_bar() as learn: learn.fit(100)
    >>> learn.train_iter, len(learn.history)
    (15, 1)
    """
    level = 'fit'
