"""Forked children that run a job: warm, so that one starts in milliseconds, and gone without a trace at its end."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any, NoReturn, Self
from warnings import catch_warnings, simplefilter

# seeds itself when it is first imported: in every child otherwise
import numpy.random  # noqa: F401
import torch

from learnkit.core.errors import LearnkitError
from learnkit.core.plain import plain

__all__ = ['Child', 'HarnessError', 'Planned', 'reached', 'start']

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37  # of Linux's prctl
LONGEST = 8000  # characters of a child's output that an error shows
_POLL_S = 0.001

_running: set[Child] = set()
_adopted_before = 0


class HarnessError(LearnkitError, RuntimeError):
    "A job failed by itself, did not end, or cannot be forked; the message has what the child wrote."


# In the child


@dataclass
class Planned:
    "The end that a child puts to itself."

    name: str
    nth: int
    sig: int
    group: bool
    pid: int = 0
    seen: Counter[str] = field(default_factory=Counter)


_planned: Planned | None = None


def reached(name: str) -> None:
    """Say that a job has come to a place by which `run_until_done` may kill it; anywhere else this does nothing.

    >>> reached('between two writes')
    """
    if _planned is None:
        return
    _planned.seen[name] += 1
    if (name, _planned.seen[name]) != (_planned.name, _planned.nth):
        return
    (os.killpg if _planned.group else os.kill)(_planned.pid, _planned.sig)


def _live(job: Callable[[], Any], folder: Path, parent: int, planned: Planned | None) -> NoReturn:
    "Be the child: run the job, and end with the exit code that the interpreter would give."
    global _planned
    code = 1
    try:
        os.setpgid(0, 0)
        _leave_parent(folder, parent)
        if planned:
            _planned, planned.pid = planned, os.getpid()
        code = _run(job, folder)
        _as_at_exit()
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)


def _run(job: Callable[[], Any], folder: Path) -> int:
    "Run the job, keep what it returns, and return its exit code."
    try:
        result = job()
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        raise
    except BaseException:
        traceback.print_exc()
        return 1
    torch.save(plain(result, "The job's result"), folder / 'result.tmp')
    os.replace(folder / 'result.tmp', folder / 'result.pt')
    return 0


def _leave_parent(folder: Path, parent: int) -> None:
    "Let go of what a forked process has of its parent: handlers, streams, threads' settings, what runs at exit."
    import resource  # not on Windows

    gc.freeze()  # collecting the parent's garbage would end its loaders' workers
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _running.clear()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for sig in signal.valid_signals():
        if callable(signal.getsignal(sig)):
            signal.signal(sig, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    _own_streams(folder)
    faulthandler.enable(sys.stderr)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    _own_exit()
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _own_streams(folder: Path) -> None:
    for fd, name in enumerate(('stdin', 'stdout', 'stderr')):
        path, how = (
            (folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            if fd
            else (os.devnull, os.O_RDONLY)
        )
        file = os.open(path, how, 0o600)
        os.dup2(file, fd)
        os.close(file)
        stream = open(fd, 'w' if fd else 'r', 1, 'utf-8', 'backslashreplace', closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f'__{name}__', stream)


def _own_exit() -> None:
    "Forget what the parent does at its exit; the package's own part is for the child's Learners alone."
    from multiprocessing import process, util

    from learnkit import learner

    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders among them
    # as its first use does, once
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    # as multiprocessing does in a child of its own
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    process._children = set()  # type: ignore[attr-defined]  # the same
    atexit.register(util._exit_function)  # type: ignore[attr-defined]  # the same
    learner._open_learners.clear()
    atexit.register(learner._close_all)
    if loggers := sys.modules.get('learnkit.loggers.base'):
        loggers.open_loggers.clear()
        atexit.register(loggers._close_all)
    workers = sys.modules.get('torch.utils.data._utils.signal_handling')
    if workers:
        vars(workers).update(_SIGCHLD_handler_set=False)  # it was reset above


def _as_at_exit() -> None:
    "Wait for threads, and run what the job has registered for the interpreter's exit."
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls
    atexit._run_exitfuncs()


# In the parent


def _prctl(option: int, value: Any) -> None:
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _adopt(child: Child) -> None:
    "Become the parent of the processes that this child leaves behind, so that they can be waited for."
    global _adopted_before
    if not _running:
        was = ctypes.c_int(0)
        _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was))
        _adopted_before = was.value
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _running.add(child)


def _adopt_no_more(child: Child) -> None:
    if child not in _running:
        return
    _running.discard(child)
    if not _running:
        _prctl(_PR_SET_CHILD_SUBREAPER, _adopted_before)


class Child:
    """A process that runs a job, made by `start`; as a context it ends with its whole process group.

    `stdout` and `stderr` are what it has written so far, `code` its exit code (-9 when SIGKILL ended it, as in
    `subprocess`), `result` what the job returned.
    """

    def __init__(self, pid: int, files: Any) -> None:
        self.pid, self.code = pid, None  # type: tuple[int, int | None]
        self._files, self._folder = files, Path(files.name)

    @property
    def stdout(self) -> str:
        return self._read('stdout')

    @property
    def stderr(self) -> str:
        return self._read('stderr')

    def _read(self, name: str) -> str:
        path = self._folder / name
        return path.read_text('utf-8', 'replace') if path.exists() else ''

    @property
    def result(self) -> Any:
        "What the job returned: plain values and tensors."
        return torch.load(self._folder / 'result.pt', weights_only=True)

    def poll(self) -> int | None:
        "Return the exit code, None while the child runs. What is left of its group then, is killed."
        if self.code is not None:
            return self.code
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        self.code = os.waitstatus_to_exitcode(status)
        self._kill_group()
        self._reap_group()
        return self.code

    def send(
        self,
        sig: int,
        group: bool = True,  # whether its own child processes get it too, loader workers for one
    ) -> None:
        "Send a signal, unless the child has ended."
        if self.poll() is None:
            (os.killpg if group else os.kill)(self.pid, sig)

    def wait(
        self,
        timeout_s: float = 60.0,
        until: Callable[[], bool] = lambda: False,  # wait until this is true, too
    ) -> int | None:
        "Wait for the end and return the exit code, None if `until` came first. Raises `HarnessError` when too late."
        end = monotonic() + timeout_s
        while self.poll() is None and not until():
            if monotonic() > end:
                raise self.error(f'did not end within {timeout_s:g} s', hangs=True)
            sleep(_POLL_S)
        return self.code

    def stop(self) -> None:
        "Kill what still runs, and remove the child's files."
        if self.code is None:
            self._kill_group()
            self.wait()
        _adopt_no_more(self)
        self._files.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # all have ended; PermissionError is macOS's way to say so

    def _reap_group(self) -> None:
        "Wait for the processes that the child has left behind."
        try:
            while os.waitpid(-self.pid, 0)[0]:
                pass
        except ChildProcessError:
            pass

    def error(self, what: str, hangs: bool = False) -> HarnessError:
        "Return an error that shows what the child has written."
        others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
        if hangs:
            self.send(signal.SIGABRT, group=False)  # it writes the stacks of its threads
            end = monotonic() + 1
            while self.poll() is None and monotonic() < end:
                sleep(_POLL_S)
        hint = (
            f' It was forked beside the threads {", ".join(others)}: a lock of theirs may hang it.'
            if hangs and others
            else ''
        )
        told = self.stderr.strip() or self.stdout.strip() or 'It wrote nothing.'
        told = '\n'.join(
            line for line in told.splitlines() if not line.startswith('Extension modules:')
        )
        if len(told) > LONGEST:
            told = f'{told[: LONGEST // 2]}\n...\n{told[-LONGEST // 2 :]}'
        return HarnessError(f'The job {what}.{hint}\n{told}')


def start(
    job: Callable[[], Any],  # what the child does; it returns plain values or tensors
    planned: Planned | None = None,  # where it ends itself
) -> Child:
    """Fork a child that runs `job`, in a process group of its own, and return it.

    It has one torch thread, own files for its output, Python's default signal handlers, random generators as they are
    here, and ends with the exit code that the interpreter would give. It does nothing of what this process does at its
    exit, and it dies with it. Raises `HarnessError` where no child can be forked.

    >>> with start(lambda: sum(range(5))) as child: print(child.wait(), child.result)
    0 10
    """
    if not hasattr(os, 'fork'):
        raise HarnessError('This system cannot fork processes.')
    if torch.cuda.is_initialized():
        raise HarnessError(
            'This process uses CUDA, which no forked child could: leave that to the job.'
        )
    # an optimizer's first step does, which takes a second in each child
    import_module('torch._dynamo')
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    files, parent = (
        TemporaryDirectory(prefix='learnkit-child-', ignore_cleanup_errors=True),
        os.getpid(),
    )
    # a handler would run in the child
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        child = _fork(job, files, parent, planned)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # a Ctrl-C that has waited comes here
    except BaseException:
        child.stop()
        raise
    return child


def _fork(job: Callable[[], Any], files: Any, parent: int, planned: Planned | None) -> Child:
    drawn = random.getstate()
    with catch_warnings():
        # of threads; the error of a hanging child tells of them
        simplefilter('ignore', DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        random.setstate(drawn)  # Python seeds a forked process anew
        _live(job, Path(files.name), parent, planned)
    try:
        os.setpgid(pid, pid)
    except OSError:
        pass  # the child was faster
    child = Child(pid, files)
    _adopt(child)
    return child
