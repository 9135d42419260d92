"""Row 20: power loss. The file is flushed when it is whole, then renamed, then the folder is flushed."""

import os
from pathlib import Path

import pytest

from learnkit.checkpoint.file import read_state
from tests.faults.file_helpers import write


def test_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace, times = os.fsync, os.replace, list[tuple[int, int]]()

    def recorded_fsync(fd: int) -> None:
        path = Path(os.readlink(f'/proc/self/fd/{fd}'))
        if path.is_file():
            read_state(path)  # all of it, with the digest
            times.append((os.fstat(fd).st_size, os.fstat(fd).st_mtime_ns))
        calls.append(f'fsync {"folder" if path == tmp_path else path.name.partition("tmp-")[0]}')
        fsync(fd)

    def recorded_replace(a: Path, b: Path) -> None:
        times.append((os.stat(a).st_size, os.stat(a).st_mtime_ns))
        calls.append(f'replace {Path(a).name.partition("tmp-")[0]} {Path(b).name}')
        replace(a, b)

    monkeypatch.setattr(os, 'fsync', recorded_fsync)
    monkeypatch.setattr(os, 'replace', recorded_replace)
    for name in ('a.ckpt', 'a.ckpt', 'b.ckpt'):
        write(tmp_path / name)
    a, b = ([f'fsync .{n}.', f'replace .{n}. {n}', 'fsync folder'] for n in ('a.ckpt', 'b.ckpt'))
    assert calls == a + a + b
    assert times[::2] == times[1::2], 'nothing is written between flushing and renaming'


@pytest.mark.parametrize('stage', ['fsync', 'replace'])
def test_power_fails_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    "The disk then has the complete old file."
    write(tmp_path / 'a.ckpt', {'n': 1})

    class PowerFails(BaseException):
        pass

    def stop(*args: object) -> None:
        raise PowerFails

    with monkeypatch.context() as m:
        m.setattr(os, stage, stop)
        m.setattr(Path, 'unlink', lambda *args, **kwargs: None)  # nobody cleans up
        with pytest.raises(PowerFails):
            write(tmp_path / 'a.ckpt', {'n': 2})
    assert read_state(tmp_path / 'a.ckpt')[0] == {'n': 1}
    assert sorted(p.name[:12] for p in tmp_path.iterdir()) == ['.a.ckpt.tmp-', 'a.ckpt']
