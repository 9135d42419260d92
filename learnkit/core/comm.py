"""The ranks that train together: which of them this process is, and collectives between their hosts."""

from __future__ import annotations

import os
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from io import BytesIO
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from learnkit.core.errors import DistributedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

__all__ = ['Comm', 'ALONE', 'SLOTS', 'has_joined', 'join_ranks', 'launched_as', 'rendezvous']

T = TypeVar('T')
Address = tuple[str, int]

# what ranks agree on while they train (see `Comm.post`)
SLOTS = ('stop', 'leave', 'failed', 'clock')

_stores: dict[
    Address, Store
] = {}  # kept open: the same processes may join again at the same address
_n_joined: Counter[Address] = Counter()


@dataclass(eq=False)
class Comm:
    """The ranks of a training: the number of this process (`rank`), and of all (`size`).

    Values travel through `control`, a gloo group between the hosts, so that no accelerator is waited for. Each method
    is called by every rank, in the same order; with one rank it returns what it is given. Values are pickled, and come
    from ranks of this job alone.

    >>> ALONE.rank, ALONE.size, ALONE.broadcast('x'), ALONE.gather('x'), ALONE.any(False), ALONE.post('stop', 1.)
    (0, 1, 'x', ['x'], False, 1.0)
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on its machine
    timeout_s: float = 600.0  # after which a rank that waits for another gives up
    control: ProcessGroup | None = None
    store: Store | None = None  # through which a rank that fails reaches the others
    is_ours: bool = False  # the process group was made here, and is destroyed here
    is_broken: bool = False  # a run has failed: nobody knows where the other ranks are
    variables: tuple[str, ...] = ()  # of the environment, that were set by `join_ranks`
    n_steps: int = 0  # of this run: as many in every rank
    _posted: list[float] = field(default_factory=lambda: [0.0] * len(SLOTS))
    _agreed: list[float] = field(default_factory=lambda: [0.0] * len(SLOTS))
    _pending: tuple[Any, Tensor] | None = None  # an exchange that is not waited for yet

    @property
    def is_first(self) -> bool:
        "True in the rank that writes files, shows progress and takes decisions."
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        "The device of this rank: a GPU of its own where there is one."
        if not torch.cuda.is_available():
            return torch.device('cpu')
        return torch.device('cuda', self.local_rank % torch.cuda.device_count())

    def broadcast(
        self,
        value: Any,  # of the first rank; the other ranks' values are ignored
    ) -> Any:
        "Return the first rank's value, in every rank."
        if self.size == 1:
            return value
        import torch.distributed as dist

        values = [pack(value) if self.is_first else b'']
        dist.broadcast_object_list(values, group_src=0, group=self.control)
        return value if self.is_first else unpack(values[0])

    def gather(
        self,
        value: Any,
        what: str = 'values',  # what is gathered, for the error if ranks gather different things
    ) -> list[Any]:
        """Return the values of all ranks, in the order of ranks, in every rank.

        Raises `DistributedError` where ranks gather different things."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, (what, pack(value)), group=self.control)
        for rank, (other, _) in enumerate(gathered):
            if other != gathered[0][0]:
                raise DistributedError(
                    f'Process 0 of {self.size} gathers {gathered[0][0]}, and process {rank} gathers {other}: what all '
                    'processes call together (fit, validate, get_preds, load, gather) was called in one of them '
                    'alone, or in another order.'
                )
        return [
            value if rank == self.rank else unpack(data) for rank, (_, data) in enumerate(gathered)
        ]

    def collect(self, value: Any) -> list[Any]:
        "Return the values of all ranks in the first one, and an empty list in the others."
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        collected: list[Any] = [None] * self.size if self.is_first else []
        dist.gather_object(pack(value), collected or None, group_dst=0, group=self.control)
        return [unpack(data) for data in collected]

    def sum(
        self,
        t: Tensor,  # of one shape in every rank
    ) -> Tensor:
        "Return the sum of a tensor over all ranks, in float64 on the host: the same in each, to the last bit."
        return self.start_sum(t)()

    def start_sum(self, t: Tensor) -> Callable[[], Tensor]:
        "Begin a `sum`, and return the function that waits for it."
        total = t.detach().to('cpu', torch.float64, copy=True).contiguous()
        if self.size == 1:
            return lambda: total
        import torch.distributed as dist

        work = dist.all_reduce(total, group=self.control, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return total

        return wait

    def any(self, flag: bool) -> bool:
        "Return True if `flag` is set in one of the ranks."
        return bool(self.sum(torch.tensor(float(flag)))) if self.size > 1 else flag

    def barrier(self) -> None:
        "Wait until all ranks have come here."
        if self.size == 1:
            return
        import torch.distributed as dist

        dist.barrier(group=self.control)

    def run_on_all(
        self,
        f: Callable[[], T],  # for this rank to do
    ) -> T:
        """Call `f` in every rank, and return its result when all are through.

        An exception of one rank is raised in all: the error itself where it occurred, elsewhere a `DistributedError`
        with its message.

        >>> ALONE.run_on_all(lambda: 3)
        3
        """
        if self.size == 1:
            return f()
        result, error = None, None
        try:
            result = f()
        except Exception as e:
            error = e
        messages = self.gather(
            None if error is None else f'{type(error).__name__}: {error}', 'errors'
        )
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise DistributedError(f'Process {rank} of {self.size} has failed: {message}')
        return result  # type: ignore[return-value]  # without an error it is what `f` has returned

    # -- numbers that are exchanged while a batch is computed --------------------------------------

    def post(
        self,
        slot: str,  # one of `SLOTS`
        value: float,  # of this rank
    ) -> float:
        """Post a number, and return the greatest that any rank has posted, as of the last `exchange`: the same in all.

        Nothing is waited for. With one rank it is `value` at once."""
        if self.size == 1:
            return value
        i = SLOTS.index(slot)
        self._posted[i] = max(self._posted[i], value)
        return self._agreed[i]

    def value(self, slot: str) -> float:
        "Return the greatest number that any rank has posted in a slot, as of the last `exchange`."
        return self._agreed[SLOTS.index(slot)]

    def set(
        self,
        slot: str,
        value: float,  # the same in every rank
    ) -> None:
        "Set a slot that every rank sets alike."
        if self.size == 1:
            return
        i = SLOTS.index(slot)
        self._posted[i] = self._agreed[i] = value

    def exchange(
        self,
        sends: bool = True,  # send what is posted by now
    ) -> None:
        "At the end of a batch: receive what was sent at the end of an earlier one, and begin to send what is posted."
        if self.size == 1:
            return
        self._receive()
        if not sends:
            return
        import torch.distributed as dist

        t = torch.tensor(self._numbers(), dtype=torch.float64)
        self._pending = dist.all_reduce(t, dist.ReduceOp.MAX, self.control, async_op=True), t

    @property
    def is_exchanging(self) -> bool:
        "True while something was sent and is not received yet: in all ranks alike."
        return self._pending is not None

    def sync(
        self,
        *numbers: float,  # more of this rank
    ) -> list[list[float]]:
        "Agree on what is posted, and wait for it: between epochs. Return the numbers of all ranks."
        if self.size == 1:
            return [list(numbers)]
        import torch.distributed as dist

        self._receive()
        t = torch.tensor([*self._numbers(), *numbers], dtype=torch.float64)
        gathered = [torch.empty_like(t) for _ in range(self.size)]
        dist.all_gather(gathered, t, group=self.control)
        n = len(SLOTS) + 2
        self._agree_on(torch.stack(gathered)[:, :n].amax(0).tolist())
        return [theirs[n:].tolist() for theirs in gathered]

    def reset(self, **values: float) -> None:
        "Begin a run: nothing is posted but `values`, which are the same in all ranks."
        self._pending, self.n_steps = None, 0
        self._agreed = [values.get(slot, 0.0) for slot in SLOTS]
        self._posted = list(self._agreed)

    def _numbers(self) -> list[float]:
        return [*self._posted, self.n_steps, -self.n_steps]

    def _receive(self) -> None:
        if self._pending is None:
            return
        (work, t), self._pending = self._pending, None
        work.wait()
        self._agree_on(t.tolist())

    def _agree_on(self, greatest: list[float]) -> None:
        *self._agreed, most, least = greatest
        if most + least:
            raise DistributedError(
                f'The processes have taken {-least:g} to {most:g} steps in this fit, and no longer have the same '
                'weights. In some of them alone a batch or a step was cancelled: take such a decision from what is the '
                'same in all, or let `self.world.any(...)` take it.'
            )

    # -- leaving -----------------------------------------------------------------------------------

    def leave(self) -> None:
        "Destroy the control group, and the group of all where it was made here. A second call does nothing."
        import torch.distributed as dist

        for name in self.variables:
            os.environ.pop(name, None)
        group, self.control, self._pending = self.control, None, None
        if group is None or not dist.is_initialized():
            return
        if self.is_ours:
            dist.destroy_process_group()
        else:
            dist.destroy_process_group(group)


ALONE = Comm()


def pack(value: Any) -> bytes:
    "Return a value as bytes; pickle alone cannot restore tensors of every dtype (torch 2.13)."
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(data: bytes) -> Any:
    "Return the value that another rank of this job has packed, with its tensors on the host."
    return torch.load(BytesIO(data), map_location='cpu', weights_only=False)


def launched_as(
    env: Mapping[str, str] | None = None,  # None: this process's
) -> dict[str, str]:
    """Return what a launcher says of this process, by torchrun's names; nothing where no launcher has started it.

    torchrun's own variables come first, then the ones of `srun`. Raises `DistributedError` where they are incomplete.

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
            raise DistributedError(
                f'RANK and WORLD_SIZE are set, but not {" and ".join(missing)}. Start the script by '
                '`torchrun --nproc-per-node=N script.py`, or set them all.'
            )
        names = ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
        return {**{name: env[name] for name in names}, 'LOCAL_RANK': env.get('LOCAL_RANK', '0')}
    # srun sets it for the processes of a step; a batch script or an interactive shell is one process on its own
    if int(env.get('SLURM_STEP_NUM_TASKS', 1)) == 1:
        return {}
    return {
        'RANK': env['SLURM_PROCID'],
        'WORLD_SIZE': env['SLURM_STEP_NUM_TASKS'],
        'LOCAL_RANK': env.get('SLURM_LOCALID', '0'),
        'MASTER_ADDR': env.get('MASTER_ADDR') or _first_host(env),
        'MASTER_PORT': env.get('MASTER_PORT') or str(20_000 + int(env['SLURM_JOB_ID']) % 40_000),
    }


def _first_host(env: Mapping[str, str]) -> str:
    "Return the address of a SLURM step's first machine."
    nodes = env.get('SLURM_STEP_NODELIST') or env.get('SLURM_JOB_NODELIST')
    if not nodes or int(env.get('SLURM_STEP_NUM_NODES', 1)) == 1:
        return env.get('SLURM_LAUNCH_NODE_IPADDR', '127.0.0.1')
    if '[' not in nodes:
        return nodes.split(',')[0]
    try:
        hosts = subprocess.run(
            ['scontrol', 'show', 'hostnames', nodes], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as e:
        raise DistributedError(
            f'The first of {nodes} is not known, as `scontrol` does not run here ({e}). Set '
            'MASTER_ADDR to its name.'
        ) from None
    return hosts.stdout.split()[0]


def join_ranks(
    timeout_s: float = 600.0,  # seconds after which a rank that waits for another gives up
    backend: str | None = None,  # torch's name; None: NCCL between GPUs and gloo between CPUs
) -> Comm:
    """Join the processes that were started together, and return their `Comm`.

    A process group that is there already is used as it is; or else one is made as torchrun, or SLURM's `srun`, says.
    A process that nothing has started with others is alone. Raises `DistributedError` where they cannot be joined.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return ALONE
    # imported later, its functions would keep the process group for good, as the default of an argument (torch 2.13)
    import torch.distributed.nn

    was_there = dist.is_initialized()
    launched = {} if was_there else launched_as()
    if not was_there and not launched:
        return ALONE

    timeout = timedelta(seconds=timeout_s)
    # a launcher of another kind has others
    variables = tuple(name for name in launched if name not in os.environ)
    if not was_there:
        if launched['RANK'] != '0':
            _await_first(launched, timeout_s)
        os.environ.update(launched)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(launched['LOCAL_RANK']) % torch.cuda.device_count())
        backend = backend or ('cpu:gloo,cuda:nccl' if torch.cuda.is_available() else 'gloo')
    try:
        if not was_there:
            dist.init_process_group(
                backend,
                timeout=timeout,
                rank=int(launched['RANK']),
                world_size=int(launched['WORLD_SIZE']),
                store=rendezvous(launched, timeout),
            )
        control = dist.new_group(backend='gloo', timeout=timeout)
    except (RuntimeError, ValueError) as e:
        for name in variables:
            os.environ.pop(name, None)
        if not was_there and dist.is_initialized():
            dist.destroy_process_group()
        if not launched:
            raise DistributedError(
                f'The processes of this group cannot make one for the hosts: {e}'
            ) from e
        raise DistributedError(
            f'Process {launched["RANK"]} of {launched["WORLD_SIZE"]} cannot join the others at '
            f'{launched["MASTER_ADDR"]}:{launched["MASTER_PORT"]}: {str(e).rstrip(".")}. Were all '
            'started, with the same WORLD_SIZE, and is the port free?'
        ) from e
    store = dist.PrefixStore(
        f'learnkit/{control.group_name}', dist.distributed_c10d._get_default_store()
    )
    local = int(os.environ.get('LOCAL_RANK', dist.get_rank()))
    return Comm(
        dist.get_rank(),
        dist.get_world_size(),
        local,
        timeout_s,
        control,
        store,
        not was_there,
        variables=variables,
    )


def _await_first(launched: Mapping[str, str], timeout_s: float) -> None:
    "Wait until the first rank, or its launcher, can be reached: torch would wait for it longer than asked for."
    address, end = _address(launched), monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(address, timeout=max(0.1, min(1.0, end - monotonic()))).close()
            return
        except OSError as e:
            if monotonic() > end:
                raise DistributedError(
                    f'Process {launched["RANK"]} of {launched["WORLD_SIZE"]} cannot reach the first one at '
                    f'{address[0]}:{address[1]} within {timeout_s:g} s: {e}.'
                ) from None
        sleep(0.02)


def rendezvous(
    launched: Mapping[str, str],  # of this process, by torchrun's names
    timeout: timedelta,  # the longest that others are waited for
) -> Store:
    """Return the store over which the ranks join, with a prefix that nobody has used before.

    torchrun's store outlives the processes that it starts again, and the first rank's outlives a group: the same
    processes may join again."""
    from torch.distributed import PrefixStore, TCPStore

    address = _address(launched)
    if address not in _stores:
        is_host = launched['RANK'] == '0' and not has_agent_store()
        _stores[address] = TCPStore(*address, None, is_host, timeout, wait_for_workers=False)
    _n_joined[address] += 1
    attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
    return PrefixStore(f'learnkit/{attempt}/{_n_joined[address]}', _stores[address])


def has_agent_store() -> bool:
    "Return True if torchrun's agent keeps the store, which then outlives every rank."
    return os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'


def has_joined() -> bool:
    "Return True if this process has ever joined others, as a launcher says."
    return bool(_stores)


def _address(launched: Mapping[str, str]) -> Address:
    return launched['MASTER_ADDR'], int(launched['MASTER_PORT'])
