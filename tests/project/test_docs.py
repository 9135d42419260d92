"""The claims of the guides and of the repository's pages hold: code, names, links and security."""

import ast
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

import learnkit.all
from learnkit import Learner
from learnkit.testing import synth_learner

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / 'nbs').glob('from_*.ipynb'))
COLUMN = re.compile(r'<td[^>]*>\n\n```python\n(.*?)\n```\n\n</td>', re.S)
LINK = re.compile(r'\]\(([^)#:\s]+)[^)]*\)')

each_guide = pytest.mark.parametrize('path', GUIDES, ids=lambda path: path.stem)


def cells(path: Path) -> list[tuple[str, str]]:
    "Return type and text of each cell."
    return [
        (cell['cell_type'], ''.join(cell['source']))
        for cell in json.loads(path.read_text('utf-8'))['cells']
    ]


def markdown(path: Path) -> str:
    return '\n\n'.join(text for kind, text in cells(path) if kind == 'markdown')


def tables(path: Path) -> list[tuple[list[str], str]]:
    "Return both columns of each table of code, with the cell that follows it."
    found = cells(path)
    return [
        (COLUMN.findall(text), after)
        for (kind, text), (_, after) in pairwise(found)
        if kind == 'markdown' and '<table' in text
    ]


@each_guide
def test_the_right_column_is_the_cell_that_runs(path: Path) -> None:
    assert len(tables(path)) >= 6
    for columns, run in tables(path):
        left, right = columns
        compile(left, 'left', 'exec')
        assert right == run


def test_the_loops_of_the_guide_run_too() -> None:
    path = ROOT / 'nbs/from_loop.ipynb'
    code = [text for kind, text in cells(path) if kind == 'code']
    compared = [text for text in code if text.startswith('model, ')]
    lefts = [columns[0] for columns, _ in tables(path)]
    assert len(compared) == 4
    assert all(any(text.startswith(left) for left in lefts) for text in compared)


@each_guide
def test_links_of_a_guide_lead_to_files(path: Path) -> None:
    targets = LINK.findall(markdown(path))
    assert targets and all((path.parent / target).is_file() for target in targets), targets


def rows(text: str, heading: str = '') -> list[list[str]]:
    "Return the cells of Markdown tables below a heading, without the first header row."
    lines = [line for line in text[text.index(heading) :].splitlines() if line.startswith('|')]
    return [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in lines
        if not set(line) <= set('|- ')
    ][1:]


# names in the guide's Python, or told as text
SHOWN = 'from set_hyper hypers torch opt_func plot_loss plot_sched plot_lr_find'.split()


def test_the_names_for_those_who_come_from_fastai_exist() -> None:
    named = 0
    for old, new, _ in rows(markdown(ROOT / 'nbs/from_fastai.ipynb'), '## Names, one by one'):
        for code in re.findall(r'`([^`]+)`', old if new.startswith('the same') else new):
            match = re.match(r'(?:learn\.)?(?:opt\.|recorder\.)?([A-Za-z_]\w*)', code)
            assert match is not None, code
            name = match[1]
            if name in SHOWN:
                continue
            assert (
                hasattr(Learner, name) if code.startswith('learn.') else hasattr(learnkit.all, name)
            ), code
            named += 1
    assert named > 90


@pytest.mark.parametrize(
    ('stem', 'heading', 'least'),
    [
        ('from_composer', '## Names, one by one', 45),
        ('from_ksuit', '## Names, one by one', 12),
        ('from_lightning', '## The flags of the Trainer', 45),
        ('from_keras', '## Names, one by one', 20),
        ('from_hf_trainer', '## The arguments of the Trainer', 25),
    ],
)
def test_the_names_for_those_who_come_from_elsewhere_exist(
    stem: str, heading: str, least: int
) -> None:
    learn, named = synth_learner(), 0
    learn.add_cb(learnkit.all.Checkpoint())
    for row in rows(markdown(ROOT / f'nbs/{stem}.ipynb'), heading):
        for on_learner, name in re.findall(r'`(learn\.)?([A-Za-z_]\w*)[^`]*`', row[-1]):
            if not on_learner and not name[0].isupper():
                continue  # an event, an argument, or a module
            assert hasattr(learn if on_learner else learnkit.all, name), f'{row[0]}: {name}'
            named += 1
    assert named >= least


# -- the files beside the package ------------------------------------------------------------------

PAGES = [ROOT / name for name in ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'SECURITY.md')]


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_files_and_links_of_a_page_are_there(page: Path) -> None:
    text = page.read_text('utf-8')
    links = [link for link in re.findall(r'\]\(([^)#]+)\)', text) if not link.startswith('http')]
    paths = re.findall(r'`((?:tests|docs|learnkit|nbs|benchmarks|\.ci)/[\w./-]+)`', text)
    there = [
        path
        for path in [*links, *paths]
        if '<' not in path and '_build' not in path and '/shots' not in path
    ]
    assert [path for path in there if not (ROOT / path).exists()] == []


def test_the_tests_that_security_rests_on_are_there() -> None:
    text = (ROOT / 'SECURITY.md').read_text('utf-8')
    named = re.findall(r'test_f\d\d_\w+\.py', text)
    assert len(named) == 5 and all((ROOT / 'tests' / 'faults' / name).exists() for name in named)


def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    for path in sorted((ROOT / 'learnkit').rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text('utf-8'))):
            if isinstance(node, ast.Import):
                # torch's description of a sharded checkpoint, by an unpickler that accepts nothing else
                allowed = {'pickle'} if path.name == 'dcp.py' else set()
                assert not {a.name for a in node.names} & {'pickle', 'marshal'} - allowed, path
            if isinstance(node, ast.ImportFrom) and node.module == 'pickle':
                assert {a.name for a in node.names} <= {'UnpicklingError', 'PicklingError'}, path
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called == 'torch.export.load':
                assert path.name == 'export_for_inference.py', path  # of what it has just written
            assert called not in ('eval', 'exec', 'torch.jit.load', 'np.load'), path
            # values from other processes of one job
            if called == 'torch.load' and path.name not in ('ranks.py', 'launch.py'):
                assert {k.arg: ast.unparse(k.value) for k in node.keywords}.get(
                    'weights_only'
                ) == 'True', path
