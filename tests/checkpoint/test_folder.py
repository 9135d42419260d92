"""Checkpoint folders: file names, the selected checkpoint, and which checkpoints may be deleted."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from learnkit import CheckpointError
from learnkit.checkpoint.file import write_state
from learnkit.checkpoint.folder import (
    Entry,
    entries,
    find,
    find_superfluous,
    next_path,
    parse_number,
    sort_by_score,
)


def write(
    folder: Path, *values: Any, run: str = 'a', mode: str = 'min', monitor: str = 'valid_loss'
) -> list[Path]:
    "Write checkpoints with these monitored values."
    paths = []
    for value in values:
        paths.append(next_path(folder, epoch=len(paths), ba=10 * len(paths)))
        info = {'run': run, 'value': value, 'mode': mode, 'monitor': monitor}
        write_state(paths[-1], {'n': len(paths)}, info)
    return paths


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    # in the digest: the file's metadata can still be read
    content[content.index(b'"sha256":"') + 20] ^= 1
    path.write_bytes(content)


def named(which: Any, folder: Path) -> str:
    found = find(which, folder)
    assert found is not None
    return found[0].name


def test_names_continue_over_runs(tmp_path: Path) -> None:
    assert next_path(tmp_path, 0, 0).name == '00001-ep0-ba0.ckpt'
    write(tmp_path, 1.0, 2.0)
    assert [e.path.name for e in entries(tmp_path)] == ['00002-ep1-ba10.ckpt', '00001-ep0-ba0.ckpt']
    entries(tmp_path)[1].path.unlink()
    assert next_path(tmp_path, 7, 70).name == '00003-ep7-ba70.ckpt'
    (tmp_path / '99999-mine.ckpt').touch()
    assert next_path(tmp_path, 7, 70).name == '100000-ep7-ba70.ckpt'
    assert entries(tmp_path)[0].info == {}, 'an empty file has no info'


def test_other_files_do_not_count(tmp_path: Path) -> None:
    for name in (
        'model.pth a-ep1.ckpt .00001-ep0.ckpt.tmp-1-00000000 00001.ckpt 00003-ep1.ckpt.bak'.split()
    ):
        (tmp_path / name).touch()
    assert entries(tmp_path) == [] and next_path(tmp_path, 0, 0).name.startswith('00001-')
    assert entries(tmp_path / 'not there') == [] and find(True, tmp_path) is None
    assert [parse_number(Path(n)) for n in ('00012-ep3-ba1200.ckpt', '12.ckpt', 'x')] == [12, 0, 0]


def test_which_is_meant(tmp_path: Path) -> None:
    paths = write(tmp_path, 3.0, 1.0, 2.0, None)
    assert (
        named(True, tmp_path)
        == named('latest', tmp_path)
        == named(tmp_path, Path('x'))
        == paths[3].name
    )
    assert named('best', tmp_path) == paths[1].name
    for way in (paths[2], str(paths[2]), paths[2].name):
        assert named(way, tmp_path) == paths[2].name
    found = find(paths[0], tmp_path)
    assert found and found[1] == {'n': 1} and found[2]['value'] == 3.0


@pytest.mark.parametrize(
    ('which', 'message'),
    [
        ('latest', 'There is no checkpoint in .*Checkpoint'),
        ('best', 'There is no checkpoint in'),
        ('nothing.ckpt', 'There is no checkpoint nothing.ckpt'),
        ('lastest', 'Did you mean `latest`'),
        (1, 'resume=1: pass True'),
    ],
)
def test_what_is_not_there(which: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        find(which, tmp_path)


def test_damaged_ones_are_skipped_and_named(tmp_path: Path) -> None:
    paths = write(tmp_path, 3.0, 1.0, 2.0)
    damage(paths[2])
    with pytest.warns(
        UserWarning, match='skipped; 00002-ep1-ba10.ckpt is used.\n  .*00003-ep2-ba20.ckpt'
    ):
        assert named(True, tmp_path) == paths[1].name
    damage(paths[1])
    with pytest.warns(UserWarning, match='00002'):
        assert named('best', tmp_path) == paths[0].name
    damage(paths[0])
    with pytest.raises(CheckpointError, match=r'No checkpoint in .* can be read') as caught:
        find(True, tmp_path)
    assert all(p.name in str(caught.value) for p in paths)
    with pytest.raises(CheckpointError, match='No checkpoint in'):
        find('best', tmp_path)
    with pytest.raises(CheckpointError, match=r'00001-ep0-ba0.ckpt'):
        find(paths[0], tmp_path)


def test_the_best_is_of_the_latest_run(tmp_path: Path) -> None:
    "An earlier run may have trained another model, or monitored another value."
    write(tmp_path, 0.1, run='a')
    paths = write(tmp_path, 5.0, 4.0, 6.0, run='b')
    assert named('best', tmp_path) == paths[1].name
    higher = write(tmp_path, 0.5, 0.9, 0.7, run='b', mode='max', monitor='accuracy')
    assert named('best', tmp_path) == higher[1].name
    write(tmp_path, None, run='c')  # has measured nothing yet
    assert named('best', tmp_path) == higher[1].name and named(True, tmp_path).startswith('00008')


def made(values: list[Any], mode: str = 'min') -> list[Entry]:
    return [
        Entry(Path(f'{i}'), i, {'value': v, 'mode': mode, 'run': 'a'}) for i, v in enumerate(values)
    ]


def test_ties_go_to_the_earlier() -> None:
    assert [e.number for e in sort_by_score(made([2.0, 1.0, 1.0, None, 1.0]))] == [1, 2, 4, 0]
    assert find_superfluous(made([1.0, 1.0, 1.0]), 1, 1) == [Path('1')]


values = st.lists(
    st.one_of(st.none(), st.just(math.nan), st.floats(-2, 2), st.just(math.inf), st.integers(-1, 1))
)


@given(values, st.integers(1, 4), st.integers(0, 4), st.sampled_from(['min', 'max']))
def test_what_stays(values: list[Any], keep_last: int, keep_best: int, mode: str) -> None:
    "The newest and the best are kept; pruning once gives the same files as pruning after each write."
    there = made(values, mode)
    gone = set(find_superfluous(there, keep_last, keep_best))
    measured = [
        (v if mode == 'min' else -v, i) for i, v in enumerate(values) if v is not None and v == v
    ]
    stay = {i for _, i in sorted(measured)[:keep_best]} | set(range(len(values))[-keep_last:])
    assert {int(p.name) for p in gone} == set(range(len(values))) - stay

    left: list[Entry] = []
    for e in there:
        left.append(e)
        out = find_superfluous(left, keep_last, keep_best)
        left = [o for o in left if o.path not in out]
    assert {e.number for e in left} == stay
