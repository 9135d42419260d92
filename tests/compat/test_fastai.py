"""learnkit does what fastai does: recorded from fastai, and live where fastai is installed."""

import gzip
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import compat_plans as plans, compat_run as c

RECORDED = json.loads(
    gzip.decompress(Path(__file__).with_name('fastai_traces.json.gz').read_bytes())
)
PARTS = 8
DIFFERS = {  # case: what learnkit does instead
    'batches_without_targets_in_training': 'a training batch without targets is an error',
    'short_epochs': 'the last batch of a short epoch is recorded and measured like the others; fastai leaves it out',
    'run_is_on_after_events_by_hand': '`run` comes back on at the end of a run, not after events by hand',
}
CASES = [
    pytest.param(name, marks=pytest.mark.xfail(reason=DIFFERS[name])) if name in DIFFERS else name
    for name in RECORDED['cases']
]


def as_json(o: Any) -> Any:
    return json.loads(json.dumps(o))


@pytest.mark.parametrize(
    'part', [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, PARTS))]
)
def test_events_counters_and_weights_are_the_recorded_ones(part: int) -> None:
    for plan, expected in RECORDED['plans'][part::PARTS]:
        assert not c.differences(expected, as_json(c.outcome(plan, plans.learnkit_names()))), (
            json.dumps(plan)
        )


@pytest.mark.filterwarnings('ignore:monitor=')  # fastai takes any name without a word
@pytest.mark.parametrize('name', CASES)
def test_a_callback_written_for_fastai_gives_the_recorded_result(name: str) -> None:
    assert c.same(RECORDED['cases'][name], as_json(c.style_cases('learnkit')[name]())), name


def compare_live(seeds: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        pytest.importorskip('fastai.learner')
        fastai, learnkit = plans.fastai_names(), plans.learnkit_names()
        for plan in map(plans.random_plan, seeds):
            a, b = c.run_plan(plan, fastai), c.run_plan(plan, learnkit)
            different = next(
                ((x, y) for x, y in zip(a.trace, b.trace, strict=False) if x != y), None
            )
            assert different is None and len(a.trace) == len(b.trace), json.dumps(plan)
            assert c.same(a.losses, b.losses, 1e-12) and c.same(a.weights, b.weights, 1e-12), (
                json.dumps(plan)
            )
            if c.rows_comparable(plan):
                assert c.same(a.recorded, b.recorded, 2e-6), json.dumps(plan)


def test_random_plans_agree_with_fastai_itself() -> None:
    compare_live(range(100_000, 100_040))


@pytest.mark.full
def test_thousands_of_fresh_plans_agree_with_fastai_itself() -> None:
    start = random.SystemRandom().randrange(10**9)
    compare_live(range(start, start + 3000))


def test_the_recording_is_up_to_date_with_the_cases() -> None:
    assert set(RECORDED['cases']) == set(c.style_cases('learnkit'))


def test_events_fired_around_an_evaluation_by_hand_have_fastais_names() -> None:
    from learnkit.learner import _after_epoch, _before_epoch
    from learnkit.testing import synth_learner

    learn = synth_learner()
    learn.remove_cb(learn.progress)
    learn(_before_epoch)
    learn._do_epoch_validate()
    learn(_after_epoch)
    assert learn.recorder.measured['valid_loss'] == learn.validate()[0]
