"""Text and HTML of objects: no errors, no drawn batch, no wait for a device."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

from torch import nn

from learnkit import Callback, Learner
from learnkit.testing import synth_learner


class Rows(HTMLParser):
    "Collects the cells of tables by row, and checks that every tag is closed."

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == 'br':
            return
        self.open.append(tag)
        if tag == 'tr':
            self.rows.append([])
        if tag in ('th', 'td'):
            self.rows[-1].append('')

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if 'td' in self.open or 'th' in self.open:
            self.rows[-1][-1] += data


def html_of(o: Any) -> str:
    html = o._repr_html_()
    assert isinstance(html, str)
    return html


def rows_of(o: Any) -> list[list[str]]:
    return Rows(html_of(o)).rows


def test_the_html_of_a_learner_shows_its_parts_and_progress() -> None:
    learn = synth_learner(lr=0.25, cbs=Callback(before_fit=print), metrics=nn.L1Loss())
    rows = dict(rows_of(learn))
    assert rows['model'] == 'RegModel, 2 parameters, on cpu'
    found = rows['data']
    assert found == 'train: TensorLoader, 10 batches of 16valid: TensorLoader, 2 batches of 16'
    assert rows['loss'] == 'MSELoss'
    assert rows['optimizer'] == 'SGD, lr 0.25, not made yet'
    # as they run
    found = rows['callbacks']
    assert found == 'TrainEvalCallbackCallback(before_fit=print)RecorderProgressCallback'
    assert rows['trained'] == 'not yet' and rows['last epoch'] == 'none'

    learn.model.a.requires_grad_(False)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)
    rows = dict(rows_of(learn))
    assert rows['model'] == 'RegModel, 2 parameters, 1 of them trained, on cpu'
    assert rows['optimizer'] == f'SGD ({type(learn.opt.optimizers[""]).__name__}), lr 0.25'
    assert re.fullmatch(
        r'2 epochs, 20 batches, 20 optimizer steps, 320 samples in [\d.]+ seconds', rows['trained']
    )
    last = learn.history[-1]
    assert rows['last epoch'].startswith(
        f'epoch 1, train_loss {last["train_loss"]:.6f}, valid_loss'
    )


class Hostile(nn.Module):
    "A model whose `__repr__` and attributes raise."

    def __repr__(self) -> str:
        raise RuntimeError

    def _repr_html_(self) -> str:
        raise RuntimeError

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        raise RuntimeError


def test_a_look_never_raises() -> None:
    class Shy(Callback):
        def __repr__(self) -> str:
            raise RuntimeError

    learn = synth_learner(cbs=Shy())
    learn.model, learn.opt, learn.loss_func, learn._metrics = Hostile(), object(), None, [object()]
    rows = dict(rows_of(learn))
    assert rows['model'] == rows['callbacks'] == '(not known: RuntimeError)'
    assert rows['optimizer'] == rows['metrics'] == '(not known: AttributeError)'
    assert repr(learn) == (
        "Learner(Hostile, loss_func=None, valid=['valid'], cbs=[(not known: RuntimeError)])"
    )
    half = Learner.__new__(Learner)  # as in a traceback of the constructor
    assert 'not known' in repr(half) and 'not known' in html_of(half)
