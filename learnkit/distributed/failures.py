# SPDX-License-Identifier: Apache-2.0
"""Failures of ranks, published through the store of the process group.

A rank that raises an error publishes the error before the rank exits. A collective of the other ranks then fails,
because connections are closed or the timeout has expired, and these ranks read which rank has failed. A run without
failures has no additional threads or messages."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from learnkit.comm.ranks import Comm, has_agent_store
from learnkit.core.errors import DistributedError, list_places
from learnkit.engine.dispatch import format_place

if TYPE_CHECKING:
    from learnkit.learner import Learner

SETTLE_S = 2.0  # seconds to wait for the reports of other ranks, or for them to read a report
PATIENCE_S = 4.0  # seconds to wait for the store
# substrings of gloo's error messages, because gloo has no exception class
GLOO_MESSAGES = ('gloo/transport', 'pair closure', 'Connection closed by peer')
ADVICE = (
    'If nothing there takes so long, one of them has decided differently before, as by a Cancel exception: let '
    '`self.world.any(...)` take such a decision.'
)


class Failures:
    """Exchange of failures between the ranks of one `Comm`.

    Keys of the store: `error`, the first error of all ranks; `end/RANK`, the place where a collective of a rank has
    failed, or an empty string if the rank has left; `read/RANK`, once a rank has found the cause of its failure."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._store: Any = comm.store
        # error that ended this rank's run, and the error to raise instead of it
        self._reported: tuple[BaseException, BaseException] | None = None
        self._store_answers = True
        self._leaving: Thread | None = None

    def report(
        self,
        e: BaseException,  # error that has ended this rank's run
        learn: Learner,
    ) -> BaseException:
        """Publish an error for the other ranks, and return the error to raise.

        If another rank caused the error, this is a `DistributedError`. A second call with the same error returns the
        same result."""
        if self._reported is not None:
            reported, error = self._reported
            return error if e is reported else e
        error = e
        self._reported = e, error
        if isinstance(e, SystemExit):
            self.leave()
            return e
        self.comm.is_broken = True
        if is_lost(e):
            error = DistributedError(self._find_cause(e, learn))
            self._reported = e, error
        else:
            self._ask(lambda: self._publish(self._describe(e, learn)))
        self._ask(lambda: self._set('read'))
        return error

    def leave(self) -> None:
        "Inform the other ranks that this rank leaves."
        if not self.comm.is_broken:
            self._ask(lambda: self._set('end'))

    def linger(self) -> None:
        "Wait until this rank has left, and until the others have read the store, if it ends with this process."
        if self.comm.is_first and not has_agent_store():
            self._ask(self._await_readers)
        if self._leaving is not None:
            self._leaving.join(PATIENCE_S)

    def _await_readers(self) -> None:
        keys = [f'read/{rank}' for rank in range(1, self.comm.size)]
        end = monotonic() + SETTLE_S
        while monotonic() < end and not self._store.check(keys):
            sleep(0.02)

    def _set(self, key: str, text: str = '') -> None:
        self._store.set(f'{key}/{self.comm.rank}', text)

    def _publish(self, text: str) -> str:
        "Publish an error, and return the error that was published first."
        return str(self._store.compare_set('error', '', text).decode())

    def _ask(self, f: Callable[[], Any]) -> Any:
        "Return the result of a function of the store; None if the store does not answer, now or before."
        answers: list[Any] = []
        if not self._store_answers:
            return None

        def ask() -> None:
            with suppress(RuntimeError):  # torch raises it if the connection to the store is lost
                answers.append(f())

        thread = Thread(target=ask, daemon=True)
        thread.start()
        thread.join(PATIENCE_S + SETTLE_S)
        self._store_answers = bool(answers)
        return answers[0] if answers else None

    def _describe(self, e: BaseException, learn: Learner) -> str:
        who = f'Process {self.comm.rank} of {self.comm.size}'
        summary = f'{type(e).__name__}: {e}'.split('\n')[0]
        report = ''.join(traceback.format_exception(e)).rstrip()
        return f'{who} failed {describe_place(e, learn)}: {summary}\n{report}'

    def _find_cause(self, e: BaseException, learn: Learner) -> str:
        "Return a message with the rank that made a collective of this rank fail, and the reason."
        here = describe_place(e, learn)
        self._ask(lambda: self._set('end', here))
        # closed connections end the collectives of ranks that wait for this rank
        traceback.clear_frames(e.__traceback__)
        # in a thread, because gloo waits for collectives that still run, perhaps with a rank that waits for this report
        self._leaving = Thread(target=self.comm.leave, daemon=True)
        self._leaving.start()
        cause = self._ask(lambda: self._read_cause(here, 'imed out' in str(e)))
        if cause is not None:
            return str(cause)
        who = "torchrun's agent" if has_agent_store() else f'Process 0 of {self.comm.size}'
        return f'{who}, which keeps the store, does not answer. Process {self.comm.rank} waited {here}.'

    def _read_cause(self, here: str, timed_out: bool) -> str:
        "Return the message of a failed rank, or of what the other ranks report; wait `SETTLE_S` for reports."
        store = self._store
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        end = monotonic() + SETTLE_S
        while True:
            if store.check(['error']):
                return str(store.get('error').decode())
            ended = [rank for rank in others if store.check([f'end/{rank}'])]
            places = {rank: store.get(f'end/{rank}').decode() for rank in ended}
            if '' in places.values() or len(ended) == len(others) or monotonic() > end:
                break
            sleep(0.02)
        return self._publish(self._summarize({**places, self.comm.rank: here}, timed_out))

    def _summarize(self, places: dict[int, str], timed_out: bool) -> str:
        "Return a message that summarizes how the ranks have ended."
        size = self.comm.size
        waiting = '; '.join(
            f'process {rank} waited {text}' for rank, text in sorted(places.items()) if text
        )
        silent = [str(rank) for rank in range(size) if rank not in places]
        left = [rank for rank, text in places.items() if not text]
        if left:
            return f'Process {left[0]} of {size} has left the training: {waiting}.'
        if not silent:
            return f'The {size} processes waited for one another: {waiting}. {ADVICE}'
        who = f'Process {", ".join(silent)} of {size}'
        if timed_out:
            return (
                f'{who} hangs, or was stopped, for {self.comm.timeout_s:g} s: {waiting}. {ADVICE}'
            )
        return f'{who} does not answer: {waiting}. Was it killed, perhaps as memory ran out?'


def describe_place(e: BaseException, learn: Learner) -> str:
    "Describe the event, epoch and batch in which an error was raised."
    places = list_places(e)
    return f'in {places[0] if places else f"{learn.phase} ({format_place(learn)})"}'


def is_lost(e: BaseException | None) -> bool:
    "Return True if an error, or a cause of it, is the failure of a collective because of another rank."
    from torch.distributed import DistError

    seen: set[int] = set()
    while e is not None and id(e) not in seen:
        if isinstance(e, DistError) or (
            isinstance(e, RuntimeError) and any(part in str(e) for part in GLOO_MESSAGES)
        ):
            return True
        seen.add(id(e))
        e = e.__cause__ or e.__context__
    return False
