"""The watch that processes keep over one another: when one fails, hangs or dies, all end, and say why."""
from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import inf
from time import monotonic, sleep
from typing import Any

from learnkit.distributed import connections
from learnkit.distributed.verdicts import Report, Verdict, judge
from learnkit.distributed.whereabouts import Place, stack_of, whereabouts
from learnkit.errors import DistributedError
from learnkit.world import World

__all__ = ['Watch']

LOOK_S = 0.5        # between two looks at the others, in a world of 128 or fewer
GRACE_S = 0.3       # in which a process may end by itself, once another has failed
PYTHON_S = 1.       # after which it is interrupted, if that has not ended it
EXIT_S = 2.         # after which a process that hangs and was interrupted is ended
PATIENCE_S = 6.     # longest wait for what has become of the others, once a connection was lost
ENDS_EVERY = 4      # looks, between two at this process's own connections
UNSEEN = 'a run'    # of no Learner: nothing is known of its progress
LONGEST = 16_000    # characters of a traceback that others show


class Watch:
    """One process's part of the watch: a thread that looks after the others twice a second.

    What it knows of a run it reads from beside it, so that the loop pays nothing. A process that fails says so, with
    its traceback; one that hangs is found by all standing still while it is behind; one that is gone is not heard of
    any more. The others then raise `DistributedError`, wherever they are: connections on which they wait are shut down,
    and Python code is interrupted as by Ctrl-C. A process that hangs outside of Python is ended after two seconds more.

    Made and closed by every process of a world of two or more. It sets no signal handler, and leaves no thread.
    """

    def __init__(
        self,
        world: World,
        timeout_s: float = 600.,    # after which a process that others wait for, and that does nothing new, hangs
    ) -> None:
        self.world, self.timeout_s = world, timeout_s
        self.look_s = LOOK_S * max(1, world.size / 128)
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._run, self._learn, self._main = 0, None, 0  # type: tuple[int, Any, int]
        self._inside = self._out = self._done = self._interrupted = self._closing = False
        self._lost: dict[str, Any] = {}                 # what has come out of a collective, and since when
        self._own: Verdict | None = None                # what the others are to be told
        self._verdict: Verdict | None = None            # what has ended this run
        self._last: Verdict | None = None               # what has ended the run before
        self._moved = monotonic(), Place((), '')        # the latest progress
        self._stack = ''                                # of this run, where it stands still
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._beat, self._acted = 0, {}                 # type: tuple[int, dict[str, float]]
        self._shown: list[connections.Ends] = []        # connections that the others know of
        self._parting: Verdict | None = None            # why there is no store any more
        self._asked: float | None = None                # when the first process was asked something, until it answers
        self._store: Any = self._connect()
        self._line = None if world.is_first else connections.connected(self._store.port)
        self._ports = [self._store.port, *([port] if (port := os.environ.get('MASTER_PORT')) else [])]
        self._theirs = {(far, near) for ends in world.gather(connections.between(self._ports)) for near, far in ends}
        self._thread = threading.Thread(target=self._keep, name='learnkit-watch', daemon=True)
        self._thread.start()

    # -- for the run ---------------------------------------------------------------------------------------------------

    @contextmanager
    def run(self, learn: Any = None) -> Iterator[None]:
        """Keep watch over a run; it ends when all processes have ended theirs, or with what `ended` returns.

        Every process opens the same runs, in the same order. One inside another is part of it."""
        if self._inside:
            yield
            return
        self._begin(learn)
        try:
            yield
            self._await_all()
        except BaseException as e:
            said = self.ended(e)
            if said is e: raise
            raise said from (e if isinstance(e, KeyboardInterrupt) else None)
        finally: self._end()

    def ended(self, e: BaseException) -> BaseException:
        """Return what has ended this process's run: `e`, of which the others are told, or a `DistributedError`.

        It is that where another process has failed before, and `e` comes of it, as a connection that was closed does.
        To be called before anything is cleaned up; a second call with what it has returned returns the same."""
        self._stand_down()
        if isinstance(e, (DistributedError, SystemExit)) or self._own is not None: return e
        if self._comes_of_another(e): return self._explained(e)
        with suppress(Exception): self._tell(self._failure(e))
        return e

    def failed(self, e: BaseException) -> None:
        "Tell the others that this process's run has failed, unless that comes of another's failure."
        self.ended(e)

    @property
    def has_failed(self) -> bool:
        "Whether a process has failed, in this run or the one before: there is nothing more to do together."
        return any(verdict is not None for verdict in (self._own, self._verdict, self._last))

    def close(self) -> None:
        "End the watch, once the others know that this process leaves."
        self._closing = True
        self._wake.set()
        until = monotonic() + PATIENCE_S + 10*self.look_s
        while self._thread.is_alive() and not self._is_unanswered() and monotonic() < until:
            self._thread.join(self.look_s / 4)
        if self._thread.is_alive() and self._line is not None:
            with suppress(OSError): self._line.shutdown(socket.SHUT_RDWR)
            self._thread.join(PATIENCE_S + 10*self.look_s)
        if self._line is not None: self._line.close()
        self._store = self._line = None

    # -- in the thread of the run --------------------------------------------------------------------------------------

    def _begin(self, learn: Any) -> None:
        with self._changed:
            self._last, self._verdict, self._own = self._verdict or self._own, None, None
            self._lost, self._acted = {}, {}
            self._run, self._learn, self._main = self._run + 1, learn, threading.get_ident()
            self._moved = monotonic(), Place((), '')
            self._out = self._done = self._interrupted = False
            self._inside = True

    def _end(self) -> None:
        self._stand_down()
        with self._changed: self._inside, self._learn = False, None

    def _stand_down(self) -> None:
        "Let this run's thread alone from here on; an interrupt that is on its way arrives here."
        for _ in range(3):
            with suppress(KeyboardInterrupt):
                with self._changed: self._out = True
                if self._interrupted and 'landed' not in self._acted:
                    self._acted['landed'] = monotonic()
                    sleep(0.01)
                return

    def _await_all(self) -> None:
        "Wait for the others to end this run, too."
        with self._changed:
            self._done = True
            self._wake.set()
            self._await(lambda: 'all' in self._acted or self._verdict is not None, inf)
        if self._verdict is not None and 'all' not in self._acted: raise DistributedError(self._verdict.text)

    def _await(self, known: Callable[[], bool], longest_s: float) -> None:
        "Wait for the watch's own thread, while it is there and gets answers."
        until = monotonic() + longest_s
        while not known() and self._thread.is_alive() and monotonic() < until:
            if self._is_unanswered(): return self._decide(Verdict(
                'gone', 0, f'Process 0 of {self.world.size} does not answer. It was killed or stopped, or its machine '
                           'cannot be reached.'))
            self._changed.wait(self.look_s / 4)

    def _is_unanswered(self) -> bool:
        return self._asked is not None and monotonic() - self._asked > 4*self.look_s

    def _comes_of_another(self, e: BaseException | None) -> bool:
        seen: set[int] = set()
        while e is not None and id(e) not in seen:
            seen.add(id(e))
            if isinstance(e, KeyboardInterrupt) and self._interrupted: return True
            if connections.is_lost(e): return True
            e = e.__cause__ or e.__context__
        return False

    def _explained(self, e: BaseException) -> DistributedError:
        "Wait for what is known of the others, and return the error that says it."
        with self._changed:
            if not isinstance(e, KeyboardInterrupt):
                self._lost = {'since': monotonic(), 'text': str(e), 'timed_out': 'imed out' in str(e)}
            self._wake.set()
            self._await(lambda: self._verdict is not None, PATIENCE_S + 4*self.look_s)
        verdict = self._verdict or self._last
        rank, size = self.world.rank, self.world.size
        return DistributedError(verdict.text if verdict is not None else
                                f'Process {rank} of {size} has lost the others, and knows nothing of them: {e}')

    def _failure(self, e: BaseException) -> Verdict:
        where = next((n for n in getattr(e, '__notes__', ()) if n.startswith('in ')), '')
        if not where and self._learn is not None: where = f'in {self._learn.phase} ' \
            f'(epoch {self._learn.epoch}, batch {self._learn.iter})'
        told = ''.join(traceback.format_exception(e)).rstrip()
        if len(told) > LONGEST: told = f'{told[:LONGEST//2]}\n...\n{told[-LONGEST//2:]}'
        what = ''.join(traceback.format_exception_only(type(e), e)).split('\n')[0]
        text = f'Process {self.world.rank} of {self.world.size} failed{where and f" {where}"}: {what}\n{told}'
        return Verdict('failed', self.world.rank, text)

    def _tell(self, verdict: Verdict) -> None:
        "Let the others know, and wait until it is said."
        with self._changed:
            self._own = verdict
            self._wake.set()
            self._await(lambda: 'told' in self._acted, PATIENCE_S)

    # -- in the watch's own thread -------------------------------------------------------------------------------------

    def _connect(self) -> Any:
        "Open a store in the first process, and a connection of this one to it."
        from torch.distributed import TCPStore
        world, wait = self.world, timedelta(seconds=max(5., min(self.timeout_s, 60.)))
        if world.is_first:
            store = TCPStore('127.0.0.1', 0, is_master=True, timeout=wait, wait_for_workers=False)
            for rank in range(world.size):
                for key in (f'{rank}', f'ends {rank}'): store.set(key, '')
            names = [os.environ.get('MASTER_ADDR', ''), socket.gethostname()]
            world.broadcast((connections.reachable_host(names), store.port))
            return world.together(lambda: store)
        host, port = world.broadcast(None)
        return world.together(lambda: TCPStore(host, port, timeout=wait, wait_for_workers=False))

    def _keep(self) -> None:
        try:
            while not self._closing:
                self._look()
                quick = self._verdict is not None or (self._done and not self._out)
                self._wake.wait(self.look_s / 20 if quick else self.look_s)
                self._wake.clear()
            if self._store is not None: self._leave(self._store)
        except Exception as e:  # no run that is well may end by this
            print(f'The watch over the other processes has ended: {e}', file=sys.stderr)
        finally:
            with self._changed: self._changed.notify_all()

    def _look(self) -> None:
        "Say how this process is, hear of the others, and act on it."
        if self._store is not None and not self._is_line_closed():
            self._asked = monotonic()
            try: self._exchange(self._store)
            except RuntimeError:
                if not self._is_line_closed(): raise
            self._asked = None
        if self._parting is not None and self._inside and 'all' not in self._acted: self._decide(self._parting)
        if self._verdict is not None: self._act(self._verdict)

    def _is_line_closed(self) -> bool:
        if self._line is None or not connections.has_ended(self._line): return False
        self._part(Verdict('gone', 0, f'Process 0 of {self.world.size} is gone: its connection was closed.'))
        return True

    def _part(self, why: Verdict) -> None: self._store, self._parting = None, why

    def _exchange(self, store: Any) -> None:
        "Tell how this process is, and take in what the others have told; all of it of one run."
        report = self._report()
        with self._changed:  # the next run may begin at any time, with an `_acted` of its own
            run, inside, done, own, acted = self._run, self._inside, self._done, self._own, self._acted
        key = f'verdict {run}'
        store.set(f'{self.world.rank}', report.json())
        ends = not self.world.is_first and store.check(['end'])  # asked before all are counted: the first leaves then
        if self._beat % ENDS_EVERY == 0: self._show_ends()
        if own is not None and 'told' not in acted: self._publish(key, own, run)
        if self._verdict is None and inside and store.check([key]): self._heed(store.get(key), run)
        if done and 'all' not in acted: self._count(f'done {run}', acted)
        if self._verdict is None and inside and self.world.rank < 2: self._judge(key, run)
        if ends:
            store.set(f'{self.world.rank}', Report(self._beat + 1, left=True).json())
            self._part(Verdict('left', 0, f'Process 0 of {self.world.size} has left the training.'))

    def _show_ends(self) -> None:
        "Let the others know of connections that are new."
        ends = connections.between(self._ports)
        if ends == self._shown: return
        self._shown = ends
        self._store.set(f'ends {self.world.rank}', json.dumps(ends))

    def _publish(self, key: str, verdict: Verdict, run: int) -> None:
        said = self._store.compare_set(key, '', json.dumps(verdict))
        with self._changed:
            if run == self._run: self._acted['told'] = monotonic()
        self._heed(said, run)

    def _heed(self, said: bytes, run: int) -> None:
        with self._changed:
            if run == self._run: self._decide(Verdict(*json.loads(said)))

    def _decide(self, verdict: Verdict) -> None:
        with self._changed:
            if self._verdict is not None: return
            self._verdict = verdict
            self._changed.notify_all()
        if verdict.kind == 'hang' and self.world.is_first: print(verdict.text, file=sys.stderr, flush=True)

    def _count(self, key: str, acted: dict[str, float]) -> None:
        "Note that this process has ended a run; tell it when all have."
        if 'counted' not in acted: acted['counted'] = self._store.add(key, 1)
        if self._store.add(key, 0) < self.world.size: return
        with self._changed:
            acted['all'] = monotonic()
            self._changed.notify_all()

    def _report(self) -> Report:
        "Return how this process is."
        self._beat += 1
        now, lost, at = monotonic(), self._lost, self._moved[1]
        came_out = self._inside and self._out and not self._done and at.text
        if not came_out: at = self._place()
        if self._moved[1] != at or at.text == UNSEEN: self._moved = now, at
        order, text = at
        stuck_s = now - self._moved[0]
        if not came_out: self._stack = stack_of(self._main) if self._inside and stuck_s > self.timeout_s / 2 else ''
        since = now - lost['since'] if lost else 0.
        return Report(self._beat, self._inside, self._closing, order, text, stuck_s, self._stack[-LONGEST:],
                      lost.get('text', ''), since, lost.get('timed_out', False))

    def _place(self) -> Place:
        "Return where this process is."
        learn, run = self._learn, float(self._run)
        if not self._inside: return Place((run,), 'no run')
        if self._done: return Place((run, 1.), 'the end of its run')
        if learn is None: return Place((run, 0.), UNSEEN)
        order, text = whereabouts(learn, self._main)
        return Place((run, 0., *order), text)

    def _judge(self, key: str, run: int) -> None:
        "Find out from all reports whether one of the processes hangs or is gone."
        now, size = monotonic(), self.world.size
        raw = self._store.multi_get([f'{rank}' for rank in range(size)])
        for rank, text in enumerate(raw):
            if self._heard.get(rank, (None,))[0] != text: self._heard[rank] = text, now
        reports = [Report.of(text) for text in raw]
        silent_s = [now - self._heard[rank][1] for rank in range(size)]
        deputy = 0. if self.world.is_first else 1.5  # the first process may hang itself
        verdict = judge(reports, silent_s, self.timeout_s + deputy, 4*self.look_s + deputy)
        if verdict is not None: self._publish(key, verdict, run)

    def _act(self, verdict: Verdict) -> None:
        "Get this run's thread out of where it is."
        if not self._inside or self._out: return
        since = monotonic() - self._acted.setdefault('seen', monotonic())
        hangs = verdict.kind == 'hang' and verdict.rank == self.world.rank
        if not hangs and since > GRACE_S and 'cut' not in self._acted: self._cut()
        if (hangs or since > GRACE_S + PYTHON_S) and 'interrupt' not in self._acted: self._interrupt()
        if since > (EXIT_S if hangs else GRACE_S + PYTHON_S + EXIT_S + self.timeout_s): self._exit(verdict)

    def _cut(self) -> None:
        "End the collectives that this process waits in."
        import torch.distributed as dist
        self._acted['cut'] = monotonic()
        connections.close(self._connections_between())
        if not dist.is_nccl_available() or not dist.is_initialized(): return
        with suppress(Exception): dist.group.WORLD.abort()  # type: ignore[union-attr]  # it is initialized

    def _connections_between(self) -> list[connections.Ends]:
        "Return the connections of this process to others of the training."
        theirs = self._theirs
        if self._store is not None:
            for text in self._store.multi_get([f'ends {rank}' for rank in range(self.world.size)]):
                theirs |= {(far, near) for near, far in json.loads(text or '[]')}
        return [ends for ends in connections.between(self._ports) if ends in theirs]

    def _interrupt(self) -> None:
        with self._changed:
            if self._out: return
            self._interrupted, self._acted['interrupt'] = True, monotonic()
            if hasattr(signal, 'pthread_kill'): signal.pthread_kill(self._main, signal.SIGINT)
            else: signal.raise_signal(signal.SIGINT)

    def _exit(self, verdict: Verdict) -> None:
        print(f'{verdict.text}\nProcess {self.world.rank} does not react, and is ended.', file=sys.stderr)
        for stream in (sys.stdout, sys.stderr): stream.flush()
        os._exit(1)

    def _leave(self, store: Any) -> None:
        "Let the others know that this process leaves; the first one waits until they do."
        world, self._asked = self.world, monotonic()
        own, run = self._own, self._run
        if own is not None and 'told' not in self._acted: self._publish(f'verdict {run}', own, run)
        store.set(f'{world.rank}', Report(self._beat + 1, left=True).json())
        self._asked = None
        if not world.is_first: return
        store.set('end', '')
        until = monotonic() + 8*self.look_s
        while monotonic() < until and not all(self._has_left(rank) for rank in range(1, world.size)):
            sleep(self.look_s / 50)

    def _has_left(self, rank: int) -> bool:
        "Tell whether another process has left, or is gone."
        if self._verdict is not None and (self._verdict.kind, self._verdict.rank) == ('gone', rank): return True
        return Report.of(self._store.get(f'{rank}')).left
