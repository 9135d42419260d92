"""Files are written whole or not at all."""

import os
import subprocess
from pathlib import Path

import pytest

from learnkit.core.errors import OptionError
from learnkit.core.files import atomic_write, check_folder, check_writable, sweep


def test_content_appears_at_the_end_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / 'deep' / 'er' / 'a.txt'
    with atomic_write(path) as tmp:
        assert tmp.parent == path.parent
        assert tmp.name.startswith('.a.txt.tmp-')
        assert str(os.getpid()) in tmp.name
        tmp.write_text('new')
        assert not path.exists()
    assert path.read_text() == 'new' and os.listdir(path.parent) == ['a.txt']


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, OSError])
def test_a_failure_in_the_block_leaves_the_old_content(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / 'a.txt'
    path.write_text('old')
    with pytest.raises(error), atomic_write(path) as tmp:
        tmp.write_text('half')
        raise error
    assert path.read_text() == 'old' and os.listdir(tmp_path) == ['a.txt']


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / 'there').mkdir()
    (tmp_path / 'link').symlink_to(tmp_path / 'there' / 'real')
    with atomic_write(tmp_path / 'link') as tmp:
        assert tmp.parent == tmp_path / 'there'
        tmp.write_text('new')
    assert (tmp_path / 'link').is_symlink() and (tmp_path / 'there' / 'real').read_text() == 'new'


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    check_writable(tmp_path / 'new' / 'a')
    assert os.listdir(tmp_path / 'new') == []
    (tmp_path / 'file').touch()
    with pytest.raises(OSError):
        check_writable(tmp_path / 'file' / 'a')
    with pytest.raises(IsADirectoryError):
        check_writable(tmp_path / 'new')


def test_a_folder_is_made_or_refused(tmp_path: Path) -> None:
    check_folder(tmp_path / 'runs' / 'new')
    assert os.listdir(tmp_path / 'runs') == ['new'] and os.listdir(tmp_path / 'runs' / 'new') == []
    (tmp_path / 'file').touch()
    with pytest.raises(OptionError, match='file cannot be written'):
        check_folder(tmp_path / 'file')


def dead_process() -> int:
    "Return a process id that no process has: the id of a child that has ended."
    child = subprocess.Popen(['true'])
    child.wait()
    return child.pid


def test_temporaries_of_dead_processes_are_swept_and_nothing_else(tmp_path: Path) -> None:
    dead, own = dead_process(), os.getpid()
    stale = [
        f'.a.ckpt.tmp-{dead}-0123abcd',
        f'.a.ckpt.tmp-{own}-0123abcd',
        '.a.ckpt.tmp-9999999999-0123abcd',
    ]
    other = [
        f'a.ckpt.tmp-{dead}-0123abcd',
        f'.tmp-{dead}-0123abcd',
        'a.ckpt',
        '.lock',
        f'.a.tmp-{os.getppid()}-0123abcd',
    ]
    for name in stale + other:
        (tmp_path / name).touch()
    (tmp_path / f'.folder.tmp-{dead}-0123abcd').mkdir()
    (tmp_path / f'.link.tmp-{dead}-0123abcd').symlink_to(tmp_path / 'a.ckpt')
    (tmp_path / 'below').mkdir()
    (tmp_path / 'below' / f'.a.tmp-{dead}-0123abcd').touch()
    kept = sorted([*other, 'below', f'.folder.tmp-{dead}-0123abcd', f'.link.tmp-{dead}-0123abcd'])
    with atomic_write(tmp_path / 'c.ckpt') as tmp:
        tmp.touch()
        assert sweep(tmp_path) == sorted(tmp_path / name for name in stale)
        assert sorted(os.listdir(tmp_path)) == sorted([*kept, tmp.name])
    assert (tmp_path / 'below' / f'.a.tmp-{dead}-0123abcd').exists() and sweep(tmp_path) == []
