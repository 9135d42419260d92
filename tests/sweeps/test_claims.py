"""A sample of the sweeps by claim, with what torch itself has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from learnkit.core.errors import OptionError
from learnkit.core.validation import warn_user
from tests.sweeps import losses, optimizer_claims, optimizers, schedules
from tests.sweeps.claims import (
    EQUAL,
    NAMED,
    WRONG,
    Claim,
    Inapplicable,
    by_hand,
    count_claims,
    judge_claim,
    make_claims_table,
)
from tests.sweeps.verdicts import Subject, Verdict


def find_subject(load: Callable[[str], list[Subject]], title: str) -> Subject:
    [subject] = [subject for subject in load('torch') if subject.title == title]
    return subject


SAMPLE = [
    (optimizers.load_optimizers, optimizer_claims.CLAIMS, 'Adam', 'trains'),
    (optimizers.load_optimizers, optimizer_claims.CLAIMS, 'NAdam', 'groups'),
    (optimizers.load_optimizers, optimizer_claims.CLAIMS, 'LBFGS', 'clipping'),
    (optimizers.load_optimizers, optimizer_claims.CLAIMS, 'RMSprop', 'kill and resume'),
    (losses.load_losses, losses.CLAIMS, 'CrossEntropyLoss(weight)', 'mean over unequal batches'),
    (losses.load_losses, losses.CLAIMS, 'MSELoss', 'accumulation'),
    (schedules.load_schedules, schedules.CLAIMS, 'StepLR', 'skipped steps'),
    (schedules.load_schedules, schedules.CLAIMS, 'OneCycleLR', 'by epoch'),
]


@pytest.mark.parametrize(('load', 'claims', 'title', 'claim'), SAMPLE)
def test_a_sample_is_equal(
    load: Any, claims: dict[str, Claim], title: str, claim: str, tmp_path: Path
) -> None:
    subject = find_subject(load, title)
    assert judge_claim(partial(claims[claim], subject, tmp_path)) == (EQUAL, '')


def fail(error: Exception) -> list[str]:
    raise error


def warn_and_differ() -> list[str]:
    warn_user('It differs. Another sentence.')
    return ['weights']


def test_verdict_of_a_claim() -> None:
    assert judge_claim(list) == (EQUAL, '')
    assert judge_claim(lambda: ['weights', 'rates']) == (WRONG, 'weights, rates')
    assert judge_claim(warn_and_differ) == (NAMED, 'a warning: It differs')
    assert judge_claim(lambda: fail(OptionError('no'))) == (NAMED, 'OptionError: no')
    assert judge_claim(lambda: fail(KeyError('k'))) == (WRONG, "KeyError: 'k'")
    assert judge_claim(lambda: by_hand(lambda: fail(KeyError('k')))) == (
        NAMED,
        "the loop by hand fails too: KeyError: 'k'",
    )
    with pytest.raises(Inapplicable):
        by_hand(lambda: fail(KeyError('k')))


def test_table_joins_equal_outcomes() -> None:
    def verdict(title: str, claim: str, kind: str = EQUAL, note: str = '') -> Verdict:
        return Verdict('lib', '1.2', title, kind, note, claim)

    verdicts = [
        verdict('a', 'trains'),
        verdict('a', 'load'),
        verdict('b', 'trains', WRONG, 'weights'),
        verdict('b', 'load', WRONG, 'weights'),
        verdict('c', 'trains'),
        verdict('c', 'load'),
    ]
    assert make_claims_table(verdicts, 'things').splitlines() == [
        '| library | things | verdict |',
        '|---|---|---|',
        '| lib 1.2 | a, c | equal |',
        '| lib 1.2 | b | trains, load WRONG: weights |',
    ]
    assert count_claims(verdicts, 'things') == (
        '3 things, 1 libraries: 2 equal in every claim. Of 6 verdicts: 4 equal, 2 WRONG.'
    )
