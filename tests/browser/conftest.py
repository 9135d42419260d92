"""Shared by the tests in a browser: one Chromium, and the built site with its address."""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from tests.helpers.building import build


@pytest.fixture(scope='session')
def browser() -> Iterator[Any]:
    "Start a headless Chromium: the one named by CHROMIUM, or the system's."
    from playwright.sync_api import sync_playwright

    path = (
        os.environ.get('CHROMIUM') or shutil.which('chromium') or shutil.which('chromium-browser')
    )
    if path is None:
        pytest.fail('No Chromium here: `apt-get install chromium`, or name one in CHROMIUM.')
    with sync_playwright() as playwright:
        # root has no sandbox
        chromium = playwright.chromium.launch(executable_path=path, args=['--no-sandbox'])
        yield chromium
        chromium.close()


class Quiet(SimpleHTTPRequestHandler):
    "Serves files without logging."

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope='session')
def address() -> Iterator[str]:
    "Build the site, serve it locally, and return its address."
    folder = build()
    with ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_address[1]}'
        server.shutdown()


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Any]:
    "A tab that can reach only the site; other requests and console errors are errors."
    tab, wrong = browser.new_page(viewport={'width': 1280, 'height': 900}), []
    tab.on(
        'request', lambda r: None if r.url.startswith((address, 'data:')) else wrong.append(r.url)
    )
    tab.on('pageerror', lambda error: wrong.append(str(error)))
    tab.on('console', lambda m: wrong.append(m.text) if m.type == 'error' else None)
    yield tab
    tab.close()
    assert not wrong
