"""The pages for those who come from elsewhere: their Python runs, and the names that they tell to use are there."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import learnkit.all
from learnkit import Learner
from learnkit.testing import synth_learner

DOCS = sorted((Path(__file__).resolve().parents[1]/'docs').glob('coming-from-*.md'))


def blocks(page: Path) -> list[tuple[int, str]]:
    "The Python of a page, each block with the number of its first line."
    text = page.read_text('utf-8')
    return [(text[:m.start(1)].count('\n'), m[1]) for m in re.finditer(r'^```python\n(.*?)^```', text, re.M | re.S)]


@pytest.mark.parametrize('page', [page for page in DOCS if blocks(page)], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {'__name__': '__main__'}
    for line, source in blocks(page): exec(compile('\n' * line + source, str(page), 'exec'), names)


def rows(page: Path) -> list[list[str]]:
    "The cells of the rows of a page's tables, without their heads."
    lines = [line for line in page.read_text('utf-8').splitlines() if line.startswith('|')]
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if not set(line) <= set('|- ')][1:]


def test_the_names_for_those_who_come_from_fastai_exist() -> None:
    page = next(page for page in DOCS if page.stem == 'coming-from-fastai')
    named = 0
    for old, new, _ in rows(page):
        for code in re.findall(r'`([^`]+)`', old if new.startswith('the same') else new):
            match = re.match(r'(?:learn\.)?(?:opt\.|recorder\.)?([A-Za-z_]\w*)', code)
            assert match is not None, code
            name = match[1]
            if name in ('from', 'set_hyper', 'hypers', 'torch', 'opt_func', 'plot_loss', 'plot_sched', 'plot_lr_find'):
                continue  # shown in the page's Python, or told as text
            assert hasattr(Learner, name) if code.startswith('learn.') else hasattr(learnkit.all, name), code
            named += 1
    assert named > 90


@pytest.mark.parametrize(('stem', 'least'), [('coming-from-composer', 45), ('coming-from-ksuit', 12)])
def test_the_names_for_those_who_come_from_composer_and_ksuit_exist(stem: str, least: int) -> None:
    page, learn, named = next(page for page in DOCS if page.stem == stem), synth_learner(), 0
    for cells in rows(page):
        for on_learner, name in re.findall(r'`(learn\.)?([A-Za-z_]\w*)[^`]*`', cells[-1]):
            if not on_learner and not name[0].isupper(): continue  # an event or an argument
            assert hasattr(learn if on_learner else learnkit.all, name), f'{cells[0]}: {name}'
            named += 1
    assert named >= least
