"""Where a run is, seen from another thread: the loop pays nothing for it."""
from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from math import inf
from types import FrameType
from typing import Any, NamedTuple

from learnkit.data import evaluation_loaders
from learnkit.dispatch import place
from learnkit.events import EVENTS

__all__ = ['Place', 'stack_of', 'whereabouts']

# what the loop does outside of handlers, by the method that is under way, and the event that came before
PARTS = {'_do_pred': ('the forward pass', 'before_pred'), '_do_loss': ('the loss', 'after_pred'),
         '_backward': ('backward', 'before_backward'), '_step': ('the step', 'before_step'),
         '_draws': ('drawing a batch', 'before_draw'), '_set_device': ('the transfer of a batch', 'after_draw')}
DISPATCH = ('__call__', '_call_each')
_nth = {name: i for i, name in enumerate(EVENTS)}


class Place(NamedTuple):
    "Where a process is: a text, and numbers that are smaller the earlier in the run it is."
    order: tuple[float, ...]
    text: str


def whereabouts(learn: Any, thread: int) -> Place:
    "Return where a thread's run of a Learner is."
    event, text = _under_way(learn, sys._current_frames().get(thread))
    nth = _nth.get(event, -1) + (0. if text.startswith(event) else .5)
    where = place(learn) if learn.phase == 'train' else f'{place(learn)}, {learn.dl_name}'
    return Place((learn.epoch, *_part_of_epoch(learn, nth), nth), f'{text} ({where})')


def _part_of_epoch(learn: Any, nth: float) -> tuple[float, ...]:
    "Return numbers that grow from part to part of an epoch, within which events follow as they are listed."
    if 'train' in learn._open:
        done = learn.train_iter  # a batch is counted within its after_batch; an evaluation and a checkpoint may follow
        if learn._evaluating: return 1, 2*done, *_part_of_evaluation(learn, nth)
        if _nth['batch_checkpoint'] <= nth < _nth['before_eval']: return 1, 2*done, inf, 1
        return 1, 2*done - 1 if nth >= _nth['after_batch'] else 2*done + 1, 0, 0
    if nth < _nth['before_draw'] and 'validate' not in learn._open: return 0, 0, 0, 0
    if nth > _nth['after_eval']: return 3, 0, 0, 0
    return 2, 0, *_part_of_evaluation(learn, nth)


def _part_of_evaluation(learn: Any, nth: float) -> tuple[float, float]:
    "Return the numbers of the loader and of its batch."
    if nth == _nth['after_eval']: return inf, 0
    if learn.phase == 'train' or nth == _nth['before_eval']: return -1, 0
    names = [name for name, _ in evaluation_loaders(learn.dls)]
    n_loader = names.index(learn.dl_name) if learn.dl_name in names else 0
    if nth == _nth['before_validate']: return n_loader, -1
    return n_loader, inf if 'validate' not in learn._open else learn.iter


def _under_way(learn: Any, frame: FrameType | None) -> tuple[str, str]:
    "Return the latest event, and what is under way: its handler, or what the loop does after it."
    for f in _outwards(frame):
        name = f.f_code.co_name
        if name not in PARTS and name not in DISPATCH: continue
        known = f.f_locals
        if known.get('self') is not learn: continue
        if name in PARTS: return PARTS[name][1], PARTS[name][0]
        event, cb = known.get('event_name'), known.get('cb')
        if isinstance(event, str) and cb is not None: return event, f'{event} of {type(cb).__name__}'
    level = learn._open[-1] if learn._open else ''
    return f'before_{level}' if level else '', 'the training loop'


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def stack_of(thread: int) -> str:
    "Return the Python stack of a thread from where it has called the loop, as tracebacks show it."
    frames = list(_outwards(sys._current_frames().get(thread)))
    if not frames: return ''
    calls = [i for i, f in enumerate(frames) if f.f_globals.get('__name__') == 'learnkit.learner']
    n = min(calls[-1] + 2, len(frames)) if calls else len(frames)  # with the line that calls it
    return 'Stack (most recent call last):\n' + ''.join(traceback.format_stack(frames[0], limit=n))
