"""Forked child processes that run a job: they start in milliseconds, and leave no process or file behind."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import os
import random
import signal
import subprocess
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

# imported here because the first import, otherwise in each child, seeds NumPy's generator
import numpy.random  # noqa: F401
import torch

from learnkit.core.plain import to_plain

# options of Linux's prctl
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
MAX_OUTPUT = 8000  # characters of a child's output in an error message
_POLL_S = 0.001

_running: set[Child] = set()
_was_subreaper = 0  # setting of this process before the first child


class HarnessError(RuntimeError):
    "A job failed by itself, did not end, or cannot be forked; the message has the child's output."


# -- in the child ----------------------------------------------------------------------------------


@dataclass
class Planned:
    "Point in a job at which the child kills itself."

    name: str  # name given to `reached`
    nth: int  # number of calls of `reached` with this name
    sig: int  # signal
    group: bool  # whether the whole process group gets the signal
    pid: int = 0  # process id of the child, set when it starts
    seen: Counter[str] = field(default_factory=Counter)  # number of calls by name


_planned: Planned | None = None


def reached(name: str) -> None:
    """Mark a place at which `run_until_done` may kill the job. Outside of such a job this function does nothing.

    >>> reached('between two writes')
    """
    if _planned is None:
        return
    _planned.seen[name] += 1
    if (name, _planned.seen[name]) != (_planned.name, _planned.nth):
        return
    if _planned.group:
        # by another process: a loader's workers obey their parent
        command = ['kill', f'-{int(_planned.sig)}', '--', f'-{_planned.pid}']
        subprocess.run(command, check=True, start_new_session=True)
    else:
        os.kill(_planned.pid, _planned.sig)


def _run_child(
    job: Callable[[], Any],  # function that the child runs
    folder: Path,  # folder for its output and result
    parent: int,  # process id of the parent
    planned: Planned | None,  # place at which the child kills itself
) -> NoReturn:
    "Run the job in the child, and end the process with the exit code that the interpreter would give."
    global _planned
    code = 1
    try:
        os.setpgid(0, 0)
        _leave_parent(folder, parent)
        if planned:
            planned.pid = os.getpid()
            _planned = planned
        code = _run_job(job, folder)
        _run_exit_functions()
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


def _run_job(job: Callable[[], Any], folder: Path) -> int:
    "Run the job, save its result, and return its exit code."
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
    torch.save(to_plain(result, "The job's result"), folder / 'result.tmp')
    os.replace(folder / 'result.tmp', folder / 'result.pt')
    return 0


def _leave_parent(folder: Path, parent: int) -> None:
    "Reset the state that a forked process inherits: signal handlers, streams, hooks, thread settings, exit functions."
    import resource  # missing on Windows

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
    _redirect_streams(folder)
    faulthandler.enable(sys.stderr)
    sys.excepthook = sys.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    with catch_warnings():
        simplefilter('ignore', ResourceWarning)  # releases processes that the parent still uses
        _reset_exit_functions()
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _redirect_streams(folder: Path) -> None:
    "Redirect stdin to the null device, stdout and stderr to files in a folder."
    for fd, name in enumerate(('stdin', 'stdout', 'stderr')):
        if fd == 0:
            file = os.open(os.devnull, os.O_RDONLY)
        else:
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, fd)
        os.close(file)
        stream = open(fd, 'w' if fd else 'r', 1, 'utf-8', 'backslashreplace', closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f'__{name}__', stream)


def _reset_exit_functions() -> None:
    "Remove the parent's exit functions, and register the standard ones for the child's own objects."
    from multiprocessing import process, util

    from learnkit import learner

    atexit._clear()
    # or the child would remove the parent's temporary folders
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    # as the first use of `finalize` does, which was in the parent
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    # the next three as multiprocessing does in its child processes
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    process._children = set()  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    learner._open_learners.clear()
    atexit.register(learner._close_all)
    if loggers := sys.modules.get('learnkit.loggers.base'):
        loggers.open_loggers.clear()
        atexit.register(loggers._close_all)
    workers = sys.modules.get('torch.utils.data._utils.signal_handling')
    if workers:
        vars(workers).update(_SIGCHLD_handler_set=False)  # `_leave_parent` has reset the handler


def _run_exit_functions() -> None:
    "Wait for threads, and run the functions that the job registered for the interpreter's exit."
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does
    atexit._run_exitfuncs()


# -- in the parent ---------------------------------------------------------------------------------


def _prctl(option: int, value: Any) -> None:
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _adopt(child: Child) -> None:
    "Become the parent of the processes that a child leaves behind, so that this process can wait for them."
    global _was_subreaper
    if not _running:
        setting = ctypes.c_int(0)
        _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(setting))
        _was_subreaper = setting.value
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _running.add(child)


def _release(child: Child) -> None:
    "Restore this process's setting after the last child."
    if child not in _running:
        return
    _running.discard(child)
    if not _running:
        _prctl(_PR_SET_CHILD_SUBREAPER, _was_subreaper)


class Child:
    """Process that runs a job, created by `start`; as a context manager it kills its whole process group at the end.

    `stdout` and `stderr` are the output so far, `code` is the exit code (-9 after SIGKILL, as in `subprocess`), and
    `result` is the job's return value.
    """

    def __init__(self, pid: int, temporary_folder: Any) -> None:
        self.pid = pid
        self.code: int | None = None
        self._temporary_folder = temporary_folder
        self._folder = Path(temporary_folder.name)

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
        "Return value of the job: plain values and tensors."
        return torch.load(self._folder / 'result.pt', weights_only=True)

    def poll(self) -> int | None:
        "Return the exit code, or None while the child runs. After the child has ended, its process group is killed."
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
        sig: int,  # signal number
        group: bool = True,  # whether child processes of the child get it too, e.g. loader workers
    ) -> None:
        "Send a signal, unless the child has ended."
        if self.poll() is None:
            kill = os.killpg if group else os.kill
            kill(self.pid, sig)

    def wait(
        self,
        timeout_s: float = 600.0,  # maximum seconds to wait
        until: Callable[[], bool] = lambda: False,  # condition that ends the waiting, too
    ) -> int | None:
        """Wait for the child's end and return the exit code, or None if `until` was true first.

        Raises `HarnessError` after `timeout_s`.
        """
        end = monotonic() + timeout_s
        while self.poll() is None and not until():
            if monotonic() > end:
                raise self.error(f'did not end within {timeout_s:g} s', hangs=True)
            sleep(_POLL_S)
        return self.code

    def stop(self) -> None:
        "Kill the processes that still run, and remove the child's files."
        if self.code is None:
            self._kill_group()
            self.wait()
        _release(self)
        self._temporary_folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # all have ended, for which macOS raises PermissionError

    def _reap_group(self) -> None:
        "Wait for the processes that the child has left behind."
        try:
            while os.waitpid(-self.pid, 0)[0]:
                pass
        except ChildProcessError:
            pass

    def error(self, what: str, hangs: bool = False) -> HarnessError:
        "Return an error whose message has the end of the child's output."
        if hangs:
            self.send(signal.SIGABRT, group=False)  # faulthandler prints the stacks of all threads
            end = monotonic() + 1
            while self.poll() is None and monotonic() < end:
                sleep(_POLL_S)
        output = self.stderr.strip() or self.stdout.strip() or 'It wrote nothing.'
        return HarnessError(f'The job {what}.\n{output[-MAX_OUTPUT:]}')


def start(
    job: Callable[[], Any],  # function that the child runs; returns plain values or tensors
    planned: Planned | None = None,  # place at which the child kills itself
) -> Child:
    """Fork a child process that runs `job` in a new process group, and return the child.

    The child has one torch thread, separate files for its output, Python's default signal handlers, and the state of
    this process's random generators. Its exit code is the one that the interpreter would give. The child does not run
    this process's exit functions, and it is killed when this process ends. Raises `HarnessError` if no child can be
    forked: without `os.fork`, or after CUDA was used.

    >>> with start(lambda: sum(range(5))) as child: print(child.wait(), child.result)
    0 10
    """
    if not hasattr(os, 'fork'):
        raise HarnessError('This system cannot fork processes.')
    if torch.cuda.is_initialized():
        raise HarnessError(
            'This process uses CUDA, which no forked child could: leave that to the job.'
        )
    # the first step of an optimizer imports it, which would take a second in each child
    import_module('torch._dynamo')
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    temporary_folder = TemporaryDirectory(prefix='learnkit-child-', ignore_cleanup_errors=True)
    # blocked, as this process's handlers could run in the child
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        child = _fork(job, temporary_folder, os.getpid(), planned)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # raises for a Ctrl-C since the block
    except BaseException:
        child.stop()
        raise
    return child


def _fork(
    job: Callable[[], Any], temporary_folder: Any, parent: int, planned: Planned | None
) -> Child:
    rng_state = random.getstate()
    with catch_warnings():
        # Python warns of other threads; if the child hangs, the error lists them
        simplefilter('ignore', DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        random.setstate(rng_state)  # Python seeds its generator in a forked process
        _run_child(job, Path(temporary_folder.name), parent, planned)
    try:
        os.setpgid(pid, pid)
    except OSError:
        pass  # the child has done it
    child = Child(pid, temporary_folder)
    _adopt(child)
    return child
