"""A sample of the sweeps by claim, with what torch itself has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from learnkit.core.errors import OptionError
from learnkit.core.validation import warn_user
from tests.helpers.libraries import skip_if_absent
from tests.sweeps import (
    log_writers,
    losses,
    metric_claims,
    metrics,
    module_claims,
    modules,
    optimizer_claims,
    optimizers,
    schedules,
    step_time,
)
from tests.sweeps.claims import (
    EQUAL,
    NAMED,
    WRONG,
    Claim,
    Inapplicable,
    NothingToTry,
    by_hand,
    count_claims,
    judge_claim,
    make_claims_table,
)
from tests.sweeps.verdicts import Subject, Verdict

MODULES = {'scikit-learn': 'sklearn'}  # by name of the distribution


def find_subject(load: Callable[[str], list[Subject]], library: str, title: str) -> Subject:
    skip_if_absent(MODULES.get(library, library))
    [subject] = [subject for subject in load(library) if subject.title == title]
    return subject


SAMPLE = [
    ('optimizers', 'torch', 'Adam', 'trains'),
    ('optimizers', 'torch', 'NAdam', 'groups'),
    ('optimizers', 'torch', 'LBFGS', 'clipping'),
    ('optimizers', 'torch', 'RMSprop', 'kill and resume'),
    ('optimizers', 'torch', 'AdamW', 'load'),
    ('losses', 'torch', 'CrossEntropyLoss(weight)', 'mean over unequal batches'),
    ('losses', 'torch', 'MSELoss', 'accumulation'),
    ('schedules', 'torch', 'StepLR', 'skipped steps'),
    ('schedules', 'torch', 'OneCycleLR', 'by epoch'),
    ('metrics', 'torchmetrics', 'BinaryAUROC', 'kill and resume'),
    ('metrics', 'torchmetrics', 'CharErrorRate', 'reset'),
    ('metrics', 'scikit-learn', 'f1_score', 'unequal batches'),
    ('metrics', 'scikit-learn', 'matthews_corrcoef', 'one class'),
    ('loggers', '', 'CSVLogger', 'kill and resume'),
    ('loggers', '', 'JSONLinesLogger', 'NaN and infinity'),
    ('modules', 'torch', 'LSTM(dropout)', 'trains'),
    ('modules', 'torch', 'BatchNorm2d', 'activation checkpointing'),
    ('modules', 'torch', 'Embedding', 'freezing'),
    ('modules', 'torch', 'spectral_norm', 'kill and resume'),
]
TABLES: dict[str, tuple[Callable[[str], list[Subject]], dict[str, Claim]]] = {
    'optimizers': (optimizers.load_optimizers, optimizer_claims.CLAIMS),
    'losses': (losses.load_losses, losses.CLAIMS),
    'schedules': (schedules.load_schedules, schedules.CLAIMS),
    'metrics': (metrics.load_metrics, metric_claims.CLAIMS),
    'loggers': (log_writers.load_loggers, log_writers.CLAIMS),
    'modules': (modules.load_modules, module_claims.CLAIMS),
}


@pytest.mark.parametrize(('family', 'library', 'title', 'claim'), SAMPLE)
def test_a_sample_is_equal(
    family: str, library: str, title: str, claim: str, tmp_path: Path
) -> None:
    load, claims = TABLES[family]
    subject = find_subject(load, library, title)
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
    with pytest.raises(NothingToTry):
        judge_claim(lambda: fail(NothingToTry()))
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
        '3 things, 1 library: 2 equal in every claim. Of 6 verdicts: 4 equal, 2 WRONG.'
    )


def test_step_times_leave_out_the_first_batches() -> None:
    slow = [float(i) for i in range(step_time.N_WARM_UP + 1)]
    assert step_time.median_step([*slow, *(slow[-1] + 0.25 * i for i in (1, 2, 3))]) == 0.25


def test_step_times_by_library() -> None:
    rows = [('a', '1.000'), ('b', '1.500'), ('c', '1.100')]
    verdicts = [Verdict('lib', '1.2', name, step_time.MEASURED, note) for name, note in rows]
    verdicts.append(Verdict('lib', '1.2', 'd', step_time.FAILED, 'TypeError: no'))
    counts, table = step_time.describe(verdicts)
    assert counts.startswith('3 optimizers, 1 library: 1.10 of') and '1 above 1.3' in counts
    assert table.splitlines()[-1] == '| lib 1.2 | 3 | 1.10 | 1.50, b |'
