"""Row 17: the folder cannot be written. The fit is refused before its first step, and nothing has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from learnkit import Callback, CheckpointError
from tests.faults.run_helpers import checkpointed, content, names


def a_file_as_parent(path: Path) -> Path:
    (path / 'file').write_text('')
    return path / 'file' / 'checkpoints'


def a_file_in_its_place(path: Path) -> Path:
    (path / 'file').write_text('')
    return path / 'file'


def a_link_to_nowhere(path: Path) -> Path:
    (path / 'link').symlink_to(path / 'nowhere' / 'at' / 'all')
    return path / 'link'


def a_folder_as_its_lock(path: Path) -> Path:
    (path / 'run' / '.lock').mkdir(parents=True)
    return path / 'run'


def a_name_that_is_too_long(path: Path) -> Path:
    return path / ('x' * 300)


def one_without_rights(path: Path) -> Path:
    if os.geteuid() == 0:
        pytest.skip('root may write anywhere')
    (path / 'run').mkdir(mode=0o500)
    return path / 'run'


FOLDERS = [
    a_file_as_parent,
    a_file_in_its_place,
    a_link_to_nowhere,
    a_folder_as_its_lock,
    a_name_that_is_too_long,
    one_without_rights,
]


@pytest.mark.parametrize('make', FOLDERS, ids=lambda f: f.__name__)
def test_it_is_refused_before_the_first_step(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder, drawn = make(tmp_path), list[int]()
    learn = checkpointed(folder)(Callback(before_draw=lambda cb: drawn.append(cb.iter)))
    learn.create_opt()
    before = content(learn)
    for resume in (False, None):
        with pytest.raises(CheckpointError, match='cannot hold checkpoints') as caught:
            learn.fit(1, resume=resume)
        assert (
            str(folder.absolute()) in str(caught.value) and content(learn) == before and not drawn
        )
    learn.checkpoint._folder = tmp_path / 'other'
    learn.fit(1)
    assert drawn and names(tmp_path / 'other') == ['00001-ep1-ba3.ckpt']


def test_so_it_is_when_the_fit_would_go_on_from_elsewhere(tmp_path: Path) -> None:
    "Weights are not changed: the folder is checked before anything is loaded."
    checkpointed(tmp_path / 'good')().fit(1)
    learn = checkpointed(a_file_as_parent(tmp_path))()
    learn.create_opt()
    before = content(learn)
    with pytest.raises(CheckpointError, match='cannot hold checkpoints'):
        learn.fit(2, resume=tmp_path / 'good')
    assert content(learn) == before and learn.opt.n_steps == 0
