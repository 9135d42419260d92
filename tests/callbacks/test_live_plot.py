"""The live plot of the losses; `tests/learner/test_learner_jupyter.py` tests it in a real kernel."""

import base64
import io
from typing import Any

import pytest
import torch

from learnkit import ShowGraph
from learnkit.callbacks import live_plot as graph
from learnkit.testing import synth_learner
from tests.helpers.libraries import require

plt = require('matplotlib.pyplot')


class Outputs:
    "An output area that records what is displayed."

    def __init__(self) -> None:
        self.handle, self.shown = None, list[dict[str, Any]]()

    def show(self, data: dict[str, Any]) -> None:
        self.handle = self  # type: ignore[assignment]
        self.shown.append(data)


@pytest.fixture
def areas(monkeypatch: pytest.MonkeyPatch) -> list[Outputs]:
    "Draw as in a notebook, and return the output areas."
    made: list[Outputs] = []

    def make() -> Outputs:
        made.append(Outputs())
        return made[-1]

    monkeypatch.setattr(graph, 'in_notebook', lambda: True)
    monkeypatch.setattr(graph, 'DisplayHandle', make)
    return made


def test_outside_of_a_notebook_a_message_names_the_alternative_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    learn = synth_learner(cbs=ShowGraph())
    with learn.no_logging():
        learn.fit(1)
        learn.fit(1)
    assert capsys.readouterr().out.count('learn.recorder.plot_loss()') == 1


def test_validation_losses_match_every_evaluation() -> None:
    learn = synth_learner(n_train=10, cbs=ShowGraph(), eval_every='4ba')
    with learn.no_logging():
        learn.fit(2)
    expected = [[e['ba'], e['valid_loss']] for e in learn.recorder.evaluations]
    assert [step for step, _ in expected] == [4, 8, 12, 16, 20]
    assert learn.show_graph.valid_losses == {'valid': expected}
    with learn.no_logging():
        learn.fit(1)  # another fit starts from zero
    assert [step for step, _ in learn.show_graph.valid_losses['valid']] == [4, 8, 10]


def test_a_picture_is_shown_once_it_is_over_and_no_figure_is_left(areas: list[Outputs]) -> None:
    before = plt.get_fignums()
    learn = synth_learner(cbs=ShowGraph())
    with learn.no_logging():
        learn.fit(2)
        learn.validate()
        learn.get_preds()
        learn.fit(0)
    [shown], [] = (area.shown for area in areas)
    image = plt.imread(io.BytesIO(base64.b64decode(shown['image/png'])))
    assert image.min() < image.max()
    assert shown['text/plain'] == 'losses of 20 steps'
    assert plt.get_fignums() == before and learn.show_graph._graph is None


def test_what_was_trained_before_an_error_is_drawn(areas: list[Outputs]) -> None:
    learn = synth_learner(cbs=ShowGraph())

    def stop(cb: Any) -> None:
        if cb.iter == 7:
            raise KeyboardInterrupt

    with learn.no_logging(), pytest.raises(KeyboardInterrupt):
        learn.fit(1, cbs=graph.Callback(after_batch=stop))
    assert [d['text/plain'] for d in areas[0].shown] == ['losses of 7 steps']


def test_no_bar_means_no_graph(areas: list[Outputs]) -> None:
    learn = synth_learner(cbs=ShowGraph())
    with learn.no_bar():
        learn.fit(1)
    assert areas == [] and ShowGraph in map(type, learn.cbs)


def test_the_bar_draws_what_fastais_graph_sends_it(areas: list[Outputs]) -> None:
    learn = synth_learner()
    bar = learn.progress.mbar
    for n in (1, 2):
        steps = [10 * i for i in range(1, n + 1)]
        losses = [torch.tensor(3.0 / i) for i in range(1, 10 * n + 1)]
        bar.update_graph([(range(len(losses)), losses), (steps, [2.0] * n)], (0, 20), (0, 3.0))
    (area,) = areas
    texts = [shown['text/plain'] for shown in area.shown]
    assert texts == ['losses of 10 steps', 'losses of 20 steps']
