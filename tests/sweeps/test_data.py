"""A sample of the sweep of loaders: without any library, and with the libraries that development installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.libraries import skip_if_absent
from tests.sweeps.data import compare, judge, summarize
from tests.sweeps.loaders import BS, IDS, N_BATCH, load_loaders, read_dict
from tests.sweeps.verdicts import (
    EXACT,
    REPLAYED,
    UNREPEATABLE,
    WARNED,
    WRONG,
    Subject,
    Verdict,
    count_verdicts,
    make_table,
    shorten,
    write_between,
)

LOADERS = {loader.name: loader for loader in load_loaders()}


@pytest.mark.parametrize(
    ('name', 'kill', 'verdict'),
    [
        ('own: an iterable that counts its passes', 21, REPLAYED),
        ('own: a state, and an `__iter__` that is a generator', 5, EXACT),
        ('own: an order from a generator in a closure', 21, WARNED),
        ('own: an order without a seed', 5, UNREPEATABLE),
        ('torchdata: StatefulDataLoader, stream with a state', 21, EXACT),
    ],
)
def test_verdict(name: str, kill: int, verdict: str, tmp_path: Path) -> None:
    loader = LOADERS[name]
    skip_if_absent(loader.library)
    found = judge(loader, tmp_path, kills=(kill,), n_epoch=1 + kill // N_BATCH)
    assert (found.verdict, found.title) == (verdict, loader.title), found.note


def test_names_are_unique() -> None:
    assert len(LOADERS) == len(load_loaders())


def make_result(batches: list[Any], weight: float = 0.0) -> dict[str, Any]:
    return {'batches': batches, 'weights': {'w': torch.tensor(weight)}, 'history': []}


def test_compare_names_what_differs() -> None:
    straight = make_result([[0, [1, 2], 'a'], [0, [3, 4], 'b'], [1, [1, 2], 'a']])
    rest = [[0, [3, 4], 'b'], [1, [1, 2], 'a']]
    assert compare(straight, make_result(rest), 1) == []
    assert compare(straight, make_result(rest, 1.0), 1) == ['weights']
    assert compare(straight, make_result([[0, [3, 4], 'c'], rest[1]]), 1) == ['values']
    assert compare(straight, make_result(rest[1:]), 1) == ['batches 1 for 1 + 1', 'samples']


def make_verdict(title: str, verdict: str, note: str = '') -> Verdict:
    return Verdict('lib', '1.2', title, verdict, note)


def test_table_groups_titles_of_a_library_and_verdict() -> None:
    subjects = [Subject('lib', title, dict) for title in 'abcd']
    verdicts = [
        make_verdict('c', WRONG, 'samples'),
        make_verdict('b', EXACT, 'a warning'),
        make_verdict('a', EXACT),
    ]
    assert make_table(subjects, verdicts, 'loaders').splitlines() == [
        '| library | loaders | verdict |',
        '|---|---|---|',
        '| lib 1.2 | a; b | exact |',
        '| lib 1.2 | c | WRONG: samples |',
    ]
    assert count_verdicts(verdicts, 'loaders') == '3 loaders, 1 library: 2 exact, 1 WRONG.'


def test_write_between_keeps_the_rest(tmp_path: Path) -> None:
    page = tmp_path / 'page.md'
    page.write_text('before\n<!-- a -->\nold\n<!-- b -->\nafter\n', 'utf-8')
    write_between(page, '<!-- a -->', '<!-- b -->', 'new')
    assert page.read_text('utf-8') == 'before\n<!-- a -->\nnew\n<!-- b -->\nafter\n'
    with pytest.raises(ValueError, match='<!-- c -->'):
        write_between(page, '<!-- a -->', '<!-- c -->', 'new')


def test_summarize() -> None:
    lost = 'has changed, and no checkpoint holds: training loader.heads: harmless'
    assert summarize(lost) == 'at the first checkpoint: `heads` has changed, and is not saved'
    assert summarize('First | one.\nSecond one.') == 'First / one'


def test_shorten() -> None:
    assert shorten('First | one.\nSecond one.') == 'First / one'
    assert shorten('word ' * 100).endswith(' word ...')


def test_batches_have_ids_and_values() -> None:
    ids, x = read_dict(next(iter(LOADERS['own: a list of batches'].build(Path()))))
    assert ids.tolist() == IDS[:BS]
    assert torch.equal(x[1], torch.cos(2.0 * torch.arange(1, 5)))
    assert len(IDS) == N_BATCH * BS
