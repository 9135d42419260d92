"""Files of callbacks in a checkpoint are written with it, verified, pruned, moved, and read on resume."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from learnkit import Callback, Checkpoint
from learnkit.core.errors import DamagedError
from learnkit.testing import synth_learner


class Journal(Callback):
    "Write the number of batches to a file of the checkpoint."

    def __init__(self) -> None:
        self.batches, self.read = 0, []

    def after_batch(self) -> None:
        self.batches += self.training

    def save_to_checkpoint(self, folder: Path) -> None:
        assert folder.is_dir() and not list(folder.iterdir())
        (folder / 'sub').mkdir()
        (folder / 'sub' / 'batches.txt').write_text(str(self.batches))

    def resume_from_checkpoint(self, folder: Path, model: Any) -> None:
        self.batches = int((folder / 'sub' / 'batches.txt').read_text())
        self.read.append(self.batches)


def fit(folder: Path, n_epoch: int, **options: Any) -> Journal:
    "Train with checkpoints after each epoch of 4 batches."
    journal = Journal()
    learn = synth_learner(n_train=4, n_valid=1, path=folder, cbs=[journal])
    with learn.no_bar(), learn.no_logging():
        learn.fit(n_epoch, cbs=Checkpoint(every='1ep', **options), resume=True)
    return journal


def folders(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / 'checkpoints').glob('*.files'))


def test_a_resume_reads_what_was_written(tmp_path: Path) -> None:
    assert fit(tmp_path, 2).read == []
    assert folders(tmp_path) == ['00001-ep1-ba4.files', '00002-ep2-ba8.files']
    assert fit(tmp_path, 3).read == [8]


@pytest.mark.parametrize('background', [True, False])
def test_files_are_pruned_with_their_checkpoint(tmp_path: Path, background: bool) -> None:
    fit(tmp_path, 4, keep_last=2, background=background)
    assert folders(tmp_path) == ['00003-ep3-ba12.files', '00004-ep4-ba16.files']


@pytest.mark.parametrize('damage', ['missing', 'changed'])
def test_damaged_files_are_named_and_an_older_checkpoint_is_used(
    tmp_path: Path, damage: str
) -> None:
    fit(tmp_path, 2)
    file = tmp_path / 'checkpoints' / '00002-ep2-ba8.files' / 'journal' / 'sub' / 'batches.txt'
    if damage == 'missing':
        file.unlink()
    else:
        file.write_text('9')
    with pytest.warns(UserWarning, match=r'00001-ep1-ba4\.ckpt is used[\s\S]*batches\.txt'):
        assert fit(tmp_path, 2).read == [4]


def test_a_damaged_file_of_a_named_checkpoint_is_an_error(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    shutil.rmtree(tmp_path / 'checkpoints' / '00001-ep1-ba4.files')
    learn = synth_learner(n_train=4, n_valid=1, path=tmp_path, cbs=[Journal()])
    with learn.no_bar(), pytest.raises(DamagedError, match=r'00001-ep1-ba4\.files .*Copy'):
        learn.fit(2, resume=tmp_path / 'checkpoints' / '00001-ep1-ba4.ckpt')


def test_a_folder_without_its_checkpoint_is_swept(tmp_path: Path) -> None:
    stale = tmp_path / 'checkpoints' / '00007-ep1-ba4.files'
    stale.mkdir(parents=True)
    own = tmp_path / 'checkpoints' / 'my.files'
    own.mkdir()
    fit(tmp_path, 1)
    assert not stale.exists() and own.exists()
