"""Row 17: the folder cannot be written. The fit is refused before its first step, and nothing has changed."""

import os
from pathlib import Path

import pytest

from learnkit import Callback, CheckpointError
from tests.faults.run_helpers import checkpointed, content, names

# their callbacks keep lists for the test
pytestmark = pytest.mark.filterwarnings('ignore:These attributes changed since the fit began')

FOLDERS = {
    'a file as parent': 'file/checkpoints',
    'a file in its place': 'file',
    'a link to nowhere': 'link',
    'a folder as its lock': 'run',
    'a name that is too long': 'x' * 300,
    'one without rights': 'closed',
}


@pytest.fixture
def places(tmp_path: Path) -> Path:
    (tmp_path / 'file').write_text('')
    (tmp_path / 'link').symlink_to(tmp_path / 'nowhere' / 'at' / 'all')
    (tmp_path / 'run' / '.lock').mkdir(parents=True)
    (tmp_path / 'closed').mkdir(mode=0o500)
    return tmp_path


@pytest.mark.parametrize('kind', FOLDERS)
def test_it_is_refused_before_the_first_step(kind: str, places: Path, tmp_path: Path) -> None:
    if kind == 'one without rights' and os.geteuid() == 0:
        pytest.skip('root may write anywhere')
    folder, drawn = places / FOLDERS[kind], list[int]()
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


def test_so_it_is_when_the_fit_would_go_on_from_elsewhere(places: Path, tmp_path: Path) -> None:
    "Weights are not changed: the folder is checked before anything is loaded."
    checkpointed(tmp_path / 'good')().fit(1)
    learn = checkpointed(places / FOLDERS['a file as parent'])()
    learn.create_opt()
    before = content(learn)
    with pytest.raises(CheckpointError, match='cannot hold checkpoints'):
        learn.fit(2, resume=tmp_path / 'good')
    assert content(learn) == before and learn.opt.n_steps == 0
