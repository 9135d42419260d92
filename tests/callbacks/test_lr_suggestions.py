"""Suggestions of a learning rate: fastai's values for the same curve, and their names."""

from typing import Any

import pytest
import torch

from learnkit.callbacks.lr_finder import SuggestionMethod, minimum, slide, steep, valley
from tests.helpers.learners import quiet_synth_learner


def curve() -> tuple[torch.Tensor, torch.Tensor]:
    "Return losses that fall, then rise, with ripples."
    i = torch.arange(60.0)
    ripples = 0.05 * torch.sin(i * 1.7)
    losses = 2 - 1.5 * torch.sigmoid((i - 30) / 4) + torch.exp((i - 55) / 3) * 0.3 + ripples
    return 1e-7 * 10 ** (8 * i / 60), losses


FASTAI = {  # what fastai 2.8 gives for this curve: the rate, and the point
    valley: (0.004641587380319834, (0.004641587380319834, 0.8438876867294312)),
    slide: (3.414549212266138e-07, (3.414549212266138e-07, 2.0224540315444717)),
    minimum: (0.018478508293628692, (0.18478508293628693, 0.49304527044296265)),
    steep: (0.001359355985186994, (0.001359355985186994, 1.1893163919448853)),
}


@pytest.mark.parametrize('f', FASTAI, ids=lambda f: f.__name__)
@pytest.mark.parametrize('as_type', [torch.Tensor, list])
def test_suggestions_match_fastai(f: Any, as_type: Any) -> None:
    lrs, losses = curve()
    lr, point = f(
        *(v if as_type is torch.Tensor else as_type(v.tolist()) for v in (lrs, losses)), 60
    )
    assert (lr, *point) == pytest.approx((FASTAI[f][0], *FASTAI[f][1]), rel=1e-6)
    assert getattr(SuggestionMethod, f.__name__.capitalize()) is f


def test_suggestions_come_by_name_in_the_order_asked_for() -> None:
    learn = quiet_synth_learner()
    rates = learn.lr_find(suggest_funcs=(minimum, steep, valley, slide), show_plot=False)
    assert rates._fields == ('minimum', 'steep', 'valley', 'slide')
    assert type(rates).__name__ == 'SuggestedLRs'
    lrs, losses = (
        torch.tensor(v, dtype=torch.float64)[10:-5]
        for v in (learn.lr_search.lrs, learn.lr_search.losses)
    )
    assert rates == tuple(f(lrs, losses, 100)[0] for f in (minimum, steep, valley, slide))
    assert learn.lr_search.points['valley'] == valley(lrs, losses, 100)[1]
    assert learn.lr_find(show_plot=False)._fields == ('valley',)
    assert learn.lr_find(suggest_funcs=None, show_plot=False) is None
