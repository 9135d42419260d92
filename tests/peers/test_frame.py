"""The frame of the bench: what it calls equal, and how it writes the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from learnkit import Callback
from tests.helpers.learners import bare_learner
from tests.peers.__main__ import PAGE, WILD, BenchError, begin, main, make_error, wild_table
from tests.peers.environments import PEERS, SCRIPTS
from tests.peers.rows import EQUAL, TOO_FAR, Row, compare_numbers
from tests.peers.scripts_bench import read_table as read_programs
from tests.peers.wild_bench import SOURCES, TABLE, Case, Files, read_table, run_cases


def test_numbers_are_equal_bitwise_or_within_a_limit() -> None:
    a = {'w': torch.tensor([1.0, float('nan')]), 'n': torch.tensor(3)}
    assert compare_numbers(a, {name: t.clone() for name, t in a.items()}) == EQUAL
    assert compare_numbers(a, {**a, 'w': a['w'] + 3e-7}) == 'within 1e-05'
    assert compare_numbers(a, {**a, 'w': a['w'] + 2e-5}) == 'within 0.001'
    assert compare_numbers(a, {**a, 'w': a['w'] + 0.01}) == TOO_FAR
    assert compare_numbers(a, {**a, 'w': torch.ones(2)}) == TOO_FAR  # NaN and a number
    assert compare_numbers(a, {**a, 'w': torch.ones(3)}) == TOO_FAR
    assert compare_numbers(a, {'w': a['w']}) == TOO_FAR


def test_a_package_that_is_not_compared_is_named_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(peer: Any, bench: str) -> list[Row]:
        raise make_error(f'Traceback ...\nModuleNotFoundError: No module named {bench!r}\n')

    monkeypatch.setattr('tests.peers.__main__.run_bench', fail)
    assert main(['fastai', 'hf']) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.endswith('could not be installed: fastai, hf')
    assert len(lines) == 2 and all('second set-up command' in line for line in lines)
    assert main(['fastai', '--allow-skipped']) == 0
    assert isinstance(make_error('Traceback ...\nValueError: 3'), BenchError)


def test_the_page_has_a_part_for_each_package() -> None:
    page = PAGE.read_text('utf-8')
    assert all(page.count(begin(peer)) == 1 for peer in [*PEERS, WILD, SCRIPTS])


def test_each_behavior_of_users_code_has_a_statement_and_a_line() -> None:
    tests = ''.join(file.read_text('utf-8') for file in Path('tests/interop').rglob('test_*.py'))
    page = PAGE.read_text('utf-8')
    for name, text in read_table()[0].items():
        assert f'def test_{name}(' in tests, name
        assert page.count(f'| {text} |') == 1, text


def test_each_class_of_users_has_a_library_and_behaviors_of_the_table() -> None:
    behaviors, cases = read_table()
    assert Counter(case.library for case in cases) == {'fastai': 72, 'composer': 41, 'noether': 36}
    assert {name for case in cases for name in case.behaviors} == {*behaviors}
    for library in {case.library for case in cases} | {'lightning'}:
        assert TABLE.with_name(f'wild_{library}.py').is_file()
    gated = next(case for case in cases if case.name == 'SaveSegmentationOutput')
    assert (gated.repository, gated.file) == (
        'SDFIdk/ML_sdfi_fastai2',
        'src/ML_sdfi_fastai2/infer.py',
    )
    assert (gated.call, gated.conditions) == ('', ['predictions', 'no_rows', 'learn.saved'])


BASE = """
class Base(Callback):
    size = SIZE
"""
USERS = """
import not_installed
from .base import *
from package.base import Base as Again
class Smaller(Base):
    def __init__(self, factor): self.factor = factor
    def read(self) -> not_installed.Value: return outside
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad * self.factor
class Wrong(not_installed.Base): pass
raise RuntimeError('a program')
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / 'owner+name' / 'package'
    folder.mkdir(parents=True)
    (folder / 'base.py').write_text(BASE)
    (folder / 'users.py').write_text(USERS)
    monkeypatch.setenv(SOURCES, str(tmp_path))


NAMES = {'SIZE': 3, 'Callback': Callback}


@pytest.mark.usefixtures('sources')
def test_a_file_is_run_without_its_package_and_what_is_not_installed() -> None:
    names = Files('owner/name', NAMES, {'outside': 7}).load('package/users.py')
    assert names.Smaller.size == 3 and names.Again is names.Base
    assert names.Smaller(0.5).read() == 7
    with pytest.raises(ImportError, match='not_installed'):
        names.Wrong()


SMALL_TABLE = """
# a comment
BEHAVIORS
loss_of_after_loss: replaces `loss_grad`
plain owner/name 0123
  package/users.py Smaller(FACTOR) | slow, learn.time.ba | loss_of_after_loss
    Smaller, twice = [Smaller(1.0),
      Smaller(2.0)] | | | the weights differ
"""


def train_plainly(lr: float, factor: float) -> nn.Module:
    model, (x, y) = nn.Linear(2, 1), torch.ones(2, 4, 2)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    for _ in range(2):
        loss = factor * (model(x) - y.sum(1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= lr * gradient
    return model


def compare_plainly(case: Case, make: Callable[[], list[Any]]) -> list[Row]:
    "Compare a Learner with a loop by hand, which multiplies by one half."
    lr = case.options.get('lr', 0.1)
    model, (x, y) = nn.Linear(2, 1), torch.ones(2, 4, 2)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    batches = [(x, y.sum(1, keepdim=True))]
    learn = bare_learner(batches, model, F.mse_loss, lr=lr, opt_func=torch.optim.SGD, cbs=make())
    learn.fit(2)
    numbers = compare_numbers(train_plainly(lr, 0.5).state_dict(), model.state_dict())
    same = case.observe({'learn': learn}) == ({'learn.time.ba': 2} if case.observed else {})
    return [Row(case.name, True, same, numbers, case.why)]


@pytest.mark.usefixtures('sources')
def test_classes_of_a_table_run_with_the_conditions_of_a_library() -> None:
    setup = SimpleNamespace(
        NAMES=NAMES,
        STAND_INS={},
        CONDITIONS={'slow': lambda source: {'lr': source.Base.size / 100}},
        FACTOR=0.5,
        compare=compare_plainly,
    )
    behaviors, cases = read_table(SMALL_TABLE)
    smaller, twice = run_cases(cases, setup)
    assert behaviors == {'loss_of_after_loss': 'replaces `loss_grad`'}
    behavior = ['loss_of_after_loss']
    assert smaller == Row('owner/name: Smaller', True, True, EQUAL, behaviors=behavior)
    assert twice == Row('owner/name: Smaller, twice', True, True, TOO_FAR, 'the weights differ')
    table = wild_table([smaller, twice])
    assert 'Callbacks: of 2, 2 run unchanged, 1 have equal numbers.' in table
    assert table.endswith('| `owner/name: Smaller, twice` | yes | the weights differ |')


def test_programs_of_lightning_users_are_named_with_their_commits() -> None:
    programs = read_programs()
    assert len({program.name for program in programs}) == len(programs) >= 19
    assert all(re.fullmatch(r'[0-9a-f]{40}', program.commit) for program in programs)
    assert all(program.shows and program.file.endswith('.py') for program in programs)
