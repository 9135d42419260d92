"""`Learner.launch`: start several processes, train in them, and load the result into this process's Learner."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from inspect import getclosurevars, isfunction
from io import TextIOWrapper
from math import inf
from pathlib import Path
from queue import Empty, Queue
from shutil import rmtree
from tempfile import TemporaryDirectory
from threading import Thread
from time import monotonic, time
from typing import Any

import torch
from torch import Tensor

from learnkit.checkpoint.file import read_state, write_state
from learnkit.core.errors import DistributedError, OptionError
from learnkit.core.learner_type import LearnerLike
from learnkit.core.optional import import_library
from learnkit.core.plain import to_plain
from learnkit.core.random import capture_rng, restore_rng
from learnkit.core.validation import check_count, warn_user
from learnkit.distributed.callback import DistributedTraining

__all__ = ['launch', 'serve']

GRACE_S = 8.0  # seconds in which processes may exit by themselves after a failure or an interrupt
_SERVE_CODE = (
    'import sys; sys.path[:] = sys.argv[2:]; '
    'from learnkit.distributed.launch import serve; serve(sys.argv[1])'
)
# prefixes of the environment variables that torchrun and srun set
_LAUNCHER_PREFIXES = (
    'TORCHELASTIC_',
    'GROUP_RANK',
    'GROUP_WORLD_SIZE',
    'ROLE_RANK',
    'ROLE_NAME',
    'ROLE_WORLD_SIZE',
    'SLURM_PROCID',
    'SLURM_LOCALID',
    'SLURM_STEP_NUM_TASKS',
)
_PAYLOAD = 'payload.pt'  # file for the processes
_RESULT = 'back.ckpt'  # file of rank 0's result


def launch(
    learn: LearnerLike,
    fn: Callable[[Any], Any],  # function called with the Learner in each process
    nproc: int,  # number of processes
    *,
    timeout: Any,  # timeout of the process group
    **options: Any,  # further arguments of `DistributedTraining`
) -> Any:
    "Implement `Learner.launch`."
    team = _make_team(learn, fn, nproc, timeout, options)
    with TemporaryDirectory(prefix='learnkit-launch-', ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _write_payload(learn, fn, team, folder / _PAYLOAD)
        with Workers(folder, nproc) as workers:
            workers.start()
            workers.wait(team.timeout.value)
        result, _ = read_state(folder / _RESULT)
        learn.load_checkpoint_state(result['learner'])
        if result['unsupported']:
            warn_user(
                f'The function has returned a {result["unsupported"]}, which stays behind: '
                'only tensors, numbers, strings, and lists, tuples or dicts of them come back.'
            )
        return result['result']


def _make_team(
    learn: LearnerLike, fn: Any, nproc: Any, timeout: Any, options: Mapping[str, Any]
) -> DistributedTraining:
    """Return the callback that joins the processes.

    Raises `OptionError` for invalid arguments, and `DistributedError` if processes cannot be started here."""
    if not callable(fn):
        raise OptionError(
            f'launch({fn!r}): give a function of the Learner, as in '
            '`learn.launch(lambda learn: learn.fit(3))`.'
        )
    check_count('nproc', nproc)
    if learn.run.depth:
        raise DistributedError(
            'launch() inside a run: its processes would not know of it. Call it '
            'before or after `fit`.'
        )
    if learn.world.size > 1:
        raise DistributedError('This process is one of several already: there, call `fit`.')
    own = [cb for cb in learn.cbs if isinstance(cb, DistributedTraining)]
    team = own[0] if own and not options else DistributedTraining(timeout=timeout, **options)
    _check_gpus(learn, team, nproc)
    return team


def _check_gpus(learn: LearnerLike, team: DistributedTraining, nproc: int) -> None:
    "Raise `DistributedError` if there are fewer GPUs than processes, which NCCL does not allow."
    device = getattr(learn.dls, 'device', None)
    if device is None or device.type != 'cuda' or team.backend == 'gloo':
        return
    n = torch.cuda.device_count()
    if nproc > n:
        raise DistributedError(
            f"nproc={nproc}, and there is {n} GPU(s): each process needs its own. Give nproc={n}; or backend='gloo', "
            'with which they share.'
        )


# -- payload for the processes ---------------------------------------------------------------------


def _write_payload(learn: LearnerLike, fn: Any, team: DistributedTraining, path: Path) -> None:
    "Write the Learner and the function to a file in a private folder, functions and classes by value."
    cloudpickle = import_library('cloudpickle', 'learn.launch')
    rng = capture_rng()
    if 'cuda' in rng:
        rng['cuda'] = rng['cuda'][:1]
    # pickling loses the identity by which learning rates set by the optimizer are recognized
    payload = {
        'learn': learn,
        'fn': fn,
        'team': team,
        'rng': rng,
        'own_lrs': learn.own_lrs[0] is learn.lr,
    }
    _check_parts(learn, fn)
    # `torch.save` preserves shared memory of tensors
    torch.save(payload, path, pickle_module=cloudpickle, pickle_protocol=5)


def _check_parts(learn: LearnerLike, fn: Any) -> None:
    "Raise `DistributedError` for a part of the Learner or the function that cannot be pickled, with its name."
    parts = {f'learn.{k}': getattr(learn, k) for k in ('model', 'loss_func', 'opt_func', 'opt')}
    parts |= {'learn.dls.train': learn.dls.train, 'learn.dls': learn.dls}
    parts |= {
        f'learn.{cb.name}.{k}': v for cb in learn.cbs for k, v in vars(cb).items() if k != 'learn'
    }
    if isfunction(fn):
        outer = getclosurevars(fn)
        used = {**outer.globals, **outer.nonlocals}
        parts |= {f'`{k}` of fn': v for k, v in used.items()}
    for name, value in {**parts, 'learn': learn, 'fn': fn}.items():
        error = _find_pickle_error(value, learn)
        if error is not None:
            raise DistributedError(
                f'{name} ({type(value).__name__}) cannot be sent to another process: {error}. Make it in '
                'the function that is launched, or where it is first used.'
            )


def _find_pickle_error(value: Any, learn: LearnerLike) -> str | None:
    "Return the error of pickling a value without the Learner and tensors in it; None if it succeeds."
    import cloudpickle

    class TrialPickler(cloudpickle.Pickler):
        def persistent_id(self, part: Any) -> str | None:
            is_skipped = type(part) is Tensor or (part is learn and value is not learn)
            return 'skipped' if is_skipped else None

    try:
        with open(os.devnull, 'wb') as null:
            TrialPickler(null, protocol=5).dump(value)
    except Exception as e:
        return str(e) or type(e).__name__
    return None


# -- in the process that launches ------------------------------------------------------------------


class Workers:
    """Context manager of the launched processes, which run in new interpreters as under torchrun.

    Each process has its own session, so that an interrupt reaches the launching process only, which then ends the
    other processes. No process is left at the end of the context."""

    def __init__(
        self,
        folder: Path,  # folder of the launch, with the payload
        n: int,  # number of processes
    ) -> None:
        self.folder = folder
        self.n = n
        self.processes: list[subprocess.Popen[bytes]] = []
        self._output: Queue[tuple[str, str]] = Queue()  # stream ('stdout', 'stderr') and line
        self._last_lines = [deque[str](maxlen=30) for _ in range(n)]  # stderr of each rank
        self._readers: list[Thread] = []

    def __enter__(self) -> Workers:
        return self

    def start(self) -> None:
        "Start the processes."
        port = free_port()
        for rank in range(self.n):
            self._start_rank(rank, port)

    def _start_rank(self, rank: int, port: int) -> None:
        process = subprocess.Popen(
            [sys.executable, '-c', _SERVE_CODE, str(self.folder), *sys.path],
            env=environment(rank, self.n, port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.processes.append(process)
        for pipe, stream in ((process.stdout, 'stdout'), (process.stderr, 'stderr')):
            reader = Thread(target=self._read, args=(rank, pipe, stream), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, rank: int, pipe: Any, stream: str) -> None:
        # newline='' keeps the \r at the end of a progress bar's lines
        with TextIOWrapper(pipe, 'utf-8', 'replace', newline='') as lines:
            for line in lines:
                if stream == 'stderr':
                    self._last_lines[rank].append(line)
                if rank == 0:
                    self._output.put((stream, line))

    def wait(
        self,
        timeout_s: float,  # seconds to wait for the other processes after the first has exited
    ) -> None:
        "Show the output of rank 0 until all processes exit; raise `DistributedError` if one fails."
        end = inf
        while True:
            codes = [p.poll() for p in self.processes]
            if None not in codes or monotonic() > end:
                break
            self._show(0.05)
            if any(codes):
                end = min(end, monotonic() + GRACE_S)
            elif end == inf and codes.count(None) < self.n:
                end = monotonic() + timeout_s
        if None in codes or any(codes):
            raise self._make_error(codes, timeout_s)
        self._show_rest()

    def _show(self, wait_s: float) -> None:
        "Print the next line of rank 0; wait for it at most `wait_s` seconds."
        try:
            stream, line = self._output.get(timeout=wait_s)
        except Empty:
            return
        print(line, end='', file=getattr(sys, stream), flush=True)

    def _show_rest(self) -> None:
        for reader in self._readers:
            reader.join(1.0)
        while not self._output.empty():
            self._show(0.0)

    def _make_error(self, codes: list[int | None], timeout_s: float) -> DistributedError:
        "Return the error of the process that failed first."
        self._kill()
        self._show_rest()
        reports = [json.loads(path.read_text('utf-8')) for path in self.folder.glob('failed*.json')]
        if reports:
            # a `DistributedError` may be a consequence of another process's error
            first = min(reports, key=lambda r: (r['type'] == DistributedError.__name__, r['time']))
            return DistributedError(
                f'Process {first["rank"]} of {self.n} has failed: {first["type"]}: '
                f'{first["message"]}\n\n{first["traceback"]}'
            )
        for rank, code in enumerate(codes):
            if code:
                how = f'exit code {code}' if code > 0 else signal.Signals(-code).name
                return DistributedError(
                    f'Process {rank} of {self.n} has ended with {how}.\n{"".join(self._last_lines[rank])}'
                )
        slow = ', '.join(str(rank) for rank, code in enumerate(codes) if code is None)
        return DistributedError(
            f'Process {slow} of {self.n} did not end within {timeout_s:g} s of the others.'
        )

    def __exit__(self, kind: Any, *rest: object) -> None:
        "Kill the remaining processes; after an interrupt, first interrupt them so that callbacks clean up."
        try:
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                self._interrupt()
        finally:
            self._kill()

    def _interrupt(self) -> None:
        for p in self.processes:
            if p.poll() is None:
                p.send_signal(signal.SIGINT)
        end = monotonic() + GRACE_S
        while any(p.poll() is None for p in self.processes) and monotonic() < end:
            self._show(0.05)

    def _kill(self) -> None:
        for p in self.processes:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)  # with the workers of its loaders
                p.wait()
            if p.stdin is not None:
                p.stdin.close()


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
    cores = os.process_cpu_count() if hasattr(os, 'process_cpu_count') else os.cpu_count()
    ranks = {
        'RANK': rank,
        'LOCAL_RANK': rank,
        'WORLD_SIZE': n,
        'LOCAL_WORLD_SIZE': n,
        'GROUP_RANK': 0,
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': port,
    }
    # the rank and store of a launcher that has started this process must not be inherited
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    defaults = {'OMP_NUM_THREADS': str(max(1, (cores or 1) // n))}
    if sys.platform == 'linux':
        defaults['GLOO_SOCKET_IFNAME'] = 'lo'
    return {
        **defaults,
        **inherited,
        **{k: str(v) for k, v in ranks.items()},
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
        _write_report(rank, e, path)
        sys.exit(1)


def _write_report(rank: int, e: BaseException, folder: Path) -> None:
    "Write an error to the folder, with its traceback."
    report = {
        'rank': rank,
        'type': type(e).__name__,
        'message': str(e),
        'time': time(),
        'traceback': ''.join(traceback.format_exception(e)),
    }
    temporary = folder / f'failed{rank}.tmp'
    temporary.write_text(json.dumps(report), 'utf-8')
    os.replace(temporary, folder / f'failed{rank}.json')


def _train(rank: int, folder: Path) -> None:
    "Call the function with the Learner; rank 0 writes its state and the result to the folder."
    # the parent has written the file in a private folder, so that unpickling is safe
    payload = torch.load(folder / _PAYLOAD, map_location='cpu', mmap=True, weights_only=False)
    learn = payload['learn']
    unsupported = ''
    if payload['own_lrs']:
        learn.own_lrs = learn.lr, learn.own_lrs[1]
    if rank == 0:
        restore_rng(payload['rng'])
    with learn.removed_cbs([DistributedTraining]), learn.added_cbs(payload['team']):
        result = payload['fn'](learn)
    learn.close()
    if rank:
        return
    try:
        result = to_plain(result, 'The result')
    except OptionError:
        unsupported = type(result).__name__
        result = None
    state = {'learner': learn.checkpoint_state(), 'result': result, 'unsupported': unsupported}
    write_state(folder / _RESULT, state, {})


def _end_with_parent(folder: Path) -> None:
    """Kill this process and its children when the parent ends, for any reason.

    The end of the parent closes stdin, a pipe from the parent."""
    parent = os.dup(0)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)

    def wait() -> None:
        os.read(parent, 1)
        rmtree(folder, ignore_errors=True)  # the parent has not removed its temporary folder
        os.killpg(0, signal.SIGKILL)

    Thread(target=wait, daemon=True).start()
