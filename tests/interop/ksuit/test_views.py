"""Logs, files and counts that callbacks of ksuit write and read, compared with a plain loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.peers import ksuit_bench as bench, ksuit_callbacks as ks
from tests.peers.rows import EQUAL

SOME = [
    case
    for case in bench.CASES
    if case.cls
    in (ks.BestCheckpointCallback, ks.BestMetricCallback, ks.EmaCallback, ks.OfflineLossCallback)
    and not case.refuses
]


@pytest.mark.parametrize('run', [bench.run_learner, bench.run_killed])
@pytest.mark.parametrize('case', SOME, ids=bench.name_of)
def test_logs_files_and_weights_equal_the_plain_loop(
    case: bench.Case, run: Callable[..., Any], tmp_path: Path
) -> None:
    folders = tmp_path / 'learner', tmp_path / 'plain'
    for folder in folders:
        folder.mkdir()
    ours, theirs = run(case, folders[0]), bench.run_plain(case, folders[1])
    assert bench.compare(case, ours, theirs) == (True, EQUAL)
    assert theirs.entries or theirs.files
