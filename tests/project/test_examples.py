"""Each script of examples/ runs, resumes after a SIGKILL with the same results, and trains in two processes."""

import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from learnkit.checkpoint.file import read_state
from tests.helpers.forks import start
from tests.helpers.libraries import require
from tests.helpers.ranks import started_ranks

require('sklearn', 'matplotlib')
from examples import images  # noqa: E402  # only where these are installed


@pytest.fixture(autouse=True, scope='module')
def with_dynamo() -> None:
    "Import the modules of an optimizer once, which would take a second in each fork."
    import_module('torch._dynamo')


@pytest.fixture
def text() -> Any:
    pytest.importorskip('transformers')
    pytest.importorskip('datasets')
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # else a warning in each fork
    return import_module('examples.text')


@contextmanager
def killed_at(owner: type, name: str, nth: int) -> Iterator[None]:
    "Make a process kill itself at the nth call of a method."
    calls, method = count(1), getattr(owner, name)

    def call_or_kill(*args: Any) -> Any:
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args)

    with mock.patch.object(owner, name, call_or_kill):
        yield


def run(job: Callable[[], Any], code: int = 0) -> str:
    "Run a job in a fork, and return its output."
    with start(job) as child:
        child.wait(600)
        if child.code != code:
            raise child.error(f'ended with {child.code}')
        return child.stdout


def options(folder: Path, *others: str) -> Sequence[str]:
    return ['--quick', '--folder', str(folder), *others]


def figures(output: str) -> list[str]:
    "Return the lines with results."
    return re.findall(r'.*(?:accuracy|perplexity) [\d(].*', output)


def all_weights(folder: Path) -> dict[str, torch.Tensor]:
    "Return the weights in the last checkpoint of each training."
    found = {}
    for checkpoints in sorted(folder.rglob('checkpoints')):
        last = sorted(checkpoints.glob('*.ckpt'))[-1]
        weights = read_state(last)[0]['model']
        found |= {f'{checkpoints.parent.name}: {name}': t for name, t in weights.items()}
    return found


def check_same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert weights and weights.keys() == others.keys()
    assert [name for name, t in weights.items() if not torch.equal(t, others[name])] == []


def test_images_resume_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, 'SETTINGS', images.SETTINGS[1:6:2])  # one of each kind
    whole = run(lambda: images.main(options(tmp_path / 'whole')))
    assert len(figures(whole)) == len(images.SETTINGS) + 3
    for name in ('loss.png', 'confusion.png', 'top_losses.png'):
        assert (tmp_path / 'whole' / name).stat().st_size > 5000

    def die() -> None:
        with killed_at(images.Augment, 'before_batch', 60):  # in the last but one setting
            images.main(options(tmp_path / 'cut'))

    def resume() -> None:
        with mock.patch.object(images, 'write_results'):
            images.main(options(tmp_path / 'cut', '--resume'))

    assert len(figures(run(die, -signal.SIGKILL))) == len(images.SETTINGS) - 2
    assert figures(run(resume)) == figures(whole)
    check_same(all_weights(tmp_path / 'whole'), all_weights(tmp_path / 'cut'))


def run_two(main: Callable[[Sequence[str]], None], folder: Path, *others: str) -> str:
    "Run a script in two processes, of which the first prints; return its output."

    def job(rank: int) -> None:
        warnings.simplefilter('default')  # of libraries
        main(options(folder, *others))

    with started_ranks(job) as children:
        for child in children:
            if child.wait(600):
                raise child.error(f'ended with {child.code}')
        assert children[1].stdout == ''
        return children[0].stdout


@pytest.mark.dist
def test_images_in_two_processes(tmp_path: Path) -> None:
    output = figures(run_two(images.main, tmp_path))
    assert len(output) == len(images.SETTINGS) + 3
    # all trainings have ended: nothing is left to train, and the figures are the same
    assert figures(run_two(images.main, tmp_path, '--resume')) == output


@pytest.mark.full
def test_text_resumes_after_a_kill(text: Any, tmp_path: Path) -> None:
    whole = run(lambda: text.main(options(tmp_path / 'whole')))
    assert len(figures(whole)) == 4

    def die() -> None:
        # in the last epoch of the second BERT
        with killed_at(text.SaveModelCallback, 'after_epoch', 4):
            text.main(options(tmp_path / 'cut'))

    run(die, -signal.SIGKILL)
    resumed = run(lambda: text.main(options(tmp_path / 'cut', '--resume')))
    assert figures(resumed) == figures(whole)
    check_same(all_weights(tmp_path / 'whole'), all_weights(tmp_path / 'cut'))
