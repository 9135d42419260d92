"""Plots of the Recorder and of the timings: the numbers in their artists."""

from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Callback, DataLoaders, Learner, StepTimeMonitor, accuracy, mae
from learnkit.core.errors import MetricError
from learnkit.core.plotting import COLORS
from learnkit.testing import synth_learner
from tests.helpers.libraries import require

plt = require('matplotlib.pyplot')


def learner(**kwargs: Any) -> Learner:
    x = torch.randn(40, 3)
    valid = {'day': (x[:10], x[:10].argmax(1)), 'night': (x[10:20], x[10:20].argmax(1))}
    dls = DataLoaders.from_tensors((x, x.argmax(1)), kwargs.pop('valid', valid), bs=10)
    learn = Learner(dls, nn.Linear(3, 3), nn.CrossEntropyLoss(), lr=0.1, metrics=accuracy, **kwargs)
    learn.recorder.train_metrics = True
    return learn


def fit(learn: Learner, *args: Any, **kwargs: Any) -> None:
    with learn.no_bar(), learn.no_logging():
        learn.fit(*args, **kwargs)


def drawn(ax: Any) -> dict[str, tuple[list[float], list[float]]]:
    "Return the points of each labeled line."
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in ax.get_lines()
        if not line.get_label().startswith('_')
    }


def column(learn: Learner, name: str) -> list[Any]:
    return [row[name] for row in learn.history]


# ------------------------------------------------------------------------------------- plot_metrics


def test_a_panel_for_each_metric_with_a_line_for_each_place() -> None:
    learn = learner()
    fit(learn, 3)
    axs = learn.recorder.plot_metrics()
    assert [ax.get_ylabel() for ax in axs] == ['loss', 'accuracy'] and len(plt.get_fignums()) == 1
    for ax, metric in zip(axs, ('loss', 'accuracy'), strict=True):
        names = {'train': f'train_{metric}', 'day': f'day/{metric}', 'night': f'night/{metric}'}
        expected = {where: ([0, 1, 2], column(learn, name)) for where, name in names.items()}
        assert drawn(ax) == expected
        assert [t.get_text() for t in ax.get_legend().get_texts()] == ['train', 'day', 'night']
        assert [line.get_color() for line in ax.get_lines()] == list(COLORS[:3])
        assert ax.get_xlabel() == 'epoch'
    assert repr(axs) == '<2 axes>' and axs.figure is axs[1].figure


def test_all_fits_are_drawn_and_marked_where_they_begin() -> None:
    learn = learner(valid=None)
    fit(learn, 2)
    fit(learn, 1)
    fit(learn, 5, start_epoch=4)
    ax, _ = learn.recorder.plot_metrics()
    assert drawn(ax) == {'train': ([0, 1, 2, 3], column(learn, 'train_loss'))}
    assert [line.get_xdata()[0] for line in ax.get_lines()[1:]] == [1.5, 2.5]
    assert ax.get_xlabel() == 'epoch (of all fits)' and ax.get_legend() is None


def test_names_choose_the_panels() -> None:
    learn = learner(cbs=[Callback(after_epoch=lambda cb: cb.learn.log('norm', 3.0 + cb.epoch))])
    fit(learn, 2)
    expected = ['accuracy', 'norm']
    assert [ax.get_ylabel() for ax in learn.recorder.plot_metrics(['accuracy', 'norm'])] == expected
    (only,) = learn.recorder.plot_metrics('night/accuracy')
    assert drawn(only) == {'night': ([0, 1], column(learn, 'night/accuracy'))}


def test_columns_that_are_not_printed_are_drawn_when_they_are_named() -> None:
    cbs = Callback(after_step=lambda cb: cb.learn.log('hidden', 1.0, shown=False))
    learn = synth_learner(cbs=cbs)
    fit(learn, 1)
    assert [ax.get_ylabel() for ax in learn.recorder.plot_metrics()] == ['loss']
    (ax,) = learn.recorder.plot_metrics('hidden')
    assert drawn(ax) == {'valid': ([0], [1.0])}


def test_what_is_missing_is_named() -> None:
    learn = synth_learner(metrics=mae)
    for draw in (learn.recorder.plot_metrics, learn.recorder.plot_loss, learn.recorder.plot_sched):
        with pytest.raises(MetricError, match=r'call `learn\.fit\(1\)` first'):
            draw()
    fit(learn, 1)
    with pytest.raises(MetricError, match=r'maee .*`mae`\?'):
        learn.recorder.plot_metrics('maee')
    assert not plt.get_fignums()


# --------------------------------------------------------------------------------------- the others


def test_a_fit_shorter_than_what_is_skipped_is_drawn_whole() -> None:
    learn = synth_learner(n_train=3)
    fit(learn, 1)
    train, valid = drawn(learn.recorder.plot_loss()).values()
    assert train == ([0, 1, 2], learn.recorder.smooth_loss.smooth) and valid[0] == [3]


def test_timings_are_bars_with_their_unit_and_share() -> None:
    learn = synth_learner(cbs=StepTimeMonitor())
    fit(learn, 1)
    learn.timings._sums.clear()
    learn.timings._sums.update({'data': 0.03, 'forward': 0.06, 'Recorder': 0.008, 'loop': 0.002})
    learn.timings.n = 2
    mine = plt.subplots()[1]
    assert learn.timings.plot(ax=mine) is mine
    assert sorted(bar.get_width() for bar in mine.patches) == pytest.approx([1, 4, 15, 30])
    expected = {'30 ms, 60.0%', '15 ms, 30.0%', '4 ms, 8.0%', '1 ms, 2.0%'}
    assert {t.get_text() for t in mine.texts} == expected
    assert [t.get_text() for t in mine.get_yticklabels()] == ['forward', 'data', 'Recorder', 'loop']
    assert mine.yaxis_inverted() and mine.get_xlabel() == 'ms a step'
    assert mine.get_title() == 'a step takes 50 ms (2 measured)'


def lines_at(ax: Any) -> list[float]:
    "Return the positions of the dashed vertical lines."
    return [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == '--']


def test_changes_of_a_paused_fit_are_marked() -> None:
    learn = synth_learner(n_train=10)
    with learn.no_logging(), learn.no_bar():
        learn.fit(1, pause_at='4ba')
        learn.resume(lr=0.5)
        learn.fit(2, pause_at='22ba')
        learn.loss_func = torch.nn.L1Loss()
        learn.resume(lr_scale=0.5, pause_at='26ba')
        learn.resume(lr_scale=0.5)
    recorder = learn.recorder
    ax = recorder.plot_loss()
    assert lines_at(ax) == [12, 16]
    lr = float(learn.lr)
    assert [t.get_text() for t in ax.texts] == [
        f'lr {lr:g} -> {lr / 2:g}\nloss MSELoss -> L1Loss',
        f'lr {lr / 2:g} -> {lr / 4:g}',
    ]
    assert all(lines_at(ax) == [12, 16] for ax in recorder.plot_sched())
    (ax,) = recorder.plot_metrics()
    assert lines_at(ax)[-2:] == [-0.5, 1.5]
