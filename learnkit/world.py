"""The processes that train together: which of them this one is, and what they tell each other on their hosts."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from io import BytesIO
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from learnkit.errors import DistributedError
from learnkit.meeting import meeting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ['World', 'ALONE', 'SLOTS', 'join_world', 'launched_as']

T = TypeVar('T')

SLOTS = ('stop', 'leave', 'failed', 'clock')  # what processes agree on while they train (see `later`)
FROM_EACH, FROM_FIRST = 8 << 10, 24 << 10     # bytes of a first message, which holds what is said as a rule
LENGTH = 8                                    # of them, which say how long all of it is
NUMBERS = b'numbers\0'                        # with which those begin that are a sum's


@dataclass(eq=False)
class World:
    """The processes of a training: the number of this one (`rank`), and of all (`size`).

    What they tell each other goes through `control`, a gloo group of its own between the hosts, so that it never waits
    for an accelerator and never gets between the strategy's own messages. Each method is called by every process of it,
    in the same order; in a world of one they return what they are given.

    >>> ALONE.rank, ALONE.size, ALONE.broadcast('x'), ALONE.gather('x'), ALONE.any(False), ALONE.later('stop', 1.)
    (0, 1, 'x', ['x'], False, 1.0)
    """
    rank: int = 0
    size: int = 1
    local_rank: int = 0                   # on its machine
    timeout_s: float = 600.               # after which a process that waits for another gives up
    control: ProcessGroup | None = None
    is_ours: bool = False                 # the process group was made here, and is taken down here
    is_broken: bool = False               # a run has failed in it: nobody knows where the others are
    variables: tuple[str, ...] = ()       # of the environment, that were set when it was joined
    n_steps: int = 0                      # of this run: as many in every process
    _mine: list[float] = field(default_factory=lambda: [0.] * len(SLOTS))     # what this process says
    _agreed: list[float] = field(default_factory=lambda: [0.] * len(SLOTS))   # the greatest that any has said
    _under_way: tuple[Any, Tensor] | None = None                              # a reduction that is not waited for yet

    @property
    def is_first(self) -> bool:
        "Whether this process is the one that writes files, shows progress and takes decisions."
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        "The device of this process: a GPU of its own where there is one."
        if not torch.cuda.is_available(): return torch.device('cpu')
        return torch.device('cuda', self.local_rank % torch.cuda.device_count())

    def broadcast(
        self,
        value: Any,    # of the first process, plain values and tensors; that of the others is left
    ) -> Any:
        "Return the first process's value, in every one."
        if self.size == 1: return value
        import torch.distributed as dist
        what = asked_in()
        data = packed((what, value)) if self.is_first else b''
        head = _head(data, FROM_FIRST)
        dist.broadcast(head, group_src=0, group=self.control)
        rest = _padded(data[_room(head):], max(0, _length(head) - _room(head)))
        if len(rest): dist.broadcast(rest, group_src=0, group=self.control)
        if self.is_first: return value
        asked, told = unpacked(_joined(head, rest))
        if asked != what: raise self._not_together(0, asked, self.rank, what)
        return told

    def gather(self, value: Any) -> list[Any]:
        "Return the values of all processes, in the order of their ranks, in every one."
        if self.size == 1: return [value]
        return self._say(asked_in(), value)()

    def collect(self, value: Any) -> list[Any]:
        "Return the values of all processes in the first one, which alone gets them; nothing elsewhere."
        if self.size == 1: return [value]
        told = self._say(asked_in(), value, gather_rest=self._gather_in_first)()
        return told if self.is_first else []

    def _say(
        self,
        what: str,                          # the function that asks: the same in every process
        value: Any,
        packed_as: bytes | None = None,     # None: as `packed` does it
        gather_rest: Callable[[Tensor], list[Tensor]] | None = None,
    ) -> Callable[[], list[Any]]:
        "Begin to tell a value, and return the function that waits for what all have told."
        # whatever it is, a first message has one size: gloo ends a process that gets another than it gives
        import torch.distributed as dist
        data = packed((what, value)) if packed_as is None else packed_as
        head = _head(data, FROM_EACH)
        heads = [torch.empty_like(head) for _ in range(self.size)]
        work = dist.all_gather(heads, head, group=self.control, async_op=True)

        def wait() -> list[Any]:
            work.wait()
            longest = max(map(_length, heads)) - _room(head)
            rests = [torch.empty(0)] * self.size
            if longest > 0: rests = (gather_rest or self._gather)(_padded(data[_room(head):], longest))
            told = [(what, value) if rank == self.rank else unpacked(_joined(head, rest))
                    for rank, (head, rest) in enumerate(zip(heads, rests, strict=bool(rests)))]
            for rank, (asked, _) in enumerate(told):
                if asked != told[0][0]: raise self._not_together(0, told[0][0], rank, asked)
            return [value for _, value in told]
        return wait

    def _not_together(self, rank: int, what: str, other: int, asked: str) -> DistributedError:
        return DistributedError(f'Process {rank} of {self.size} tells the others something in {what}, and process '
                                f'{other} in {asked}: what all do together (fit, validate, get_preds, load, gather) '
                                'was called in one of them alone, or in another order.')

    def _gather(self, t: Tensor) -> list[Tensor]:
        import torch.distributed as dist
        parts = [torch.empty_like(t) for _ in range(self.size)]
        dist.all_gather(parts, t, group=self.control)
        return parts

    def _gather_in_first(self, t: Tensor) -> list[Tensor]:
        import torch.distributed as dist
        parts = [torch.empty_like(t) for _ in range(self.size)] if self.is_first else None
        dist.gather(t, parts, group=self.control, group_dst=0)
        return parts or []

    def sum(
        self,
        t: Tensor,     # of one shape in every process
    ) -> Tensor:
        "Return the sum of a tensor over all processes, in float64 on the host: the same in each, to the last bit."
        return self._sum_later(asked_in(), t)()

    def sum_later(self, t: Tensor) -> Callable[[], Tensor]:
        "Begin a `sum`, and return the function that waits for it."
        return self._sum_later(asked_in(), t)

    def _sum_later(self, what: str, t: Tensor) -> Callable[[], Tensor]:
        t = t.detach().to('cpu', torch.float64).contiguous()
        if self.size == 1: return lambda: t
        wait = self._say(what, t, NUMBERS + what.encode() + b'\0' + t.numpy().tobytes())
        return lambda: torch.stack([theirs.view_as(t) for theirs in wait()]).sum(0)

    def any(self, flag: bool) -> bool:
        "Tell whether `flag` is set in one of the processes."
        return bool(self._sum_later(asked_in(), torch.tensor(float(flag)))()) if self.size > 1 else flag

    # -- what is agreed on while a batch is computed -------------------------------------------------------------------

    def later(
        self,
        slot: str,       # one of `SLOTS`
        value: float,    # what this process says
    ) -> float:
        """Say a number, and return the greatest that any process has said, as of the last `turn`: the same in all.

        Nothing is waited for. In a world of one it is `value` at once."""
        if self.size == 1: return value
        i = SLOTS.index(slot)
        self._mine[i] = max(self._mine[i], value)
        return self._agreed[i]

    def agreed(self, slot: str) -> float:
        "Return the greatest number that any process has said in a slot, as of the last `turn`."
        return self._agreed[SLOTS.index(slot)]

    def take(self, slot: str, value: float) -> None:
        "Take a number as said and agreed on, that every process takes alike."
        if self.size == 1: return
        i = SLOTS.index(slot)
        self._mine[i] = self._agreed[i] = value

    def turn(
        self,
        sends: bool = True,   # whether it is time to send what is said by now
    ) -> None:
        "At the end of a batch: take in what was sent at the end of an earlier one, and send what is said by now."
        if self.size == 1: return
        import torch.distributed as dist
        self._take_in()
        if not sends: return
        t = torch.tensor(self._said, dtype=torch.float64)
        self._under_way = dist.all_reduce(t, dist.ReduceOp.MAX, self.control, async_op=True), t

    @property
    def is_agreeing(self) -> bool:
        "Whether something was sent, and is still to be taken in: in all processes alike."
        return self._under_way is not None

    def settle(
        self,
        *numbers: float,   # more of this process
    ) -> list[list[float]]:
        "Agree now, and wait for it: between epochs, where there is time. Return the numbers of all processes."
        if self.size == 1: return [list(numbers)]
        self._take_in()
        told = self.gather((self._said, list(numbers)))
        self._agree_on([max(values) for values in zip(*(said for said, _ in told), strict=True)])
        return [theirs for _, theirs in told]

    def forget(self, **agreed: float) -> None:
        "Begin a run: nothing is said yet but what all say anyway."
        self._under_way, self.n_steps = None, 0
        self._agreed = [agreed.get(slot, 0.) for slot in SLOTS]
        self._mine = list(self._agreed)

    @property
    def _said(self) -> list[float]: return [*self._mine, self.n_steps, -self.n_steps]

    def _take_in(self) -> None:
        if self._under_way is None: return
        (work, t), self._under_way = self._under_way, None
        work.wait()
        self._agree_on(t.tolist())

    def _agree_on(self, greatest: list[float]) -> None:
        *self._agreed, most, least = greatest
        if most + least: raise DistributedError(
            f'The processes have taken {-least:g} to {most:g} steps in this fit, and no longer have the same weights. '
            'In some of them alone a batch or a step was cancelled: take such a decision from what is the same in all, '
            'or let `self.world.any(...)` take it.')

    def together(
        self,
        f: Callable[[], T],   # for this process to do
    ) -> T:
        """Call `f` in every process, and return its result when all are through.

        What it has raised in one of them is raised in all: there the error itself, elsewhere a `DistributedError` with
        its message.

        >>> ALONE.together(lambda: 3)
        3
        """
        if self.size == 1: return f()
        result, error = None, None
        try: result = f()
        except Exception as e: error = e
        self._first_error(error)
        return result  # type: ignore[return-value]  # without an error it is what `f` has returned

    def _first_error(self, error: Exception | None) -> None:
        told = self.gather(None if error is None else f'{type(error).__name__}: {error}')
        if error is not None: raise error
        for rank, message in enumerate(told):
            if message is not None: raise DistributedError(f'Process {rank} of {self.size} has failed: {message}')

    def leave(self) -> None:
        "Take the control group down, and the group of all where it was made here."
        import torch.distributed as dist
        for name in self.variables: os.environ.pop(name, None)
        if self.control is None or not dist.is_initialized(): return
        if self.is_ours: dist.destroy_process_group()
        else: dist.destroy_process_group(self.control)


ALONE = World()


# Bytes between processes: a first message, with the length of all and its beginning, and rarely a second one.

def asked_in() -> str:
    "Return the name of the function that asks the others."
    return sys._getframe(2).f_code.co_qualname


def _head(data: bytes, size: int) -> Tensor: return _padded(len(data).to_bytes(LENGTH, 'big') + data, size)


def _padded(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data[:size].ljust(size, b'\0')), dtype=torch.uint8) if size else torch.empty(0)


def _length(head: Tensor) -> int: return int.from_bytes(head[:LENGTH].numpy().tobytes(), 'big')


def _room(head: Tensor) -> int: return len(head) - LENGTH


def _joined(head: Tensor, rest: Tensor) -> bytes:
    return b''.join(t.numpy().tobytes() for t in (head[LENGTH:], rest))[:_length(head)]


def packed(value: Any) -> bytes:
    "Return plain values and tensors as bytes; pickle alone cannot bring back every dtype."
    with BytesIO() as f:
        torch.save(value, f)
        return f.getvalue()


def unpacked(data: bytes) -> Any:
    "Undo `packed`, or return the name and the numbers of a sum, which need no more than their bytes; no code is run."
    if data.startswith(NUMBERS):
        what, _, numbers = data.removeprefix(NUMBERS).partition(b'\0')
        return what.decode(), torch.frombuffer(bytearray(numbers or b'\0'*8), dtype=torch.float64)[:len(numbers)//8]
    return torch.load(BytesIO(data), map_location='cpu', weights_only=True)


def launched_as(
    env: Mapping[str, str] | None = None,  # None: this process's
) -> dict[str, str]:
    """Return what a launcher says of this process, by torchrun's names; nothing where no launcher has started it.

    torchrun's own variables come first, then those of `srun`. Raises `DistributedError` where they are incomplete.

    >>> launched_as({'RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': 'a', 'MASTER_PORT': '1', 'LOCAL_RANK': '1'})['RANK']
    '1'
    >>> slurm = {'SLURM_STEP_NUM_TASKS': '4', 'SLURM_PROCID': '3', 'SLURM_LOCALID': '1', 'SLURM_JOB_ID': '42',
    ...          'SLURM_LAUNCH_NODE_IPADDR': '10.0.0.1'}
    >>> launched_as(slurm)['MASTER_ADDR'], launched_as(slurm)['WORLD_SIZE'], launched_as({})
    ('10.0.0.1', '4', {})
    """
    env = os.environ if env is None else env
    if 'RANK' in env and 'WORLD_SIZE' in env:
        if missing := [name for name in ('MASTER_ADDR', 'MASTER_PORT') if name not in env]:
            raise DistributedError(f'RANK and WORLD_SIZE are set, but not {" and ".join(missing)}. Start the script by '
                                   '`torchrun --nproc-per-node=N script.py`, or set them all.')
        return {'LOCAL_RANK': '0', **{k: env[k] for k in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')},
                **({'LOCAL_RANK': env['LOCAL_RANK']} if 'LOCAL_RANK' in env else {})}
    # srun sets it for the processes of a step; a batch script or an interactive shell is one process on its own
    if int(env.get('SLURM_STEP_NUM_TASKS', 1)) == 1: return {}
    return {'RANK': env['SLURM_PROCID'], 'WORLD_SIZE': env['SLURM_STEP_NUM_TASKS'],
            'LOCAL_RANK': env.get('SLURM_LOCALID', '0'), 'MASTER_ADDR': env.get('MASTER_ADDR') or _first_host(env),
            'MASTER_PORT': env.get('MASTER_PORT') or str(20_000 + int(env['SLURM_JOB_ID']) % 40_000)}


def _first_host(env: Mapping[str, str]) -> str:
    "Return the address of a SLURM step's first machine."
    nodes = env.get('SLURM_STEP_NODELIST') or env.get('SLURM_JOB_NODELIST')
    if not nodes or int(env.get('SLURM_STEP_NUM_NODES', 1)) == 1:
        return env.get('SLURM_LAUNCH_NODE_IPADDR', '127.0.0.1')
    if '[' not in nodes: return nodes.split(',')[0]
    try: hosts = subprocess.run(['scontrol', 'show', 'hostnames', nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise DistributedError(f'The first of {nodes} is not known, as `scontrol` does not run here ({e}). Set '
                               'MASTER_ADDR to its name.') from None
    return hosts.stdout.split()[0]


def _await_first(said: Mapping[str, str], timeout_s: float) -> None:
    "Wait until the first process, or its launcher, can be reached: torch would wait for it longer than it was told."
    address, end = (said['MASTER_ADDR'], int(said['MASTER_PORT'])), monotonic() + timeout_s
    while True:
        try: return socket.create_connection(address, timeout=max(0.1, min(1., end - monotonic()))).close()
        except OSError as e:
            if monotonic() > end: raise DistributedError(
                f'Process {said["RANK"]} of {said["WORLD_SIZE"]} cannot reach the first one at {address[0]}:'
                f'{address[1]} within {timeout_s:g} s: {e}.') from None
        sleep(0.02)


def join_world(
    timeout_s: float = 600.,       # seconds after which a process that waits for another gives up
    backend: str | None = None,    # torch's name; None: NCCL between GPUs and gloo between CPUs
) -> World:
    """Join the processes that were started together, and return the world that they make.

    A process group that is there already is used as it is; or else one is made as torchrun, or SLURM's `srun`, says.
    A process that nothing has started with others is alone. Raises `DistributedError` where they cannot be joined.
    """
    import torch.distributed as dist
    if not dist.is_available(): return ALONE
    there = dist.is_initialized()
    said = {} if there else launched_as()
    if not there and not said: return ALONE

    wait = timedelta(seconds=timeout_s)
    variables = tuple(name for name in said if name not in os.environ)   # a launcher of another kind has others
    if not there:
        if said['RANK'] != '0': _await_first(said, timeout_s)
        os.environ.update(said)
        if torch.cuda.is_available(): torch.cuda.set_device(int(said['LOCAL_RANK']) % torch.cuda.device_count())
        backend = backend or ('cpu:gloo,cuda:nccl' if torch.cuda.is_available() else 'gloo')
    try:
        if not there: dist.init_process_group(backend, timeout=wait, **meeting(said, wait))
        control = dist.new_group(backend='gloo', timeout=wait)
    except (RuntimeError, ValueError) as e:
        for name in variables: os.environ.pop(name, None)
        if not there and dist.is_initialized(): dist.destroy_process_group()
        if not said: raise DistributedError(f'The processes of this group cannot make one for the hosts: {e}') from e
        raise DistributedError(f'Process {said["RANK"]} of {said["WORLD_SIZE"]} cannot join the others at '
                               f'{said["MASTER_ADDR"]}:{said["MASTER_PORT"]}: {str(e).rstrip(".")}. Were all started, '
                               'with the same WORLD_SIZE, and is the port free?') from e
    local = int(os.environ.get('LOCAL_RANK', dist.get_rank()))
    return World(dist.get_rank(), dist.get_world_size(), local, timeout_s, control, not there, variables=variables)
