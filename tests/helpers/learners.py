"""The three builders of small Learners: what a test needs besides its data and its model."""

from collections.abc import Callable
from typing import Any

from fastcore.basics import noop

from learnkit import Learner, Recorder, TrainEvalCallback
from learnkit.testing import synth_learner


def quiet_learner(
    *args: Any,  # data, model, loss and optimizer, as of the class
    cls: Callable[..., Any] = Learner,  # or a function that returns a Learner
    has_bar: bool = True,  # False: without the ProgressCallback
    **options: Any,
) -> Any:
    "Return a Learner with its default callbacks that prints no rows."
    learn = cls(*args, **options)
    learn.logger = noop
    if not has_bar:
        learn.remove_cb(learn.progress)
    return learn


def quiet_synth_learner(*cbs: Any, **options: Any) -> Any:
    "Return a Learner that fits a line to noisy points (`synth_learner`) and prints no rows."
    if cbs:
        options['cbs'] = [*cbs, *options.get('cbs', ())]
    return quiet_learner(cls=synth_learner, **options)


def bare_learner(
    *args: Any,  # data, model, loss and optimizer, as of `Learner`
    cbs: Any = (),
    cls: Callable[..., Any] = Learner,
    recorder: Any = Recorder,  # class or instance; None: no Recorder
    **options: Any,
) -> Any:
    "Return a Learner that prints no rows, with TrainEvalCallback, a Recorder and `cbs` as its only callbacks."
    own = [TrainEvalCallback] if recorder is None else [TrainEvalCallback, recorder]
    return quiet_learner(*args, cls=cls, cbs=[*own, *cbs], default_cbs=False, **options)
