# SPDX-License-Identifier: Apache-2.0
"""Where a fit can continue after it has left the loop: after a batch if it paused, and at any event after an error.

The place of an error is found by the handler that has raised it (`Failure`), and else by the state of the source and
of the optimizer. Before the step a batch is repeated; otherwise the rest of the events is fired."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from learnkit.checkpoint.pause import NotPaused, make_pause
from learnkit.core.batch import map_tensors
from learnkit.core.errors import CancelError, CancelException, FitError
from learnkit.core.model import preserved_modes
from learnkit.data.dataloaders import TensorLoader
from learnkit.engine.callback_state import keeps_attributes
from learnkit.engine.events import EVENTS, INNER_EVENTS
from learnkit.engine.fields import PLACE, RESULTS
from learnkit.engine.lengths import epoch_length
from learnkit.engine.pause import FitPaused, PausedState
from learnkit.engine.positions import ends_iteration
from learnkit.engine.resumed_run import list_checkpoint_writers
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.checkpoint.pause import Pause
    from learnkit.engine.pause import Failure, FitCall
    from learnkit.learner import Learner

# events at which a fit can continue after an error
_BEGIN = ('before_iteration', 'before_epoch', 'before_train')
_BEFORE_FORWARD = ('after_draw', 'before_batch', 'before_pred')
_BEFORE_BACKWARD = (*_BEFORE_FORWARD, 'after_pred', 'after_loss', 'before_backward')
_BATCH = (*_BEFORE_BACKWARD, 'after_cancel_backward', 'after_backward', 'before_step')
_AFTER_STEP = ('after_cancel_step', 'after_step')
_OF_EVALUATION = (
    'before_eval',
    'before_validate',
    'after_cancel_validate',
    'after_validate',
    'after_eval',
)
_EVALUATION = ('after_cancel_train', 'after_train', *_OF_EVALUATION)
# events after a step, and at the end of an epoch, each with the events that follow it
_BEHIND = {
    'after_cancel_step': ('after_step', 'after_batch', 'batch_checkpoint'),
    'after_step': ('after_batch', 'batch_checkpoint'),
    'after_cancel_batch': ('after_batch', 'batch_checkpoint'),
    'after_batch': ('batch_checkpoint',),
    'batch_checkpoint': (),
}
_END_OF_EPOCH = {
    'after_cancel_epoch': ('after_epoch', 'epoch_checkpoint'),
    'after_epoch': ('epoch_checkpoint',),
    'epoch_checkpoint': (),
    'after_iteration': ('iteration_checkpoint',),
    'iteration_checkpoint': (),
    'after_fit': (),
}


def keep_pause(learn: Learner, call: FitCall, error: BaseException) -> None:
    "Keep the fit that this exception has ended, if it can continue; called before the end of the run."
    run = learn.run
    try:
        run.pause = _find_pause(learn, call, error)
    except NotPaused as e:
        run.not_paused = str(e)
        if isinstance(error, FitPaused) and not run.request.is_interrupt:
            raise FitError(
                f'The fit was to pause, but cannot continue, because {e}.'
            ) from e.__cause__
    if isinstance(error, FitPaused):
        if run.pause is not None:
            for writer in list_checkpoint_writers(learn):
                writer.save_pause(error.point)
        learn._end_cleanup()
        learn.opt.zero_grad()


def _find_pause(learn: Learner, call: FitCall, error: BaseException) -> Pause:
    "Return the pause at which a fit can continue after an exception; raise `NotPaused` if there is none."
    run = learn.run
    if isinstance(error, FitPaused):
        return make_pause(learn, call, error.point)
    resuming = run.resuming
    if isinstance(resuming, PausedState):
        run.request.restored = resuming.pause  # it was not restored yet
    if run.request.restored is not None:
        pause: Pause = run.request.restored
        return pause
    if resuming is not None:
        raise NotPaused('it was stopped before it had resumed from its checkpoint')
    if isinstance(error, (CancelException, CancelError)):
        raise NotPaused('a Cancel exception was raised where its level is not open')
    if learn.world.size > 1:
        raise NotPaused('the states of several processes may differ after an error')
    if run.depth > 1:
        raise NotPaused('it was a fit within another run')
    before = {name: getattr(learn, name) for name in PLACE}
    modes = vars(learn.parts.modes)
    modes_before = dict(modes)
    try:
        with preserved_modes(learn.model):
            return _make_pause_of_error(learn, call, run.request.find_failure(error))
    finally:
        # the end of the run reports where the error was raised
        vars(learn).update(before)
        modes.update(modes_before)


def _make_pause_of_error(learn: Learner, call: FitCall, failure: Failure | None) -> Pause:
    """Return the pause at which a fit can continue after an exception.

    The place is found by the handler that has raised it, or else by the state of the source."""
    request, positions = learn.run.request, learn.parts.positions
    event = '' if failure is None else failure.event
    if event == 'after_cancel_fit':
        raise NotPaused('it was cancelled')
    if not request.has_epoch or event in _BEGIN:
        return _make_pause_at_begin(learn, call, failure)
    if failure is not None and event in _END_OF_EPOCH:
        return _make_pause_at_end(learn, call, failure)
    if event in _EVALUATION or (failure is not None and failure.in_evaluation):
        return _make_pause_in_evaluation(learn, call, failure)
    if not request.has_begun:
        return _make_pause_at_begin(learn, call, failure)
    is_over = learn.parts.counters.epochs > request.n_epochs
    if not is_over and (not learn.training or learn.parts.evaluations.is_at_end):
        return _make_pause_in_evaluation(learn, call, failure)
    if positions.is_ending and positions.left is None:
        return _make_pause_in_evaluation(learn, call, failure)
    if is_over or (positions.left is None and request.count_drawn(learn)):
        raise NotPaused('it was interrupted between two events')
    if positions.left is None or positions.is_drawing or event == 'before_draw':
        return _make_pause_in_draw(learn, call)
    return _make_pause_in_batch(learn, call, failure)


def _list_handled(learn: Learner, failure: Failure) -> list[Any]:
    "Return the callbacks whose handlers of an event have run before the one that has failed."
    cbs = [cb for _, _, cb in learn.parts.callbacks.tables[learn.training][failure.event]]
    places = [i for i, cb in enumerate(cbs) if cb is failure.cb]
    return cbs[: places[0]] if places else []


def _make_pause_at_begin(learn: Learner, call: FitCall, failure: Failure | None) -> Pause:
    "Return the pause before an epoch, with the random generators from before its first event."
    events: tuple[str, ...] = _BEGIN
    rng = learn.run.request.rng
    if learn.run.request.has_epoch and learn.epoch:
        learn.epoch -= 1
        pause = make_pause(learn, call, 'iteration' if ends_iteration(learn) else 'epoch')
        pause.point = 'epoch'
    else:
        events = ('before_fit', *_BEGIN)
        pause = make_pause(learn, call, '')
        pause.point = 'start'
    pause.state['rng'] = rng
    again = _list_repeated(learn, events, failure, True)
    if again:
        pause.caveat = f'handlers of {", ".join(again)} run again'
    return pause


def _make_pause_at_end(learn: Learner, call: FitCall, failure: Failure) -> Pause:
    "Return the pause within the events at the end of an epoch, whose rest is fired."
    event = failure.event
    is_over = event in ('after_iteration', 'iteration_checkpoint', 'after_fit')
    pause = make_pause(learn, call, 'iteration' if is_over else 'epoch')
    pause.point = 'epoch'
    pause.handled = {event: _list_handled(learn, failure)}
    pause.handled |= {later: [] for later in _END_OF_EPOCH[event]}
    return pause


def _make_pause_in_draw(learn: Learner, call: FitCall) -> Pause:
    "Return the pause before a batch that was being drawn, which is drawn again from the position in the data."
    learn.iter = learn.run.request.count_drawn(learn) - 1
    positions = learn.parts.positions
    position = positions.position
    is_intact = positions.left is not None and not positions.is_drawing
    pause = make_pause(learn, call, 'batch', is_intact)
    if is_intact:
        return pause
    pause.last_batch = None
    saved = pause.state['position']
    if saved is None or position is None:
        return pause
    start = saved['start']
    if not pause.n_drawn and start is not None:  # begin the pass again
        pause.state['rng'] = {**pause.state['rng'], **start.get('rng', {})}
        pause.state['position'] = {**saved, 'start': None, 'now': start}
    elif pause.n_drawn and position.before_draw is not None:
        pause.state['rng'] = {**pause.state['rng'], **position.before_draw}
    elif pause.n_drawn and not _draws_by_index(position.dl):
        pause.caveat = 'random numbers that the batch was being drawn with are not drawn again'
    return pause


def _draws_by_index(dl: Any) -> bool:
    "Return True for a loader whose batches need no random numbers of this process."
    return (
        isinstance(dl, TensorLoader)
        or type(dl) in (list, tuple)
        or bool(getattr(dl, 'num_workers', 0))
    )


def _make_pause_in_evaluation(learn: Learner, call: FitCall, failure: Failure | None) -> Pause:
    "Return the pause after the last batch of an epoch, whose evaluation begins again."
    event = '' if failure is None else failure.event
    _repeat_evaluations(learn)
    pct_train = learn.pct_train
    learn.phase = learn.dl_name = 'train'
    learn.dl = learn.run.request.dl
    learn.iter = learn.parts.positions.n_drawn - 1
    learn.n_iter = epoch_length(learn, learn.dl)[0]
    learn.parts.modes.train(learn)
    learn.pct_train = pct_train
    pause = make_pause(learn, call, 'batch')
    pause.last_batch = None
    pause.is_trained = True
    pause.handled = {'after_train': [] if learn.parts.positions.is_ending else None}
    if failure is not None and event == 'after_train':
        pause.handled = {'after_train': _list_handled(learn, failure)}
    elif event == 'after_cancel_train':
        pause.handled = {'after_train': []}
        pause.caveat = 'the rest of the handlers of `after_cancel_train` is left out'
    elif names := _list_evaluating(learn, None if failure is None else failure.cb):
        pause.caveat = f'{", ".join(names)} saw a part of the evaluation, which begins again'
    return pause


def _list_evaluating(learn: Learner, failed: Any) -> list[str]:
    "Return the callbacks of users, except for the one that has failed, that handle events of an evaluation."
    table = learn.parts.callbacks.tables[False]
    events = [*INNER_EVENTS.intersection(EVENTS), *_OF_EVALUATION]
    cbs = [cb for event in events for _, _, cb in table[event]]
    names = [type(cb).__name__ for cb in cbs if cb is not failed and keeps_attributes(cb)]
    return list(dict.fromkeys(names))


def _repeat_evaluations(learn: Learner) -> None:
    "Let the evaluations of this time be due again."
    evaluated = learn.parts.evaluations.evaluated
    for name in [name for name, time in evaluated.items() if time.ba == learn.time.ba]:
        del evaluated[name]


# -- a batch that has failed --------------------------------------------------------------------------


def _make_pause_in_batch(learn: Learner, call: FitCall, failure: Failure | None) -> Pause:
    "Return the pause before a batch that has failed, or after it if the optimizer has stepped."
    positions = learn.parts.positions
    event = '' if failure is None else failure.event
    if learn.opt.was_cut:
        raise NotPaused(
            "the optimizer's step was interrupted, and may have changed part of the weights"
        )
    is_counted = learn.parts.counters.batches > positions.n_trained
    if failure is not None and event in _BEHIND:
        return _make_pause_behind(learn, call, failure, is_counted)
    if is_counted:
        learn.iter = learn.run.request.count_drawn(learn) - 1
        pause = make_pause(learn, call, 'batch')
        pause.caveat = 'handlers of `after_batch` and `batch_checkpoint` may have been left out'
        return pause
    if learn.opt.n_steps != positions.n_steps:
        raise NotPaused('the batch was interrupted after an optimizer had stepped')
    return _make_pause_before(learn, call, event, failure)


def _make_pause_behind(learn: Learner, call: FitCall, failure: Failure, is_counted: bool) -> Pause:
    "Return the pause after the step of a batch, whose remaining events are fired."
    event = failure.event
    handled = {later: list[Any]() for later in (event, *_BEHIND[event])}
    handled[event] = _list_handled(learn, failure)
    if event in _AFTER_STEP:
        learn.opt.zero_grad()
    if not is_counted:
        learn.parts.callbacks.call_one(learn.train_eval, 'after_batch')
    if 'after_batch' in handled:
        handled['after_batch'] = [*handled['after_batch'], learn.train_eval]
        _repeat_evaluations(learn)
    pause = make_pause(learn, call, 'batch')
    pause.handled = {**handled}
    results = {name: value for name, value in vars(learn).items() if name in RESULTS}
    pause.batch_fields = map_tensors(results, _detach)
    if event in _AFTER_STEP:
        pause.caveat = 'the gradients of the failed batch are gone for the rest of its handlers'
    return pause


def _detach(t: Tensor) -> Tensor:
    return t.detach()


def _make_pause_before(learn: Learner, call: FitCall, event: str, failure: Failure | None) -> Pause:
    "Return the pause before a batch that has failed, which is repeated."
    batch = learn.batch
    learn.iter -= 1
    source = learn.run.replay_source
    drawn = None if source is None else source.find_drawn(batch)
    has_forward = event not in _BEFORE_FORWARD or (event == 'before_pred' and _may_repeat(learn))
    if drawn is not None:
        with drawn.restored(learn):
            pause = make_pause(learn, call, 'batch')
    else:
        if has_forward:
            _clear_gradients(learn, event)
        pause = make_pause(learn, call, 'batch')
    pause.open_pass.prepend(batch)
    pause.last_batch = None
    again = _list_repeated(learn, _BATCH, failure, drawn is not None)
    if has_forward and drawn is None:
        pause.caveat = (
            'the batch is repeated with buffers and random generators as it has left them'
        )
    elif again:
        pause.caveat = f'handlers of {", ".join(again)} run again for the repeated batch'
    return pause


def _may_repeat(learn: Learner) -> bool:
    "Return True if a batch may have several forward passes."
    has_own_batch = type(learn).train_batch.__module__ != 'learnkit.engine.loop'
    return has_own_batch or learn.seams.batch is not None


def _clear_gradients(learn: Learner, event: str) -> None:
    "Drop the gradients of a failed batch; raise `NotPaused` if those of earlier batches contain them."
    if not learn.parts.callbacks.has_handler('will_step'):
        learn.opt.zero_grad()
        return
    began = event not in _BEFORE_BACKWARD if event else 'loss_grad' in vars(learn)
    if began or _may_repeat(learn):
        raise NotPaused(
            'gradients that were accumulated over earlier batches contain part of the failed one'
        )


def _list_repeated(
    learn: Learner,
    events: Iterable[str],  # events that fire again
    failure: Failure | None,
    has_generators: bool,  # whether the generators from before these events are restored
) -> list[str]:
    "Return the users' callbacks that handle the events, and callbacks that draw random numbers."
    cb_failed = None if failure is None else failure.cb
    found: list[str] = []
    for event in events:
        is_last = failure is not None and event == failure.event
        for _, _, cb in learn.parts.callbacks.tables[True][event]:
            if is_last and cb is cb_failed:
                return found
            has_drawn = trait_of(cb, 'draws_for_batch') and not has_generators
            if cb is not cb_failed and (keeps_attributes(cb) or has_drawn):
                found += [name for name in [type(cb).__name__] if name not in found]
        if is_last:
            break
    return found
