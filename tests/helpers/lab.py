"""A JupyterLab server, and its notebooks in a browser page."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / 'tests' / 'browser' / 'shots'
LOCAL = ('http://127.0.0.1:', 'data:', 'blob:', 'file:')
WIDTH, HEIGHT = 1200, 900  # of a window
NEXT_FRAME = '() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))'
PATIENCE_S = 300.0  # the longest that anything is waited for

# No question, no news, no look for updates, and every cell in the page, also where it is not seen.
SETTINGS = {
    'apputils-extension/notification': {
        'fetchNews': 'false',
        'checkForUpdates': False,
        'doNotDisturbMode': True,
    },
    'completer-extension/manager': {'providerTimeout': 30_000},
    'docmanager-extension/plugin': {'autosave': False},
    'notebook-extension/tracker': {
        'windowingMode': 'none',
        'scrollPastEnd': False,
        'autoStartDefaultKernel': True,
    },
}
OPTIONS = (
    '--no-browser',
    '--allow-root',
    '--ServerApp.ip=127.0.0.1',
    '--IdentityProvider.token=',
    '--ServerApp.terminals_enabled=False',
    '--LabApp.expose_app_in_browser=True',
    '--LabApp.news_url=None',
    '--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate',
    '--LabApp.extension_manager=readonly',
    # should this process be killed, kernels and server end by themselves
    '--MappingKernelManager.cull_idle_timeout=60',
    '--MappingKernelManager.cull_interval=20',
    '--ServerApp.shutdown_no_activity_timeout=120',
)


class Lab:
    "A server with separate settings, kernels and folder; its kernels run this Python."

    def __init__(
        self,
        folder: Path,  # everything it reads and writes is below; the notebooks in `folder/work`
    ) -> None:
        self.work, self.log = folder / 'work', folder / 'server.log'
        self.work.mkdir()
        for name, values in SETTINGS.items():
            _write(folder / 'settings/@jupyterlab' / f'{name}.jupyterlab-settings', values)
        _write(
            folder / 'data/kernels/python3/kernel.json',
            {
                'argv': [sys.executable, '-m', 'ipykernel_launcher', '-f', '{connection_file}'],
                'display_name': 'Python 3',
                'language': 'python',
            },
        )
        self.url = f'http://127.0.0.1:{_free_port()}'
        with self.log.open('wb') as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    '-m',
                    'jupyterlab',
                    *OPTIONS,
                    f'--ServerApp.root_dir={self.work}',
                    f'--ServerApp.port={self.url.rpartition(":")[2]}',
                    '--ServerApp.port_retries=0',
                ],
                env=_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.work,
            )

    def wait(self) -> None:
        "Return when the server answers."
        until = time.monotonic() + PATIENCE_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f'JupyterLab did not start:\n{self.log.read_text()}')
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f'{self.url}/api', timeout=5):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        "End the server and its kernels; kernels that do not end in time are killed."
        try:
            processes = [
                *psutil.Process(self.process.pid).children(recursive=True),
                psutil.Process(self.process.pid),
            ]
        except psutil.NoSuchProcess:
            return
        self.process.terminate()  # it ends its kernels first
        _, alive = psutil.wait_procs(processes, timeout=10)
        for process in alive:
            process.kill()
        self.process.wait()

    def add(
        self,
        name: str,  # the file's name
        nb: Any,  # a notebook; its outputs are left out
    ) -> None:
        "Put a notebook that has not been run into the server's folder."
        for cell in nb.cells:
            if cell.cell_type == 'code':
                cell.outputs, cell.execution_count = [], None
        nbformat.write(nb, self.work / name)


class Notebook:
    "A notebook that is open in a page."

    def __init__(
        self,
        page: Any,  # Playwright's
        lab: Lab,
        name: str,  # of the file in the server's folder
    ) -> None:
        self.page, self.lab, self.name, self.path = page, lab, name, lab.work / name
        self.page.goto(f'{lab.url}/lab/tree/{name}?reset')
        self.page.locator('.jp-Notebook .jp-CodeCell').first.wait_for()
        self.page.locator('.jp-StatusBar-TextItem', has_text='Idle').first.wait_for()
        self.command('application:toggle-left-area')

    def command(self, name: str, **args: Any) -> None:
        "Do what a menu, a button or a key does."
        self.page.evaluate(
            '([name, args]) => window.jupyterapp.commands.execute(name, args)', [name, args]
        )

    def cells(self) -> Any:
        "Return the code cells."
        return self.page.locator('.jp-Notebook .jp-CodeCell')

    def outputs(self, n: int) -> Any:
        "Return the outputs of the code cell `n`."
        return self.cells().nth(n).locator('.jp-OutputArea-output')

    def count(self, n: int) -> int | None:
        "Return the execution count of a code cell, or None before its end."
        prompt = self.cells().nth(n).locator('.jp-InputPrompt').inner_text().strip('[]: ')
        return int(prompt) if prompt.isdigit() else None

    def bar_text(self, n: int) -> str:
        "Return the text next to the progress bar of a code cell."
        return str(self.outputs(n).locator('progress').locator('..').inner_text().strip())

    def faults(self) -> list[str]:
        "Return outputs that a notebook must not have: errors, and output to stderr such as warnings."
        kinds = ('error', 'stderr')
        return list(
            self.page.locator(
                ', '.join(f'[data-mime-type="application/vnd.jupyter.{kind}"]' for kind in kinds)
            ).all_inner_texts()
        )

    def run_all(self) -> None:
        "Run all cells by the menu."
        self.page.locator('.lm-MenuBar-item', has_text='Run').click()
        self.page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()

    def start(self, n: int) -> None:
        "Run a code cell by the keyboard."
        self.cells().nth(n).locator('.cm-content').click()
        self.page.keyboard.press('Control+Enter')

    def run(self, n: int) -> None:
        "Run a code cell, and wait until it has ended."
        before = self.count(n)
        self.start(n)
        self.wait(lambda: self.count(n) not in (None, before))

    def write(self, n: int, text: str) -> None:
        "Replace the text of a code cell."
        self.cells().nth(n).locator('.cm-content').click()
        self.page.keyboard.press('Control+a')
        self.page.keyboard.type(text)

    def wait(self, done: Any) -> None:
        "Poll until a condition holds."
        until = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > until:
                self.page.screenshot(path=SHOTS / 'timeout.png')
                raise TimeoutError(
                    f'Still not so after {PATIENCE_S:.0f} s: see {SHOTS / "timeout.png"}.'
                )
            self.page.wait_for_timeout(50)

    def save(self) -> Any:
        "Save it by the keyboard, and return what is in the file."
        before = self.path.stat().st_mtime_ns
        self.page.keyboard.press('Control+s')
        self.wait(
            lambda: (
                self.path.stat().st_mtime_ns > before
                and not self.page.locator('.jp-mod-dirty').count()
            )
        )
        return nbformat.read(self.path, as_version=4)

    def stretch(self) -> None:
        "Make the window as high as the notebook, and show it from its top."
        outer = self.page.locator('.jp-WindowedPanel-outer')
        self.page.set_viewport_size(
            {'width': WIDTH, 'height': outer.evaluate('e => e.scrollHeight') + 150}
        )
        outer.evaluate('e => e.scrollTo(0, 0)')

    def shoot(self, name: str) -> None:
        "Keep pictures of the window, with dark and light theme."
        SHOTS.mkdir(exist_ok=True)
        for theme in ('Dark', 'Light'):
            self.command('apputils:change-theme', theme=f'JupyterLab {theme}')
            self.page.locator(f'body[data-jp-theme-name="JupyterLab {theme}"]').wait_for(
                state='attached'
            )
            self.page.locator('#jupyterlab-splash').wait_for(state='detached')
            self.page.evaluate(NEXT_FRAME)
            self.page.screenshot(path=SHOTS / f'{name}-{theme.lower()}.png')


@contextmanager
def fresh_page(browser: Any) -> Iterator[Any]:
    "Open a page that requests nothing from other hosts."
    page, asked = browser.new_page(viewport={'width': WIDTH, 'height': HEIGHT}), []
    page.set_default_timeout(PATIENCE_S * 1000)
    page.on('request', lambda request: asked.append(request.url))
    try:
        yield page
    finally:
        page.close()
    assert not [url for url in asked if not url.startswith(LOCAL)]


def _write(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return int(s.getsockname()[1])


def _environment(folder: Path) -> dict[str, str]:
    "Return the environment of server and kernels: nothing of this machine's Jupyter, one thread, figures shown."
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(('JUPYTER', 'MPLBACKEND', 'PYTEST'))
    }
    return env | {
        'JUPYTER_CONFIG_DIR': str(folder / 'config'),
        'JUPYTER_DATA_DIR': str(folder / 'data'),
        'JUPYTER_PATH': str(folder / 'data'),
        'JUPYTER_RUNTIME_DIR': str(folder / 'runtime'),
        'JUPYTERLAB_SETTINGS_DIR': str(folder / 'settings'),
        'JUPYTERLAB_WORKSPACES_DIR': str(folder / 'workspaces'),
        'IPYTHONDIR': str(folder / 'ipython'),
        'PYTHONPATH': str(ROOT),
        'OMP_NUM_THREADS': '1',
    }
