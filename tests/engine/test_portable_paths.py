"""Paths in checkpoints, which may come from somebody else."""

from pathlib import Path

import pytest

from learnkit.engine.portable_paths import from_portable_path
from learnkit.testing import synth_learner


def test_a_checkpoint_of_somebody_else_names_no_files_to_write_to(tmp_path: Path) -> None:
    mine = tmp_path / 'mine.txt'
    mine.write_text('all of it')
    (tmp_path / 'run').mkdir()
    expected = tmp_path / 'run' / 'models' / 'a.pth'
    assert from_portable_path(synth_learner(path=tmp_path / 'run'), 'models/a.pth') == expected
    for kept in (str(mine), '../mine.txt'):
        with pytest.warns(UserWarning, match='lies outside of'):
            assert from_portable_path(synth_learner(path=tmp_path / 'run'), kept) is None
    assert from_portable_path(synth_learner(path=tmp_path / 'run'), str(mine), tmp_path) == mine
