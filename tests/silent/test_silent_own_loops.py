"""What a loop of two networks once computed in another way than it said, without a word."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Callback, GradientAccumulation, GradientClip, MixedPrecision
from tests.helpers.own_loops import (
    Bare,
    fit,
    make_classifier_learner,
    make_duel,
    train_by_hand,
    weights,
)


@pytest.mark.silent(
    'bf16 in a loop of two networks: largest distance of weights to autocast by hand'
)
def test_half_precision(row: Any) -> None:
    learn = fit(make_duel(MixedPrecision('bf16'), dtype=torch.float32, n=16))
    distance = (
        (weights(learn.model) - weights(train_by_hand(16, torch.float32, half=True)))
        .abs()
        .max()
        .item()
    )
    row(was=0.00300, now=distance, independent=0.0)
    assert distance == 0


@pytest.mark.silent(
    'GradientAccumulation(8) in a loop of two networks, 8 batches of 4: steps of critic, generator'
)
def test_steps_of_each_network(row: Any) -> None:
    steps = {'critic': 0, 'generator': 0}

    def count(cb: Any) -> None:
        steps[cb.turn] += 1

    fit(make_duel(GradientAccumulation(8), Callback(after_step=count), n=8))
    due = 8 * 4 // 8
    row(was='7, 1', now=', '.join(map(str, steps.values())), independent=f'{due}, {due}')
    assert set(steps.values()) == {due}


@pytest.mark.silent(
    'GradientClip in a loop of two networks: largest distance of weights to clipping what steps'
)
def test_clipping(row: Any) -> None:
    learn = fit(make_duel(GradientClip(0.01), n=16))
    expected = weights(
        train_by_hand(16, before_step=lambda params: nn.utils.clip_grad_norm_(params, 0.01))
    )
    distance = (weights(learn.model) - expected).abs().max().item()
    row(was=0.00519, now=distance, independent=0.0)
    assert distance == 0


@pytest.mark.silent(
    'before_pred, after_pred, after_loss in a loop of two networks, 6 batches: how often they fire'
)
def test_events(row: Any) -> None:
    seen: list[str] = []
    names = ('before_pred', 'after_pred', 'after_loss')
    fit(make_duel(Callback(**{name: lambda cb, name=name: seen.append(name) for name in names})))
    now = ', '.join(str(seen.count(name)) for name in names)
    row(was='0, 0, 0', now=now, independent='24, 24, 12')  # four passes and two losses a batch
    assert now == '24, 24, 12'


@pytest.mark.silent(
    'callbacks that cannot act in a loop which calls model and backward itself: how many are named'
)
def test_what_cannot_act_is_named(row: Any) -> None:
    cbs = [MixedPrecision('bf16'), GradientAccumulation(8), GradientClip()]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        fit(make_classifier_learner(Bare, *cbs))
    messages = ' '.join(str(w.message) for w in warned)
    now = sum(type(cb).__name__ in messages for cb in cbs)
    row(was=0, now=now, independent=3)
    assert now == 3
