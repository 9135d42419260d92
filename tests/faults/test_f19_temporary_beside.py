"""Row 19: with TMPDIR on another file system the temporary is in its target's folder, so that it can be renamed."""

import os
import tempfile
from pathlib import Path

import pytest

from learnkit.checkpoint.file import read_state
from tests.faults.file_helpers import write

ELSEWHERE = Path('/dev/shm')


@pytest.mark.parametrize('way', ['there', 'back'])
def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if not os.access(ELSEWHERE, os.W_OK) or ELSEWHERE.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip('there is no second file system')
    with tempfile.TemporaryDirectory(dir=ELSEWHERE) as other:
        folder, tmpdir = (tmp_path, Path(other)) if way == 'there' else (Path(other), tmp_path)
        monkeypatch.setenv('TMPDIR', str(tmpdir))
        monkeypatch.setattr(tempfile, 'tempdir', None)
        assert tempfile.gettempdir() == str(tmpdir)
        renamed: list[tuple[Path, Path]] = []
        replace = os.replace

        def recorded(a: Path, b: Path) -> None:
            renamed.append((Path(a), Path(b)))
            assert os.stat(a).st_dev == folder.stat().st_dev and os.listdir(tmpdir) == []
            replace(a, b)

        monkeypatch.setattr(os, 'replace', recorded)
        write(folder / 'a.ckpt')
        assert [(a.parent, b) for a, b in renamed] == [(folder, folder / 'a.ckpt')]
        read_state(folder / 'a.ckpt')
