"""Results of the learning rate finder: rates, losses, suggestions, plots."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from learnkit import Callback, Recorder
from learnkit.callbacks.lr_finder import LRFinder, minimum, valley
from learnkit.core.errors import LossError, MetricError, OptimizerError, ScheduleError
from tests.helpers.learners import quiet_synth_learner


def test_rates_grow_by_equal_factors_until_the_loss_diverges() -> None:
    learn = quiet_synth_learner()
    learn.lr_find(num_it=100, show_plot=False)
    search = learn.lr_search
    expected = [1e-7 * 1e8 ** (i / 100) for i in range(len(search.lrs))]
    np.testing.assert_allclose(search.lrs, expected, rtol=1e-12)
    least = np.minimum.accumulate(search.losses)
    assert len(search.lrs) < 100
    assert (search.losses > 4 * least).tolist() == [False] * (len(search.lrs) - 1) + [True]

    learn.lr_find(1e-5, 1e-4, num_it=23, stop_div=False, show_plot=False)
    expected = [1e-5 * 10 ** (i / 23) for i in range(23)]
    np.testing.assert_allclose(learn.lr_search.lrs, expected, rtol=1e-12)
    learn.lr_find(num_it=2, show_plot=False)
    assert len(learn.lr_search.lrs) == 6  # at least


def test_a_loss_that_is_not_finite_ends_the_search() -> None:
    def spoil(cb: Any) -> None:
        if cb.train_iter == at:
            cb.learn.loss = cb.learn.loss * float('nan')
            cb.learn.loss_grad = cb.learn.loss_grad * 1

    at = 40
    learn = quiet_synth_learner(cbs=Callback(after_loss=spoil))
    (rate,) = learn.lr_find(stop_div=False, show_plot=False)
    search = learn.lr_search
    assert len(search.losses) == 40 and np.isfinite(search.losses).all()
    lrs, losses = (torch.tensor(v, dtype=torch.float64)[10:40] for v in (search.lrs, search.losses))
    assert rate == valley(lrs, losses, 100)[0]
    at = 0
    with pytest.raises(LossError, match='not finite from the beginning'):
        learn.lr_find()
    assert learn.opt is None


def test_as_a_callback_of_fit() -> None:
    learn = quiet_synth_learner(metrics=nn.functional.mse_loss)
    learn.create_opt()
    before = (
        [p.clone() for p in learn.model.parameters()],
        torch.get_rng_state(),
        learn.dls.train.generator.get_state(),
    )
    learn.fit(20, cbs=LRFinder(num_it=55, stop_div=False))
    # no validation; the sixth epoch was cut short
    assert [len(v) for v in learn.recorder.values] == [1] * 5
    assert len(learn.recorder.lrs) == learn.train_iter == 55
    assert learn.lr_search.lrs == learn.recorder.lrs
    assert learn.lr_search.losses == learn.recorder.smooth_loss.smooth
    after = (
        list(learn.model.parameters()),
        torch.get_rng_state(),
        learn.dls.train.generator.get_state(),
    )
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert torch.equal(after[1], before[1]) and torch.equal(after[2], before[2])
    assert not learn.opt.state and learn.opt.hypers[0]['lr'] == learn.lr
    learn.fit(1)
    assert len(learn.recorder.values[-1]) == 3  # evaluation is back


def test_groups_may_have_their_own_rates() -> None:
    learn = quiet_synth_learner(splitter=lambda m: [[m.a], [m.b]])
    seen: list[Any] = []
    learn.add_cb(Callback(before_step=lambda cb: seen.append([h['lr'] for h in cb.opt.hypers])))
    learn.lr_find([1e-5, 1e-4], [1e-3, 1e-2], num_it=10, show_plot=False)
    expected = [[1e-5 * 100 ** (i / 10), 1e-4 * 100 ** (i / 10)] for i in range(10)]
    np.testing.assert_allclose(seen, expected, rtol=1e-12)
    with pytest.raises(OptimizerError, match='3 values for 2 param groups'):
        learn.lr_find([1e-3] * 3, [1.0] * 3)


def test_without_a_recorder_and_without_a_length() -> None:
    def stream() -> Any:
        for _ in range(4):
            yield torch.ones(2, 1), torch.ones(2, 1)

    class Endless:
        def __iter__(self) -> Any:
            return stream()

    learn = quiet_synth_learner(dls=(Endless(), None))
    learn.remove_cb(Recorder)
    assert 0 < learn.lr_find(num_it=10, show_plot=False).valley < 10
    assert len(learn.lr_search.lrs) == 10


def test_bad_input_is_reported_before_anything_happens() -> None:
    learn = quiet_synth_learner()
    for start, end in ((1.0, 1e-3), (0, 1), (-1, 1), (1, float('inf')), ([1e-3, 1e-2], 1)):
        with pytest.raises(ScheduleError, match='0 < start_lr < end_lr'):
            learn.lr_find(start, end)
    assert learn.opt is None and learn.lr_search is None
    with pytest.raises(MetricError, match='lr_find'):
        learn.recorder.plot_lr_find()


def test_plots() -> None:
    plt: Any = pytest.importorskip('matplotlib.pyplot')
    learn = quiet_synth_learner()
    learn.lr_find(num_it=40, show_plot=False)
    assert not plt.get_fignums()
    rates = learn.lr_find(num_it=40, suggest_funcs=(valley, minimum))
    ax = plt.gcf().axes[0]
    expected = [f'{n} {r:.2e}' for n, r in rates._asdict().items()]
    assert [t.get_text() for t in ax.get_legend().texts] == expected
    # the minimum's rate is a tenth of its point's
    (dotted,) = (line for line in ax.lines if line.get_linestyle() == ':')
    assert (
        dotted.get_xdata()[0]
        == rates.minimum
        == pytest.approx(learn.lr_search.points['minimum'][0] / 10)
    )
    assert ax.get_xscale() == 'log'
    assert [t.get_text().split()[0] for t in ax.get_legend().texts] == ['valley', 'minimum']
    assert list(ax.lines[0].get_xdata()) == learn.lr_search.lrs[:-5]
    mine = plt.subplots()[1]
    assert (
        learn.recorder.plot_lr_find(skip_end=0, suggestions=[(1e-3, 1.0)], nms=['here'], ax=mine)
        is mine
    )
    assert list(mine.lines[0].get_ydata()) == learn.lr_search.losses
    assert mine.lines[1].get_xdata()[0] == 1e-3
    learn.lr_find(num_it=40, ax=mine)
    assert len(plt.get_fignums()) == 2
