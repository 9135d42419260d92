# SPDX-License-Identifier: Apache-2.0
"""`Comm`, the collectives between the ranks of a training run, and functions that join the ranks."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from learnkit.core.device import find_accelerator
from learnkit.core.errors import DistributedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

T = TypeVar('T')
Address = tuple[str, int]

# numbers that ranks exchange while they train (see `Comm.post`)
SLOTS = ('stop', 'pause', 'leave', 'failed', 'clock')

# stores stay open, because the same processes may join again at the same address
_stores: dict[Address, Store] = {}
_n_joined: Counter[Address] = Counter()


@dataclass(eq=False)
class Comm:
    """Collectives between the ranks of a training run, with this process's `rank` and the number of ranks (`size`).

    Collectives run on the hosts, in the gloo group `control`, and do not wait for an accelerator. Every rank must call
    the methods in the same order. With one rank, a method returns its argument. Values are pickled, and come only
    from ranks of this job.

    >>> comm = SINGLE_RANK
    >>> comm.rank, comm.size, comm.broadcast('x'), comm.gather('x'), comm.any(False), comm.post('stop', 1.)
    (0, 1, 'x', ['x'], False, 1.0)
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # rank on this machine
    timeout_s: float = 600.0  # seconds until a rank stops waiting for another
    control: ProcessGroup | None = None
    # like `control`, for the threads that write shards; made when the ranks join, because a rank that dies while others
    # make a group is noticed only after the timeout
    writing: ProcessGroup | None = None
    store: Store | None = None  # store through which a failing rank notifies the others
    # True if `join_ranks` created the default group, so that `leave` destroys it
    is_ours: bool = False
    is_broken: bool = False  # True after a run has failed, when ranks may be at different steps
    # consecutive ranks that train on the same samples, as a group of tensor parallelism does
    copies: int = 1
    _posted: list[float] = field(default_factory=lambda: [0.0] * len(SLOTS))
    _maxima: list[float] = field(default_factory=lambda: [0.0] * len(SLOTS))
    _pending: tuple[Any, Tensor] | None = None  # exchange in flight

    @property
    def is_first(self) -> bool:
        "True on rank 0, which writes files, shows progress and makes decisions."
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        "Number of this rank's shard of the data."
        return self.rank // self.copies

    @property
    def data_size(self) -> int:
        "Number of shards of the data."
        return self.size // self.copies

    @property
    def has_copied_data(self) -> bool:
        "True on a rank whose samples another rank has, too, which reports them."
        return self.rank % self.copies > 0

    @property
    def device(self) -> torch.device:
        "The device of this rank: its own accelerator if there is one, else the CPU."
        accelerator = find_accelerator()
        if accelerator is None:
            return torch.device('cpu')
        return torch.device(accelerator.type, self.local_rank % torch.accelerator.device_count())

    def broadcast(
        self,
        value: Any,  # value of rank 0; values of other ranks are ignored
    ) -> Any:
        "Return the value of rank 0 on every rank."
        if self.size == 1:
            return value
        values: list[Any] = [pack(value) if self.is_first else None]
        dist.broadcast_object_list(values, group_src=0, group=self.control)
        return value if self.is_first else unpack(values[0])

    def gather(
        self,
        value: Any,
        what: str = 'values',  # name of the values, compared between ranks
    ) -> list[Any]:
        """Return the values of all ranks in rank order, on every rank.

        Raises `DistributedError` if `what` differs between ranks."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, (what, pack(value)), group=self.control)
        for rank, (other, _) in enumerate(gathered):
            if other != gathered[0][0]:
                raise DistributedError(
                    f'Process 0 of {self.size} gathers {gathered[0][0]}, and process {rank} gathers {other}: one of '
                    'them has called fit, validate, get_preds, load or gather alone, or in another order.'
                )
        return [
            value if rank == self.rank else unpack(data) for rank, (_, data) in enumerate(gathered)
        ]

    def sum(
        self,
        t: Tensor,  # tensor of the same shape on every rank
    ) -> Tensor:
        "Return the sum of a tensor over all ranks, in float64 on the host, bitwise equal on all ranks."
        return self.start_sum(t.cpu())()

    def start_sum(self, t: Tensor) -> Callable[[], Tensor]:
        "Start an asynchronous sum over all ranks in float64, on the tensor's device; return f() -> the sum."
        total = t.detach().to(torch.float64, copy=True).contiguous()
        if self.size == 1:
            return lambda: total
        group = self.control if total.is_cpu else None
        work = dist.all_reduce(total, group=group, async_op=True)

        def wait() -> Tensor:
            work.wait()  # on a GPU only the stream waits, not the host
            return total

        return wait

    def any(self, flag: bool) -> bool:
        "Return True if `flag` is set on any rank."
        return bool(self.sum(torch.tensor(float(flag)))) if self.size > 1 else flag

    def barrier(self) -> None:
        "Wait until all ranks have called this method."
        if self.size == 1:
            return
        dist.barrier(group=self.control)

    def run_on_all(
        self,
        f: Callable[[], T],  # function to call on this rank
    ) -> T:
        """Call `f` on every rank, and return this rank's result when all ranks have finished.

        If `f` fails on a rank, this rank raises the exception, and the others raise a `DistributedError` with the
        message of the exception.

        >>> SINGLE_RANK.run_on_all(lambda: 3)
        3
        """
        if self.size == 1:
            return f()
        result = None
        error = None
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
        return result  # type: ignore[return-value]  # set if there was no error

    # -- numbers exchanged during the next batch ---------------------------------------------------

    def post(
        self,
        slot: str,  # one of `SLOTS`
        value: float,  # value of this rank
    ) -> float:
        "Post a number for the next `exchange`; return the maximum over ranks of the last one, or the value alone."
        if self.size == 1:
            return value
        i = SLOTS.index(slot)
        self._posted[i] = max(self._posted[i], value)
        return self._maxima[i]

    def value(self, slot: str) -> float:
        "Return the maximum over ranks of a slot, as of the last `exchange`."
        return self._maxima[SLOTS.index(slot)]

    def exchange(
        self,
        sends: bool = True,  # also start to send the posted numbers
    ) -> None:
        "Receive the numbers of the previous exchange, and start to send the posted numbers. Called after a batch."
        self._receive()
        if not sends:
            return
        t = torch.tensor(self._posted, dtype=torch.float64)
        self._pending = dist.all_reduce(t, dist.ReduceOp.MAX, self.control, async_op=True), t

    def sync(
        self,
        *numbers: float,  # additional numbers of this rank
    ) -> list[list[float]]:
        "Exchange the posted numbers, wait for the result, and return `numbers` of all ranks. Called between epochs."
        self._receive()
        t = torch.tensor([*self._posted, *numbers], dtype=torch.float64)
        gathered = [torch.empty_like(t) for _ in range(self.size)]
        dist.all_gather(gathered, t, group=self.control)
        n = len(SLOTS)
        self._maxima = torch.stack(gathered)[:, :n].amax(0).tolist()
        return [row[n:].tolist() for row in gathered]

    def reset(self, **values: float) -> None:
        "Reset all slots for a new run: to `values`, which are equal on all ranks, or to 0."
        self._pending = None
        self._maxima = [values.get(slot, 0.0) for slot in SLOTS]
        self._posted = list(self._maxima)

    def _receive(self) -> None:
        "Wait for the exchange in flight, if there is one, and store the maxima."
        if self._pending is None:
            return
        work, t = self._pending
        self._pending = None
        work.wait()
        self._maxima = t.tolist()

    # -- leaving -----------------------------------------------------------------------------------

    def leave(self) -> None:
        "Destroy the groups on the hosts, and the default group if `join_ranks` created it. Another call does nothing."
        groups = [group for group in (self.control, self.writing) if group is not None]
        self.control = self.writing = None
        self._pending = None
        if not groups or not dist.is_initialized():
            return
        if self.is_ours:
            return dist.destroy_process_group()
        for group in groups:
            dist.destroy_process_group(group)


SINGLE_RANK = Comm()


def pack(value: Any) -> bytes:
    "Convert a value to bytes, for `unpack`."
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    "Load a value that another rank of this job has packed, with tensors on the CPU."
    return torch.load(BytesIO(data), map_location='cpu', weights_only=False)


def launched_as(
    env: Mapping[str, str] | None = None,  # environment variables; None: `os.environ`
) -> dict[str, str]:
    """Return the variables that the launcher has set, under torchrun's names, or an empty dict without a launcher.

    The variables of torchrun take precedence over the variables of `srun`. Raises `DistributedError` for a missing one.

    >>> launched_as({'RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': 'a', 'MASTER_PORT': '1', 'LOCAL_RANK': '1'})['RANK']
    '1'
    >>> slurm = {'SLURM_STEP_NUM_TASKS': '4', 'SLURM_PROCID': '3', 'SLURM_LOCALID': '1', 'SLURM_JOB_ID': '42',
    ...          'SLURM_LAUNCH_NODE_IPADDR': '10.0.0.1'}
    >>> launched_as(slurm)['MASTER_ADDR'], launched_as(slurm)['WORLD_SIZE'], launched_as({})
    ('10.0.0.1', '4', {})
    """
    env = os.environ if env is None else env
    if 'RANK' in env and 'WORLD_SIZE' in env:
        missing = [name for name in ('MASTER_ADDR', 'MASTER_PORT') if name not in env]
        if missing:
            raise DistributedError(
                f'RANK and WORLD_SIZE are set, but not {" and ".join(missing)}. Start the script by '
                '`torchrun --nproc-per-node=N script.py`, or set them all.'
            )
        names = ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
        return {**{name: env[name] for name in names}, 'LOCAL_RANK': env.get('LOCAL_RANK', '0')}
    # srun sets this variable for each process of a step, but not for a batch script or an interactive shell
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
    """Return the address of the first machine of a SLURM step.

    >>> _first_host({'SLURM_STEP_NUM_NODES': '3', 'SLURM_STEP_NODELIST': 'gpu[07-08,11],big'})
    'gpu07'
    """
    nodes = env.get('SLURM_STEP_NODELIST') or env.get('SLURM_JOB_NODELIST')
    if not nodes or int(env.get('SLURM_STEP_NUM_NODES', 1)) == 1:
        return env.get('SLURM_LAUNCH_NODE_IPADDR', '127.0.0.1')
    return re.sub(r'\[(\d+)[^]]*\]', r'\1', nodes).split(',')[0]


def join_ranks(
    timeout_s: float = 600.0,  # seconds until a rank stops waiting for another
    backend: str | None = None,  # torch's backend; None: NCCL between GPUs and gloo between CPUs
) -> Comm:
    """Join the processes that were launched together, and return their `Comm`.

    Uses the default process group if it exists. Otherwise creates it from the variables of torchrun or SLURM's
    `srun`. Without a launcher, the `Comm` has one rank. Raises `DistributedError` if the ranks cannot join.
    """
    if not dist.is_available():
        return SINGLE_RANK
    # import now: its functions bind an existing default group as a default argument and keep it alive (torch 2.13)
    import torch.distributed.nn  # noqa: F401

    launched = {} if dist.is_initialized() else launched_as()
    if not dist.is_initialized() and not launched:
        return SINGLE_RANK
    control = _make_groups(launched, backend, timedelta(seconds=timeout_s))
    store = dist.PrefixStore(
        f'learnkit/{control.group_name}', dist.distributed_c10d._get_default_store()
    )
    rank = dist.get_rank()
    local_rank = int({**os.environ, **launched}.get('LOCAL_RANK', rank))
    size = dist.get_world_size()
    return Comm(rank, size, local_rank, timeout_s, control, store=store, is_ours=bool(launched))


def new_host_group(timeout: timedelta) -> ProcessGroup:
    "Return a new process group of all ranks that communicates through host memory."
    # newer versions of torch also declare the return value for ranks outside of a group
    group: Any = dist.new_group(backend='gloo', timeout=timeout)
    return group


def _make_groups(
    launched: Mapping[str, str],  # variables of this process; empty if the default group exists
    backend: str | None,
    timeout: timedelta,
) -> ProcessGroup:
    "Join the launched ranks, if there are any, and return a group of all ranks on the hosts."
    accelerator = find_accelerator()
    default = 'gloo'
    if accelerator is not None:
        default = f'cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}'
    try:
        if launched:
            if accelerator is not None:
                n = torch.accelerator.device_count()
                torch.accelerator.set_device_index(int(launched['LOCAL_RANK']) % n)
            dist.init_process_group(
                backend or default,
                timeout=timeout,
                rank=int(launched['RANK']),
                world_size=int(launched['WORLD_SIZE']),
                store=rendezvous(launched, timeout),
            )
        return new_host_group(timeout)
    except (RuntimeError, ValueError) as e:
        if launched and dist.is_initialized():
            dist.destroy_process_group()
        raise DistributedError(
            f'Process {launched.get("RANK", "")} of {launched.get("WORLD_SIZE", "")} cannot join the others at '
            f'{launched.get("MASTER_ADDR")}:{launched.get("MASTER_PORT")}: {str(e).rstrip(".")}. Were all started, '
            'with the same WORLD_SIZE, and is the port free?'
        ) from e


def rendezvous(launched: Mapping[str, str], timeout: timedelta) -> Store:
    """Return the store through which the ranks join, with an unused prefix.

    A used prefix would have keys of an earlier group: torchrun's store outlives restarted processes, and the store of
    rank 0 outlives a process group, after which the same processes may join again."""
    address = launched['MASTER_ADDR'], int(launched['MASTER_PORT'])
    if address not in _stores:
        is_host = launched['RANK'] == '0' and not has_agent_store()
        _stores[address] = dist.TCPStore(*address, None, is_host, timeout, wait_for_workers=False)
    _n_joined[address] += 1
    attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
    return dist.PrefixStore(f'learnkit/{attempt}/{_n_joined[address]}', _stores[address])


def has_agent_store() -> bool:
    "Return True if torchrun's agent hosts the store, so that the store outlives every rank."
    return os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'


def has_joined() -> bool:
    "Return True if this process has joined the ranks of a launcher, now or earlier."
    return bool(_stores)
