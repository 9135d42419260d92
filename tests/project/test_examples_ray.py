"""The script for Ray Train resumes after kills of its workers, with the weights of a run without them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.libraries import require

pytestmark = pytest.mark.dist

require('sklearn', 'ray')

ROOT = Path(__file__).parents[2]


def train(home: Path, *options: str) -> str:
    "Run the script, and return what it and the workers print."
    given = {
        'PYTHONPATH': str(ROOT),
        'OMP_NUM_THREADS': '1',
        'HOME': str(home),  # for the token of Ray
        'RAY_COLOR_PREFIX': '0',
    }
    command = [sys.executable, 'examples/ray_train.py', *options]
    done = subprocess.run(
        command,
        env=os.environ | given,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # where a second copy of a row would be
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def find_rows(output: str) -> list[str]:
    "Return the rows of the table that a worker prints, without the time."
    return re.findall(r'(\d+ +\d\.\d{6} +\d\.\d{6} +\d\.\d{6}) +\d\d:\d\d', output)


def find_digest(output: str) -> str:
    (found,) = re.findall(r'digest of the weights: ([0-9a-f]{64})', output)
    return str(found)


def test_killed_workers_resume_with_the_same_weights(tmp_path: Path) -> None:
    whole = train(tmp_path)
    killed = train(tmp_path, '--kill', '34', '61')

    # 23 batches an epoch, and a checkpoint every 5: the one being written may be lost
    resumed = [int(batch) for batch in re.findall(r'Resuming from .*-ba(\d+)\.ckpt', killed)]
    assert len(resumed) == 2
    assert resumed[0] in (25, 30)
    assert resumed[1] in (55, 60)
    assert 'Resuming' not in whole

    rows = find_rows(whole)
    assert [row.split()[0] for row in rows] == ['0', '1', '2']  # once: by the first worker alone
    assert find_rows(killed) == rows
    assert find_digest(killed) == find_digest(whole)
