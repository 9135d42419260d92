# SPDX-License-Identifier: Apache-2.0
"""`Learner.launch`: start several processes, train in them, and load the result into this process's Learner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping
from inspect import signature
from math import inf
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from threading import Thread
from time import monotonic, sleep, time
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from learnkit.core.batch import short_repr
from learnkit.core.errors import DistributedError, OptionError
from learnkit.core.model import name_of
from learnkit.core.optional import import_library
from learnkit.core.random import capture_rng, restore_rng
from learnkit.core.validation import check_count
from learnkit.distributed.callback import DistributedTraining

if TYPE_CHECKING:
    from learnkit.learner import Learner

GRACE_S = 8.0  # seconds in which the other processes may exit by themselves after a failure
_SERVE_CODE = (
    'import sys; sys.path[:] = sys.argv[2:]; '
    'from learnkit.distributed.launch import serve; serve(sys.argv[1])'
)
_PAYLOAD = 'payload.pt'  # file for the processes
_RESULT = 'result.pt'  # file of rank 0's result
_OUTPUT = 'output{}.txt'  # file of a rank's output


def launch(
    learn: Learner,
    *,
    fn: Callable[[Any], Any],  # function called with the Learner in each process
    nproc: int,  # number of processes
    **options: Any,  # further arguments of `DistributedTraining`
) -> Any:
    "Implement `Learner.launch`."
    _check_function(fn)
    check_count('nproc', nproc)
    if learn.run.depth or learn.world.size > 1:
        raise DistributedError('launch() inside a run, or in one of several processes.')
    own = [cb for cb in learn.cbs if isinstance(cb, DistributedTraining)]
    training = own[0] if own and not options else DistributedTraining(**options)
    with TemporaryDirectory(prefix='learnkit-launch-', ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _write_payload(learn, fn, training, folder)
        run_processes(folder, nproc)
        result = torch.load(folder / _RESULT, map_location='cpu', weights_only=False)
        learn.load_checkpoint_state(result['learner'])
        return result['result']


def _check_function(fn: Any) -> None:
    "Raise `OptionError` unless a function can be called with the Learner."
    if not callable(fn):
        raise OptionError(
            f'launch({short_repr(fn)}): pass a function of the Learner, as `lambda learn: learn.fit(3)`.'
        )
    try:
        parameters = signature(fn)
    except (TypeError, ValueError):  # a function in C has no signature
        return
    try:
        parameters.bind(None)
    except TypeError as e:
        raise OptionError(
            f'launch({name_of(fn)}): each process calls the function with its Learner, and it cannot be called so '
            f'({e}). Write `lambda learn: learn.fit(3)`.'
        ) from None


# -- payload for the processes ---------------------------------------------------------------------


def _write_payload(learn: Learner, fn: Any, training: DistributedTraining, folder: Path) -> None:
    "Write the Learner and the function to a file."
    rng = capture_rng()
    for device, states in rng.get('devices', {}).items():
        rng['devices'][device] = states[:1]
    payload = {
        'learn': learn,
        'fn': fn,
        'training': training,
        'rng': rng,
        # pickling loses the identity by which learning rates set by the optimizer are recognized
        'own_lrs': learn.opt is not None and learn.opt.own_lrs[0] is learn.lr,
    }
    _save(payload, folder / _PAYLOAD)


def _save(value: Any, path: Path) -> None:
    "Save a value for another process, functions and classes by value; raise `DistributedError` if pickle cannot."
    cloudpickle = import_library('cloudpickle', 'learn.launch')
    try:
        torch.save(value, path, pickle_module=cloudpickle, pickle_protocol=5)
    except Exception as e:
        raise DistributedError(
            f'The Learner, or the function or its result, cannot be sent to another process: {e}. Make that object '
            'in the function that is launched, or where it is first used.'
        ) from e


# -- in the process that launches ------------------------------------------------------------------


def run_processes(
    folder: Path,  # folder of the launch, with the payload
    n: int,  # number of processes
) -> None:
    """Run processes in new interpreters, as torchrun does, and print the output of rank 0; leave no process.

    Each process has its own session, so that an interrupt reaches this process only, which kills the others. Raises
    `DistributedError` if a process fails."""
    port = free_port()
    processes = []
    (folder / _OUTPUT.format(0)).touch()
    with (folder / _OUTPUT.format(0)).open('rb') as shown:
        try:
            for rank in range(n):
                processes.append(_start(folder, rank, environment(rank, n, port)))
            codes = _wait(processes, shown)
        finally:
            for p in processes:
                if p.poll() is None:
                    _kill(p)
                p.communicate()
    if any(code != 0 for code in codes):
        raise _make_error(folder, codes)


def _kill(process: subprocess.Popen[bytes]) -> None:
    "Kill a process, with the workers of its loaders where the system has groups of processes."
    if hasattr(os, 'killpg'):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _start(folder: Path, rank: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    "Start a process that writes its output to a file."
    with (folder / _OUTPUT.format(rank)).open('wb') as f:
        return subprocess.Popen(
            [sys.executable, '-c', _SERVE_CODE, str(folder), *sys.path],
            env=env,
            stdin=subprocess.PIPE,  # its end ends the process
            stdout=f,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(
    processes: list[subprocess.Popen[bytes]],
    shown: BinaryIO,  # file to print
) -> list[int | None]:
    "Print a file until all processes have exited, or one has failed for some time; return the exit codes."
    decoder = getincrementaldecoder('utf-8')('replace')
    codes: list[int | None] = [None]
    end = inf
    while None in codes and monotonic() < end:
        sleep(0.05)
        codes = [p.poll() for p in processes]
        print(decoder.decode(shown.read()), end='', flush=True)
        if any(codes):
            end = min(end, monotonic() + GRACE_S)
    return codes


def _make_error(folder: Path, codes: list[int | None]) -> DistributedError:
    "Return the error of the process that failed first."
    reports = sorted(folder.glob('failed-*'))
    if reports:
        return DistributedError(reports[0].read_text('utf-8'))
    rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
    how = f'exit code {code}' if code > 0 else signal.Signals(-code).name
    output = (folder / _OUTPUT.format(rank)).read_text('utf-8', 'replace')
    last_lines = ''.join(output.splitlines(keepends=True)[-30:])
    return DistributedError(f'Process {rank} of {len(codes)} has ended with {how}.\n{last_lines}')


def free_port() -> int:
    "Return a free TCP port of this machine."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return int(s.getsockname()[1])


def environment(
    rank: int,
    n: int,  # number of processes
    port: int,  # port on which rank 0 listens
) -> dict[str, str]:
    "Return the environment variables of a process as set by torchrun; OMP_NUM_THREADS divides the cores."
    defaults = {'OMP_NUM_THREADS': str(max(1, (os.cpu_count() or 1) // n))}
    if sys.platform == 'linux':
        defaults['GLOO_SOCKET_IFNAME'] = 'lo'
    return {
        **defaults,
        **os.environ,
        'RANK': str(rank),
        'LOCAL_RANK': str(rank),
        'WORLD_SIZE': str(n),
        'LOCAL_WORLD_SIZE': str(n),
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(port),
        'PYTHONUNBUFFERED': '1',
        'PYTHONIOENCODING': 'utf-8',
    }


# -- in a launched process -------------------------------------------------------------------------


def serve(
    folder: str,  # folder of the launch
) -> None:
    "Run one launched process: train, write the result or the error to the folder, and exit."
    rank = int(os.environ['RANK'])
    path = Path(folder)
    _end_with_parent(path)
    try:
        _train(rank, path)
    except BaseException as e:
        who = f'Process {rank} of {os.environ["WORLD_SIZE"]}'
        report = ''.join(traceback.format_exception(e))
        # a `DistributedError` may be a consequence of another process's error, and comes last
        name = f'failed-{isinstance(e, DistributedError):d}-{time():.6f}-{rank}'
        text = f'{who} has failed: {type(e).__name__}: {e}\n\n{report}'
        (path / name).write_text(text, 'utf-8')
        sys.exit(1)


def _train(rank: int, folder: Path) -> None:
    "Call the function with the Learner; rank 0 writes its state and the result to the folder."
    # written by the process that launches, with tensors that may be on a GPU
    payload = torch.load(folder / _PAYLOAD, map_location='cpu', mmap=True, weights_only=False)
    learn = payload['learn']
    if payload['own_lrs']:
        learn.opt.own_lrs = learn.lr, learn.opt.own_lrs[1]
    if rank == 0:
        restore_rng(payload['rng'])
    with learn.removed_cbs([DistributedTraining]), learn.added_cbs(payload['training']):
        result = payload['fn'](learn)
    learn.close()
    if rank == 0:
        _save({'learner': learn.checkpoint_state(), 'result': result}, folder / _RESULT)


def _end_with_parent(folder: Path) -> None:
    """Kill this process and its children when the parent ends, for any reason.

    The end of the parent closes stdin, a pipe from the parent."""
    parent = os.dup(0)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)

    def wait() -> None:
        os.read(parent, 1)
        rmtree(folder, ignore_errors=True)  # the parent has not removed its temporary folder
        if hasattr(os, 'killpg'):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)  # on Windows, where workers end with this process

    Thread(target=wait, daemon=True).start()
