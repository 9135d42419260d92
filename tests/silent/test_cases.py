"""Each case that used to be wrong without a word, against its independent value."""

import warnings

import pytest

from tests.silent.cases import Case, is_equal, load_cases


@pytest.mark.parametrize('case', load_cases(), ids=lambda case: f'{case.part}: {case.title}')
def test_case(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # some cases are right and have a warning, which has a test
        new, independent = case.compute()
    assert is_equal(case, new, independent), f'{new} for {independent}'
