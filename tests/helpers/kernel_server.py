"""Fork Jupyter kernels from a process that has imported learnkit and what notebooks use: imports take six seconds.

    python kernel_server.py serve SOCKET    # import once, then fork a kernel for each request
    python kernel_server.py start SOCKET CONNECTION_FILE    # what Jupyter starts as a kernel

Jupyter signals and waits for the second process, which passes signals on and ends with its kernel."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
from types import FrameType

IMPORTED = (
    'ipykernel.kernelapp',
    'learnkit.all',
    'matplotlib.pyplot',
    'sklearn.datasets',
    'torch._dynamo',
)
LONGEST = 2**20  # bytes of a request


def serve(path: str) -> None:
    "Fork a kernel for each connection, until this process is killed."
    for name in IMPORTED:
        __import__(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            connection, _ = server.accept()
            message, streams, _, _ = socket.recv_fds(connection, LONGEST, 3)
            pid = os.fork()
            if pid == 0:
                server.close()
                live(json.loads(message), streams)
            for stream in streams:
                os.close(stream)
            connection.sendall(f'{pid}\n'.encode())
            for f in (report_end, kill_without):
                threading.Thread(target=f, args=(pid, connection), daemon=True).start()


def live(request: dict[str, object], streams: list[int]) -> None:
    "Become a kernel, in the environment of the process that asked for it."
    from ipykernel.kernelapp import launch_new_instance

    os.setsid()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    os.chdir(str(request['folder']))
    os.environ.clear()
    os.environ.update(request['env'])  # type: ignore[call-overload]  # a dict, by `start`
    sys.path[:] = [*str(os.environ.get('PYTHONPATH', '')).split(os.pathsep), *sys.path]
    code = 1
    try:
        launch_new_instance(argv=['-f', str(request['file'])])
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else bool(e.code)
    threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def report_end(pid: int, connection: socket.socket) -> None:
    "Send the exit code of a kernel."
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        connection.sendall(f'{code}\n'.encode())
    except OSError:
        pass  # who asked for the kernel has ended


def kill_without(pid: int, connection: socket.socket) -> None:
    "Kill a kernel when the process that asked for it has ended."
    connection.recv(1)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended before


def start(path: str, file: str) -> int:
    "Ask for a kernel, pass signals on to it, and return its exit code."
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        request = {'folder': os.getcwd(), 'env': dict(os.environ), 'file': file}
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        answers = connection.makefile()
        pid = int(answers.readline())

        def pass_on(number: int, frame: FrameType | None) -> None:
            os.kill(pid, number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
        return int(answers.readline() or 1)


if __name__ == '__main__':
    sys.path.pop(0)  # the folder of this file
    action, *arguments = sys.argv[1:]
    sys.exit({'serve': serve, 'start': start}[action](*arguments))
