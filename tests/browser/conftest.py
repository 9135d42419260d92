"""Shared by the tests in a browser: one Chromium."""

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
