"""Failures of ranks, published through the store of the process group.

A rank that raises publishes its error before it leaves. The others notice when a collective fails, as connections are
closed or the group's timeout is over, and then read who has failed. No thread and no message is added to a run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

from learnkit.core.comm import Comm, has_agent_store
from learnkit.core.errors import DistributedError
from learnkit.core.learner_type import LearnerLike
from learnkit.engine.dispatch import place

__all__ = ['Failures', 'is_lost']

# in which ranks whose collective has failed say so, and the rest is taken to be gone
SETTLE_S = 1.0
# longest wait for the store, which may be on a machine that is gone, and for the others to read it
PATIENCE_S = 4.0
# in errors of gloo, which have no type
LOST = ('gloo/transport', 'pair closure', 'Connection closed by peer')
LONGEST = 16_000  # characters of a traceback that others show
ADVICE = (
    'If nothing there takes so long, the processes have decided differently before: by a Cancel exception in '
    'one of them alone, or by a call there of what all do together (fit, validate, get_preds, gather). Let '
    '`self.world.any(...)` take such a decision.'
)


class Failures:
    """The failures of the ranks of one `Comm`: what this rank publishes, and what it reads of the others.

    Keys of the store: `error`, the first error of all; for each rank `lost/RANK`, the place where its collective has
    failed, `left/RANK`, and `read/RANK` once it knows why it ends."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._seen: BaseException | None = None  # what has ended this rank's run
        self._raised: BaseException | None = None  # what is raised in its place
        self._gone: list[int] = []  # ranks that read nothing any more
        self._answers = True  # the store does

    def report(
        self,
        e: BaseException,  # has ended this rank's run
        learn: LearnerLike,
    ) -> BaseException:
        """Publish an error for the other ranks, and return it; or a `DistributedError` where another rank caused it.

        A second call with the same error returns the same."""
        if self._seen is not None:
            return self._raised if e is self._seen and self._raised is not None else e
        self._seen = self._raised = e
        if isinstance(e, SystemExit):
            self.leave()
            return e
        self.comm.is_broken = True
        if is_lost(e):
            self._raised = DistributedError(self._find_cause(e, learn))
        else:
            self._ask(lambda: self._publish(self._describe(e, learn)))
        self._ask(lambda: self._set('read'))
        return self._raised

    def leave(self) -> None:
        "Let the others know that this rank leaves."
        if not self.comm.is_broken:
            self._ask(lambda: self._set('left'))

    def linger(self) -> None:
        "Keep the store for the others until they have read it, where it ends with this process."
        if not self.comm.is_first or has_agent_store():
            return
        others = [f'read/{rank}' for rank in range(1, self.comm.size) if rank not in self._gone]
        end = monotonic() + PATIENCE_S

        def wait() -> None:
            while others and monotonic() < end and not self.store.check(others):
                sleep(0.02)

        self._ask(wait)

    @property
    def store(self) -> Any:
        return self.comm.store

    def _set(self, what: str, text: str = '') -> None:
        self.store.set(f'{what}/{self.comm.rank}', text)

    def _publish(self, text: str) -> str:
        "Publish an error, and return the one that was published first."
        return str(self.store.compare_set('error', '', text).decode())

    def _ask(self, f: Callable[[], Any]) -> Any:
        "Return what the store answers; None if it does not, and is not asked again."
        answers: list[Any] = []
        if not self._answers:
            return None

        def ask() -> None:
            try:
                answers.append(f())
            except RuntimeError:  # of torch, when the store is gone
                pass

        thread = Thread(target=ask, daemon=True)
        thread.start()
        thread.join(PATIENCE_S + SETTLE_S)
        self._answers = bool(answers)
        return answers[0] if answers else None

    def _describe(self, e: BaseException, learn: LearnerLike) -> str:
        report = ''.join(traceback.format_exception(e)).rstrip()
        if len(report) > LONGEST:
            report = f'{report[: LONGEST // 2]}\n...\n{report[-LONGEST // 2 :]}'
        what = ''.join(traceback.format_exception_only(type(e), e)).split('\n')[0]
        return f'Process {self.comm.rank} of {self.comm.size} failed {where(e, learn)}: {what}\n{report}'

    def _find_cause(self, e: BaseException, learn: LearnerLike) -> str:
        "Return which rank has caused a collective of this one to fail, and why, as far as the store knows."
        here = f'{where(e, learn)}{code_of(e)}'
        # the others may wait for this rank, and not for the one that is gone: they fail as its connections close
        traceback.clear_frames(e.__traceback__)
        self.comm.leave()
        found = self._ask(lambda: self._read_cause(here, 'imed out' in str(e)))
        if found is not None:
            return str(found)
        who = "torchrun's agent" if has_agent_store() else f'Process 0 of {self.comm.size}'
        return (
            f'{who}, which keeps the store, does not answer: it has ended without a message, was stopped, or '
            f'cannot be reached. Process {self.comm.rank} waited {here}.'
        )

    def _read_cause(self, here: str, timed_out: bool) -> str:
        store, others = (
            self.store,
            [rank for rank in range(self.comm.size) if rank != self.comm.rank],
        )
        self._set('lost', here)
        end = monotonic() + SETTLE_S
        while True:
            if store.check(['error']):
                return str(store.get('error').decode())
            left = [rank for rank in others if store.check([f'left/{rank}'])]
            lost = [rank for rank in others if store.check([f'lost/{rank}'])]
            self._gone = [rank for rank in others if rank not in lost]
            if not self._gone or left or monotonic() > end:
                break
            sleep(0.02)
        places = {
            self.comm.rank: here,
            **{rank: store.get(f'lost/{rank}').decode() for rank in lost},
        }
        return self._publish(self._judge(left, places, timed_out))

    def _judge(self, left: list[int], places: dict[int, str], timed_out: bool) -> str:
        "Return what the reports of ranks whose collectives have failed say."
        size = self.comm.size
        waiting = '; '.join(
            f'process {rank} waited {text}' for rank, text in sorted(places.items())
        )
        if left:
            return f'Process {left[0]} of {size} has left the training: {waiting}.'
        if not self._gone:
            return f'The {size} processes waited for one another: {waiting}. {ADVICE}'
        who = f'Process {", ".join(map(str, self._gone))} of {size}'
        if timed_out:
            return (
                f'{who} hangs, or was stopped, for {self.comm.timeout_s:g} s: {waiting}. {ADVICE}'
            )
        return f'{who} has ended without a message: {waiting}. Was it killed, perhaps as memory ran out?'


def where(e: BaseException, learn: LearnerLike) -> str:
    "Return in which event, epoch and batch an error was raised."
    notes = [note for note in getattr(e, '__notes__', ()) if note.startswith('in ')]
    return notes[0] if notes else f'in {learn.phase} ({place(learn)})'


def code_of(e: BaseException) -> str:
    "Return the last line outside of torch and `Comm` that has led to an error."
    frames = [
        f
        for f in traceback.extract_tb(e.__traceback__)
        if 'torch' not in Path(f.filename).parts and Path(f.filename).name != 'comm.py'
    ]
    if not frames:
        return ''
    last = frames[-1]
    return f', in {last.name} at {Path(last.filename).name}:{last.lineno} `{last.line}`'


def is_lost(e: BaseException | None) -> bool:
    "Return True if an error comes from a collective that has failed because of another rank."
    from torch.distributed import DistError

    seen: set[int] = set()
    while e is not None and id(e) not in seen:
        if isinstance(e, DistError) or (
            isinstance(e, RuntimeError) and any(words in str(e) for words in LOST)
        ):
            return True
        seen.add(id(e))
        e = e.__cause__ or e.__context__
    return False
