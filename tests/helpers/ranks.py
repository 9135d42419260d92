"""Start ranks that train together, forked from this process in a tenth of a second."""

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from time import monotonic
from typing import Any

from tests.helpers.forks import Child, start


def free_port() -> int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return int(s.getsockname()[1])


def leave_together() -> None:
    """Destroy a default group that a job has left open, when all ranks have come here.

    The process of rank 0 holds the store: if it ended earlier, another rank could no longer create a group.
    """
    dist = import_module('torch.distributed')
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def started_ranks(
    job: Callable[..., Any],  # f(rank, *arguments) returns plain values or tensors
    n: int = 2,
    *arguments: Any,
) -> Iterator[list[Child]]:
    "Start `n` processes with torchrun's variables, and stop them at the end."
    import_module('torch.distributed.fsdp')  # as `torch._dynamo`: a second in each child otherwise
    port = free_port()

    def live(rank: int) -> Any:
        warnings.simplefilter('error')
        warnings.filterwarnings('ignore', category=FutureWarning, module='torch')
        # the callback that ends a run is missing in the resumed run, and functions keep lists for the test
        warnings.filterwarnings('ignore', 'The callbacks differ from those in the checkpoint')
        warnings.filterwarnings('ignore', r'These attributes changed .*:\n  Callback\.\w+: .*\Z')
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(n),
            LOCAL_WORLD_SIZE=str(n),
            MASTER_ADDR='127.0.0.1',
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME='lo',
        )
        result = job(rank, *arguments)
        leave_together()
        return result

    with ExitStack() as stack:
        yield [stack.enter_context(start(partial(live, rank))) for rank in range(n)]


def run_ranks(
    job: Callable[..., Any],  # called with the rank, and `arguments`
    n: int = 2,
    *arguments: Any,
    timeout_s: float = 600.0,
) -> list[Any]:
    "Run a job in `n` processes and return their results; raise the error of the first rank that fails."
    with started_ranks(job, n, *arguments) as children:
        end = monotonic() + timeout_s
        while any(c.poll() is None for c in children) and not any(c.poll() for c in children):
            children[0].wait(
                max(0.1, end - monotonic()),
                until=lambda: any(c.poll() is not None for c in children),
            )
            for c in children:
                if c.poll() is None:
                    c.wait(
                        max(0.1, end - monotonic()), until=lambda: any(c.poll() for c in children)
                    )
        for c in children:
            if c.poll():
                raise c.error(f'ended with {c.code}')
        return [c.result for c in children]
