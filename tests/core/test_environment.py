"""Versions and devices in bug reports."""

import os
import sys

import pytest

from learnkit.__main__ import main
from learnkit.core.version import VERSION


def test_env_has_versions_and_devices_and_no_paths(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert main(['env']) == 0
    rows = dict(line.split(': ', 1) for line in capsys.readouterr().out.splitlines())
    assert rows['learnkit'] == VERSION and rows['torch'] == torch.__version__
    assert rows['Python'].startswith('.'.join(map(str, sys.version_info[:3])))
    assert rows['CPU'].startswith(f'{os.cpu_count()} cores')
    assert not any('/' in value for name, value in rows.items() if name != 'system')
