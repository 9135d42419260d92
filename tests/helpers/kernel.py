"""A real Jupyter kernel that runs cells, can be interrupted, and completes code."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from tempfile import gettempdir
from time import monotonic
from typing import Any
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[2]


def kernel_name() -> str:
    "Return the name under which Jupyter starts a kernel of this Python."
    return 'python3'


def kernel_env(folder: Path) -> dict[str, str]:
    "Return the environment of a kernel with the folder's settings of IPython."
    env = {key: value for key, value in os.environ.items() if key != 'MPLBACKEND'}
    own = {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'IPYTHONDIR': str(folder / '.ipython')}
    return env | own


def make_sockets() -> dict[str, str]:
    "Return options of a kernel manager with sockets in files: kernels that start at once may draw the same port."
    return {'transport': 'ipc', 'ip': f'{gettempdir()}/kernel-{uuid4().hex[:12]}'}


class Kernel:
    "A running kernel and its client."

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, interrupt_at: str = '', timeout_s: float = 600.0) -> list[Any]:
        """Run a cell and return its outputs as a notebook keeps them: an update takes the place of what it updates.

        The kernel is interrupted, as by the stop button, once an output has text like the pattern `interrupt_at`."""
        from nbformat.v4 import output_from_msg

        request, outputs, shown, end = self.client.execute(code), [], {}, monotonic() + timeout_s
        self.n_messages = 0
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(end - monotonic(), 0.01))
            except Empty:
                raise TimeoutError(f'{code!r} has not ended; so far it showed {outputs}') from None
            if message['parent_header'].get('msg_id') != request:
                continue
            kind, content = message['msg_type'], message['content']
            if kind == 'status' and content['execution_state'] == 'idle':
                return outputs
            self.n_messages += 1
            name = content.get('transient', {}).get('display_id')
            if kind == 'update_display_data':
                shown[name].update(data=content['data'], metadata=content['metadata'])
            elif kind == 'stream' and outputs and outputs[-1].get('name') == content['name']:
                outputs[-1]['text'] += content['text']
            elif kind in ('display_data', 'execute_result', 'error', 'stream'):
                outputs.append(output_from_msg(message))
                if name:
                    shown[name] = outputs[-1]
            if interrupt_at and re.search(interrupt_at, str(content)):
                interrupt_at = ''
                self.manager.interrupt_kernel()

    def value(self, expression: str) -> Any:
        "Return what a cell prints, as text."
        return ''.join(
            o['text'] for o in self.run(f'print({expression})') if o['output_type'] == 'stream'
        ).strip()

    def completions(self, code: str) -> list[str]:
        "Return what Tab offers at the end of a cell."
        reply = self.client.complete(code, reply=True, timeout=300)
        return list(reply['content']['matches'])


@contextmanager
def running_kernel(folder: Path, setup: str) -> Iterator[Kernel]:
    "Yield a kernel that has run the set-up."
    from jupyter_client.manager import KernelManager

    with warnings.catch_warnings():
        # warnings of the client and its sockets: the kernel is another process
        warnings.simplefilter('ignore')
        manager = KernelManager(kernel_name=kernel_name(), **make_sockets())
        manager.start_kernel(env=kernel_env(folder), cwd=str(folder))
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=300)
            kernel = Kernel(manager, client)
            if faults := [o for o in kernel.run(setup) if o['output_type'] in ('error', 'stream')]:
                raise RuntimeError(f'The set-up says {faults}')
            yield kernel
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
