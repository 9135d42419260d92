"""The sockets that join the processes of a training, found and closed where torch cannot be told to give up."""
from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator

__all__ = ['between', 'close', 'connected', 'has_ended', 'is_lost', 'reachable_host']

Ends = tuple[str, str]  # the addresses of a connection's near and far end, as `host port`
LOST = ('gloo/transport', 'Connection closed by peer', 'Connection reset by peer', 'Timed out waiting',
        'communicator was aborted', 'closed connection')


def _sockets() -> Iterator[tuple[int, Ends, socket.socket]]:
    "Yield the number, the ends and a second handle of each TCP connection of this process."
    try: numbers = [int(name) for name in os.listdir('/dev/fd')]
    except OSError: return  # a system that does not show them
    for fd in numbers:
        try: handle = os.dup(fd)
        except OSError: continue  # that of the listing itself
        try: s = socket.socket(fileno=handle)
        except OSError:
            os.close(handle)
            continue
        with s:
            try: ends = s.getsockname(), s.getpeername()
            except OSError: continue
            if all(isinstance(end, tuple) for end in ends): yield fd, (_said(ends[0]), _said(ends[1])), s


def _said(address: tuple[object, ...]) -> str: return f'{str(address[0]).removeprefix("::ffff:")} {address[1]}'


def between(ports: Iterable[int] = ()) -> list[Ends]:
    "Return the ends of every TCP connection of this process, but those from or to `ports`."
    left_out = tuple(f' {port}' for port in ports)
    return sorted(ends for _, ends, _ in _sockets() if not any(end.endswith(left_out) for end in ends if left_out))


def close(ends: Iterable[Ends]) -> int:
    """Shut connections down at both ends, and return how many: who waits for something to come through one, is told.

    A gloo collective that waits cannot be called off (its `abort` does nothing, torch 2.13), and its group is not taken
    down while anybody holds it; copies of its sockets are in every loader worker, too. This ends it in milliseconds."""
    meant, n = set(ends), 0
    for _, own, s in _sockets():
        if own not in meant: continue
        try: s.shutdown(socket.SHUT_RDWR)
        except OSError: continue  # it has ended already
        meant.discard(own)
        n += 1
    return n


def connected(port: int) -> socket.socket | None:
    "Return a second handle of the connection to a port."
    for _, (_, far), s in _sockets():
        if far.endswith(f' {port}'): return s.dup()
    return None


def is_lost(e: BaseException) -> bool:
    "Tell whether torch raises this where another process cannot be reached."
    from torch.distributed import DistNetworkError, DistStoreError
    if isinstance(e, (DistNetworkError, DistStoreError)): return True
    return isinstance(e, RuntimeError) and any(part in str(e) for part in LOST)


def has_ended(s: socket.socket) -> bool:
    "Tell whether the far end has closed a connection on which nothing is expected."
    try: return not s.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError: return False
    except OSError: return True


def reachable_host(names: Iterable[str]) -> str:
    "Return the first of several names that is one of this machine, by which others reach it."
    for name in names:
        try: family, _, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        except OSError: continue
        with socket.socket(family, socket.SOCK_STREAM) as s:
            try: s.bind(address)
            except OSError: continue  # of another machine
        return name
    return '127.0.0.1'
