"""Training in several processes from a notebook: they are started here, and what they have trained is brought back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import getclosurevars, isfunction, ismethod
from io import RawIOBase, TextIOWrapper
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
from learnkit.core.errors import DistributedError, MissingExtraError, OptionError
from learnkit.core.learner_type import LearnerLike
from learnkit.core.plain import plain
from learnkit.core.random import capture_rng, restore_rng
from learnkit.core.validation import warn_user
from learnkit.distributed.callback import DistributedTraining

__all__ = ['launch', 'serve']

# for processes to end by themselves when one of them has failed, or when they are interrupted
GRACE_S = 8.0
_BEGIN = 'import sys; sys.path[:] = sys.argv[2:]; from learnkit.distributed.launch import serve; serve(sys.argv[1])'
# of torchrun and srun
_OF_ANOTHER = (
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
_PAYLOAD, _BACK = 'payload.pt', 'back.ckpt'


def launch(
    learn: LearnerLike,  # the Learner
    fn: Callable[[Any], Any],  # called with the Learner in each process
    nproc: int = 2,  # processes
    *,
    timeout: Any = '10m',  # as for `DistributedTraining`
    **options: Any,  # more of `DistributedTraining`
) -> Any:
    "Do what `Learner.launch` says."
    team = _team(learn, fn, nproc, timeout, options)
    with TemporaryDirectory(prefix='learnkit-launch-', ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _pack(learn, fn, team, folder / _PAYLOAD)
        with Workers(folder, nproc) as workers:
            workers.wait(team.timeout.value)
        back, _ = read_state(folder / _BACK)
        learn.load_checkpoint_state(back['learner'])
        if back['left']:
            warn_user(
                f'The function has returned a {back["left"]}, which stays behind: only tensors, '
                'numbers, texts, and lists, tuples or dicts of them come back.'
            )
        return back['result']


def _team(
    learn: LearnerLike, fn: Any, nproc: Any, timeout: Any, options: Mapping[str, Any]
) -> DistributedTraining:
    "Return the callback that is to join the processes; raise for what cannot be launched."
    if not callable(fn):
        raise OptionError(
            f'launch({fn!r}): give a function of the Learner, as in '
            '`learn.launch(lambda learn: learn.fit(3))`.'
        )
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise OptionError(f'nproc={nproc!r}: give a whole number of processes, 1 or more.')
    if learn.run.depth:
        raise DistributedError(
            'launch() inside a run: its processes would not know of it. Call it '
            'before or after `fit`.'
        )
    if learn.world.size > 1:
        raise DistributedError('This process is one of several already: there, call `fit`.')
    own = [cb for cb in learn.cbs if isinstance(cb, DistributedTraining)]
    team = own[0] if own and not options else DistributedTraining(timeout=timeout, **options)
    device = getattr(learn.dls, 'device', None)
    if (
        device is not None
        and device.type == 'cuda'
        and team.backend != 'gloo'
        and nproc > (n := torch.cuda.device_count())
    ):
        raise DistributedError(
            f'nproc={nproc}, and there is {n} GPU: each process needs one of its own. Give '
            f"nproc={n}; or backend='gloo', with which they share."
            if n == 1
            else f'nproc={nproc}, and there are {n} GPUs: each process needs one of its own.'
        )
    return team


# What goes to the processes


def _pack(learn: LearnerLike, fn: Any, team: DistributedTraining, path: Path) -> None:
    "Write what the processes need into a file that nobody else can read or write, functions and classes by value."
    try:
        import cloudpickle
    except ImportError:
        raise MissingExtraError(
            'learn.launch needs cloudpickle: pip install "learnkit[launch]"'
        ) from None

    rng = capture_rng()
    if 'cuda' in rng:
        rng['cuda'] = rng['cuda'][:1]
    # whether the rates are still those that the optimizer brought is known by an object, and numbers lose that
    payload = {
        'learn': learn,
        'fn': fn,
        'team': team,
        'rng': rng,
        'own_lrs': learn.own_lrs[0] is learn.lr,
    }
    if (found := _unpicklable(payload)) is not None:
        name, value, why = found
        raise DistributedError(
            f'{name} ({type(value).__name__}) cannot be sent to another process: {why}. Make it in '
            'the function that is launched, or where it is first used.'
        )
    # tensors that share memory still do
    torch.save(payload, path, pickle_module=cloudpickle, pickle_protocol=5)


def _unpicklable(payload: dict[str, Any]) -> tuple[str, Any, str] | None:
    "Return the name, the value and the error of the innermost part that cannot be pickled, if there is one."
    learn, seen = payload['learn'], set[int]()
    parts, found = iter(payload.items()), None
    while part := next(
        (
            (name, value, why)
            for name, value in parts
            if id(value) not in seen and (why := _why_not(value, learn)) is not None
        ),
        None,
    ):
        seen.add(id(part[1]))
        parts, found = _parts(*part[:2]), part
    return found


def _why_not(value: Any, learn: LearnerLike) -> str | None:
    "Return why a value cannot be pickled, None where it can, whatever the Learner is that it refers to."
    import cloudpickle

    class Trial(cloudpickle.Pickler):
        def persistent_id(self, part: Any) -> str | None:
            return (
                'there' if type(part) is Tensor or (part is learn and value is not learn) else None
            )

    try:
        Trial(_Nowhere(), protocol=5).dump(value)
    except Exception as e:
        return str(e) or type(e).__name__
    return None


class _Nowhere(RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    "Yield what a value consists of, by the names that a user knows."
    if isinstance(value, Mapping):
        yield from ((f'{name}[{k!r}]', v) for k, v in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f'{name}[{i}]', v) for i, v in enumerate(value))
    elif isfunction(value):
        found = getclosurevars(value)
        yield from (
            (f'`{k}` of {name}', v) for k, v in {**found.globals, **found.nonlocals}.items()
        )
    elif ismethod(value):
        yield f'{name}.__self__', value.__self__
    elif isinstance(value, partial):
        yield from ((f'{name}.{k}', getattr(value, k)) for k in ('func', 'args', 'keywords'))
    elif isinstance(value, torch.nn.Module):
        yield from ((f'{name}.{k}', m) for k, m in value.named_children())
    if name == 'learn':
        yield from (
            (f'learn.{k}', getattr(value, k))
            for k in ('dls', 'model', 'loss_func', 'opt_func', 'opt')
        )
        yield from ((f'learn.{cb.name}', cb) for cb in value.cbs)
    yield from ((f'{name}.{k}', v) for k, v in getattr(value, '__dict__', {}).items())


# The processes, as they are seen from here


class Workers:
    """The processes of a launch: as torchrun starts them, in fresh interpreters; none is left at the end of a context.

    Each has a session of its own, so that an interrupt comes to this process alone, which then ends them."""

    def __init__(self, folder: Path, n: int) -> None:
        self.folder, self.n = folder, n
        self.processes: list[subprocess.Popen[bytes]] = []
        self._said: Queue[tuple[int, Any, str]] = Queue()  # rank, where to, text
        self._last = [deque[str](maxlen=30) for _ in range(n)]  # what each has written on stderr
        self._readers: list[Thread] = []

    def __enter__(self) -> Workers:
        port = free_port()
        try:
            for rank in range(self.n):
                self._start(rank, port)
        except BaseException:
            self._kill()
            raise
        return self

    def _start(self, rank: int, port: int) -> None:
        process = subprocess.Popen(
            [sys.executable, '-c', _BEGIN, str(self.folder), *sys.path],
            env=environment(rank, self.n, port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.processes.append(process)
        for pipe, to in ((process.stdout, 'stdout'), (process.stderr, 'stderr')):
            self._readers.append(Thread(target=self._read, args=(rank, pipe, to), daemon=True))
            self._readers[-1].start()

    def _read(self, rank: int, pipe: Any, to: str) -> None:
        with TextIOWrapper(pipe, 'utf-8', 'replace', newline='') as lines:  # a bar's end with \r
            for line in lines:
                if to == 'stderr':
                    self._last[rank].append(line)
                if rank == 0:
                    self._said.put((rank, to, line))

    def wait(
        self,
        timeout_s: float,  # seconds that the others may take when the first is through
    ) -> None:
        "Show what the first process writes until all have ended; raise `DistributedError` unless all did so well."
        end = inf
        while (codes := [p.poll() for p in self.processes]).count(None):
            self._show(0.05)
            if end == inf and codes.count(None) < self.n:
                end = monotonic() + (GRACE_S if any(codes) else timeout_s)
            if any(codes):
                end = min(end, monotonic() + GRACE_S)
            if monotonic() > end:
                break
        if None in codes or any(codes):
            raise self._error(codes, timeout_s)
        self._show_rest()

    def _show(self, wait_s: float) -> None:
        try:
            _, to, line = self._said.get(timeout=wait_s)
        except Empty:
            return
        print(line, end='', file=getattr(sys, to), flush=True)

    def _show_rest(self) -> None:
        for reader in self._readers:
            reader.join(1.0)
        while not self._said.empty():
            self._show(0.0)

    def _error(self, codes: list[int | None], timeout_s: float) -> DistributedError:
        "Return the error of the process that failed first."
        self._kill()
        self._show_rest()
        reports = [json.loads(path.read_text('utf-8')) for path in self.folder.glob('failed*.json')]
        if reports:  # an error of several processes' dealings is what another one has led to
            first = min(reports, key=lambda r: (r['type'] == DistributedError.__name__, r['time']))
            return DistributedError(
                f'Process {first["rank"]} of {self.n} has failed: {first["type"]}: '
                f'{first["message"]}\n\n{first["traceback"]}'
            )
        for rank, code in enumerate(codes):
            if code:
                return DistributedError(
                    f'Process {rank} of {self.n} {ended(code)}.\n{"".join(self._last[rank])}'
                )
        slow = ', '.join(str(rank) for rank, code in enumerate(codes) if code is None)
        return DistributedError(
            f'Process {slow} of {self.n} did not end within {timeout_s:g} s of the others.'
        )

    def __exit__(self, kind: Any, *rest: object) -> None:
        "End what still runs: by an interrupt, which lets callbacks clean up, when one has come here; then at once."
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
    "Return a port of this machine that nothing listens on."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return int(s.getsockname()[1])


def environment(
    rank: int,
    n: int,  # processes in all
    port: int,  # where the first one listens
) -> dict[str, str]:
    "Return the environment of a process as torchrun would give it; unless said otherwise, they share the cores."
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    )
    ranks = {
        'RANK': rank,
        'LOCAL_RANK': rank,
        'WORLD_SIZE': n,
        'LOCAL_WORLD_SIZE': n,
        'GROUP_RANK': 0,
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': port,
    }
    # a launcher may have started this process: its place there is not theirs, and theirs is not the launcher's store
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_OF_ANOTHER)}
    given = {'OMP_NUM_THREADS': str(max(1, cores // n)), **inherited}
    if sys.platform == 'linux':
        given = {'GLOO_SOCKET_IFNAME': 'lo', **given}
    return {
        **given,
        **{k: str(v) for k, v in ranks.items()},
        'PYTHONUNBUFFERED': '1',
        'PYTHONIOENCODING': 'utf-8',
    }


def ended(code: int) -> str:
    "Say how a process has ended, by its exit code."
    if code > 0:
        return f'has ended with exit code {code}'
    name = signal.Signals(-code).name
    return (
        f'was ended by {name}{", by the system for want of memory perhaps" * (name == "SIGKILL")}'
    )


# In a process


def serve(
    folder: str,  # of the launch
) -> None:
    "Be one of the processes: do what is asked for in the folder, and end. It ends at once when its parent does."
    rank, path = int(os.environ['RANK']), Path(folder)
    _end_with_parent(path)
    try:
        _train(rank, path)
    except BaseException as e:
        tb = e.__traceback__
        while (
            tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename == __file__
        ):
            tb = tb.tb_next
        report = {
            'rank': rank,
            'type': type(e).__name__,
            'message': str(e),
            'time': time(),
            'traceback': ''.join(traceback.format_exception(e.with_traceback(tb))),
        }
        (path / f'failed{rank}.tmp').write_text(json.dumps(report), 'utf-8')
        os.replace(path / f'failed{rank}.tmp', path / f'failed{rank}.json')
        sys.exit(1)


def _train(rank: int, folder: Path) -> None:
    # written by the parent, in a folder that is its own; nothing that comes from elsewhere is read
    payload = torch.load(folder / _PAYLOAD, map_location='cpu', mmap=True, weights_only=False)
    learn, left = payload['learn'], ''
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
        result = plain(result, 'The result')
    except OptionError:
        result, left = None, type(result).__name__
    write_state(
        folder / _BACK, {'learner': learn.checkpoint_state(), 'result': result, 'left': left}, {}
    )


def _end_with_parent(folder: Path) -> None:
    "Kill this process, and its own, when the parent's end of stdin is closed: by its end, whatever that is."
    parent, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        os.read(parent, 1)
        rmtree(folder, ignore_errors=True)  # the parent cannot
        os.killpg(0, signal.SIGKILL)

    Thread(target=wait, daemon=True).start()
