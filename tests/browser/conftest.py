"""Shared by the tests in a browser: one Chromium, one JupyterLab, and a fresh page for each test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


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


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    "Open a new page for a test."
    from tests.helpers.lab import fresh_page

    with fresh_page(browser) as page:
        yield page


@pytest.fixture(scope='session')
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    "Start a JupyterLab server."
    from tests.helpers.lab import Lab

    server = Lab(tmp_path_factory.mktemp('jupyterlab'))
    try:
        server.wait()
        yield server
    finally:
        server.stop()
