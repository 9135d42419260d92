"""The report of a run: the contents of its file, an unchanged run, and escaped names."""

import base64
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Callback, DataLoaders, Learner, OptionError, TensorLoader, accuracy
from learnkit.checkpoint.digest import differences
from learnkit.core.random import capture_rng
from tests.helpers.learners import quiet_learner
from tests.helpers.ranks import run_ranks

ALL = [
    'Run',
    'History',
    'Schedule',
    'Predictions',
    'Layers',
    'Settings',
    'Data and seeds',
    'Machine and versions',
]
BAD = '<script>alert(1)</script>'
NAMES = [BAD, '"><img src=x onerror=alert(1)>', 'a $x_{$ b \N{CJK UNIFIED IDEOGRAPH-732B}']


def images(bs: int = 8, **kwargs: Any) -> DataLoaders:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 1, 6, 6, generator=g), torch.randint(3, (40,), generator=g)
    train = TensorLoader(x[:24], y[:24], bs=bs, shuffle=True, seed=5)
    valid = TensorLoader(x[24:], y[24:], bs=bs, shuffle=True, seed=7)
    dls = DataLoaders(train, valid, device='cpu', **kwargs)
    dls.vocab = NAMES
    return dls


def classifier(path: Path, *cbs: Any) -> Learner:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 3))
    dls = images()
    return quiet_learner(
        dls, model, nn.CrossEntropyLoss(), metrics=accuracy, lr=0.1, path=path, cbs=cbs
    )


class Page(HTMLParser):
    "Collects tags with their attributes, and the text, like a browser."

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.words = ''
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += f'{data}\n'

    def named(self, tag: str) -> list[dict[str, Any]]:
        return [attrs for name, attrs in self.tags if name == tag]


def titles(text: str) -> list[str]:
    return re.findall(r'<h2>(.*?)</h2>', text)


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Learner, str, list[Any]]:
    "Return a trained classifier, its report, and its state before and after the report."
    pytest.importorskip('matplotlib')

    class Evil(Callback):
        def __repr__(self) -> str:
            return BAD

    path = tmp_path_factory.mktemp('run')
    learn = classifier(path, Evil(after_batch=lambda cb: cb.learn.log('<b>bold</b>', 1.0)))
    learn.fit_one_cycle(2, 0.1)
    states = []
    for _ in range(2):
        learn.get_preds()  # which clears the last evaluation, as the report does
        states.append([learn.checkpoint_state(), capture_rng(), learn.model.training])
        if len(states) == 1:
            assert learn.report('run') == path / 'run.html'
    assert [p.name for p in path.iterdir()] == ['run.html']
    return learn, (path / 'run.html').read_text('utf-8'), states


def test_the_file_has_all_parts_of_a_classification(run: Any) -> None:
    learn, text, _ = run
    page = Page(text)
    assert titles(text) == ALL
    images = page.named('img')
    pictures = [base64.b64decode(o['src'].partition(',')[2]) for o in images]
    assert [data[:8] for data in pictures] == [b'\x89PNG\r\n\x1a\n'] * 6
    assert [o['class'] for o in images] == ['plot'] * 5 + ['samples']
    assert not sys.modules['matplotlib.pyplot'].get_fignums()

    for row in learn.history:
        assert f'{row["train_loss"]:.6f}' in text and f'{row["accuracy"]:.6f}' in text
    preds, targs = learn.get_preds()
    right = int((preds.argmax(1) == targs).sum())
    assert f'{right} of 16 right' in page.words and f'{right / 16:.2%}' in page.words
    words = page.words.split('\n')
    parameters = str(36 * 3 + 3)
    for value in (parameters, torch.__version__, str(torch.initial_seed()), '5', '7', '24', '16'):
        assert value in words, value


def test_names_cannot_become_code(run: Any) -> None:
    page = Page(run[1])
    assert not page.named('script') and '<b>bold' not in run[1]
    assert all(set(o) == {'class', 'alt', 'src'} for o in page.named('img'))
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith('on')]
    for name in (BAD, '<b>bold</b>'):
        assert name in page.words
    assert "default-src 'none'" in page.named('meta')[1]['content']
    assert not re.findall(r'(?:src|href)="(?!data:)', run[1])


class Reporting(Callback):
    "Write a report between the forward and the backward pass, and at the end of an epoch."

    def after_loss(self) -> None:
        if self.training and self.train_iter == 2:
            self.learn.report('loss.html')

    def after_epoch(self) -> None:
        if self.epoch == 0:
            self.learn.report('epoch.html')


def test_a_fit_is_the_same_with_and_without_reports(tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')
    states = []
    for cbs in ([], [Reporting()]):
        learn = classifier(tmp_path, *cbs)
        learn.fit_one_cycle(2)
        states.append(learn.checkpoint_state())
        states[-1]['callbacks'].pop('reporting', None)
    differ = [d for d in differences(*states) if 'time' not in d and 'seconds' not in d]
    assert not differ, differ
    text = (tmp_path / 'loss.html').read_text('utf-8')
    assert titles(text) == ALL
    assert {p.name for p in tmp_path.iterdir()} == {'loss.html', 'epoch.html'}


@pytest.mark.dist
def test_rank_0_writes(tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')

    def job(rank: int) -> list[Any]:
        learn = classifier(tmp_path)
        with learn.distributed('ddp'):
            learn.fit(1)
            path = learn.report(f'{rank}.html')
            with pytest.raises(OptionError):
                learn.report('missing/a.html')
        return [path.name, path.exists()]

    assert run_ranks(job) == [['0.html', True], ['1.html', False]]
    text = (tmp_path / '0.html').read_text('utf-8')
    assert 'Left out' not in titles(text) and ' of 16 right' in text
