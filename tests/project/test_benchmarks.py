"""The GPU and time-to-accuracy benchmarks run, and their checks pass."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import gpu, page, resume, save_memory, tasks
from benchmarks.harness import Result, Workload
from benchmarks.programs import (
    classify_learnkit,
    classify_loop,
    classify_one_group,
    classify_tuned,
    classify_tuned_groups,
    resume_task as task,
)
from tests.helpers.measuring import devices

# -- on a GPU, and on the CPU in small -------------------------------------------------------------


def cells(device: str, section: str) -> list[list[str]]:
    if device == 'cuda':
        gpu.keep_deterministic()
    return gpu.measure(gpu.Setting(torch.device(device), small=True), section).rows


@devices
def test_what_has_to_hold_holds(device: str) -> None:
    found = dict(cells(device, 'checks'))
    memory = found.pop("`microbatch='auto'` where memory runs out")
    assert re.match(
        r'microbatches of (16|32|64) of 64; weights (equal|differ by \d\.\de-0[789])', memory
    )
    kept_mib = float(found.pop('memory after a failed fit').removesuffix(' MiB'))
    assert kept_mib < 0.1
    assert len(found) == 4 and all('weights equal' in output for output in found.values())


@devices
@pytest.mark.parametrize('section', ['waits', 'data', 'save'])
def test_each_section_runs(section: str, device: str) -> None:
    rows = cells(device, section)
    waits = '0.00' if device == 'cuda' else '-'
    if section == 'waits':
        assert [row[1] for row in rows] == [waits, waits]
    else:
        assert all(float(cell) >= 0 for row in rows for cell in row[1:3])


# -- memory of a save ------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != 'linux', reason='the system must report the highest memory')
@pytest.mark.filterwarnings('ignore::FutureWarning', 'ignore::UserWarning')
def test_the_tables_of_memory_have_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_memory, 'WIDTH', 4)
    ways = {name: (run, name) for name, run in save_memory.SAVES.items()} | save_memory.RESUMES
    found: dict[str, Any] = {}
    for name, (run, source) in ways.items():
        folder = tmp_path / source
        folder.mkdir(exist_ok=True)
        found[name] = [run(1, folder)]
    table = save_memory.report(200, found).splitlines()
    assert len(table) == 2 + 2 * len(save_memory.SAVES) + 3 + len(save_memory.RESUMES)
    assert all(numbers['wait first'] > 0 for name in save_memory.SAVES for numbers in found[name])


# -- the page's tables -----------------------------------------------------------------------------


def test_the_page_has_the_marks_of_all_tables() -> None:
    text = page.PAGE.read_text('utf-8')
    marks = re.findall('<!-- (.*): written by python -m benchmarks --write -->', text)
    assert sorted(marks) == sorted(['machine', *page.TABLES])
    assert all(page.read_block(text, name) for name in marks)


def test_a_table_has_medians_and_ratios_of_the_rounds() -> None:
    names = dict.fromkeys(['raw', 'learnkit-idle10'], 'torch')
    two = Result(Workload('a', '', '', names), {'raw': [2.0, 4.0, 5.0]})
    two.values['learnkit-idle10'] = [3.0, 5.0, 5.0]
    one = Result(Workload('b', '', '', names), {'raw': [1500.0]}, {'fastai': 'an error'})
    assert page.make_table({'first': two, 'second': one}, ', us').splitlines() == [
        '| | first, us | ratio | second, us | ratio |',
        '|---|--:|--:|--:|--:|',
        '| by hand | 4.0 | 1.00 | 1,500 | 1.00 |',
        '| learnkit, 10 idle callbacks | 5.0 | 1.25 | - | - |',
        '',
        'Not measured, after an error: fastai, second.',
    ]


def test_a_table_of_another_machine_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / 'page.md'
    monkeypatch.setattr(page, 'TABLES', {'a': lambda n: f'a {n}', 'b': lambda n: f'b {n}'})
    marks = [f'{page.begin_of(name)}\nold\n{page.END}' for name in ('machine', 'a', 'b')]
    file.write_text('\n\n'.join(marks), 'utf-8')
    monkeypatch.setattr(page, 'describe_machine', lambda: 'Monday')
    page.write_tables(['a', 'b'], 5, file)
    monkeypatch.setattr(page, 'describe_machine', lambda: 'Tuesday')
    page.write_tables(['b'], 1, file)
    blocks = [page.read_block(file.read_text('utf-8'), name) for name in ('machine', 'a', 'b')]
    assert blocks == ['Monday', 'a 5', 'b 1\n\nMeasured on Tuesday']
    with pytest.raises(ValueError, match='c'):
        page.replace_block(file.read_text('utf-8'), 'c', 'new')


# -- time to accuracy ------------------------------------------------------------------------------


@pytest.fixture
def data() -> SimpleNamespace:
    "Return two linearly separable classes in the plane."
    x = np.random.default_rng(0).normal(size=(320, 2)).astype('float32')
    return SimpleNamespace(**tasks.split_rows(x, (x.sum(1) > 0).astype('int64'), 64, 64))


@pytest.mark.parametrize(
    'program',
    [
        classify_learnkit,
        classify_loop,
        classify_one_group,
        classify_tuned,
        classify_tuned_groups,
    ],
)
def test_programs_train_in_place(
    program: Any, data: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    program.train(data, model, 8, 0.1)
    right = model(torch.from_numpy(data.x_test)).argmax(1) == torch.from_numpy(data.y_test)
    assert right.double().mean() > 0.95


# -- kills of other packages' runs -----------------------------------------------------------------


def test_samples_of_an_epoch_are_counted_from_where_the_resumed_run_began() -> None:
    batches = [tuple(range(i, i + task.BATCH)) for i in range(0, task.N, task.BATCH)]
    straight = 2 * batches
    assert resume.find_start(straight, straight[:23], straight[20:], 10) == 20
    assert resume.find_start(straight, straight[:20], straight[10:], 10) == 10  # half written
    assert resume.count_samples(straight) == (0, 0)
    began_again = [*batches[:20], *batches]
    assert resume.count_samples(began_again) == (160, 160)


@pytest.mark.full
def test_kills_of_learnkit_are_exact(tmp_path: Path) -> None:
    measured = resume.serve('learnkit', 2, tmp_path)
    assert measured['repeats']
    row = resume.make_row('learnkit', measured)
    assert row.count('2 of 2') == 4
