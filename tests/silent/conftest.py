"""The fixture `row`: what a test of a silent wrong number reports for the table of `python -m tests.silent`."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def row(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[..., None]:
    "Return a function that reports a number as it was, as it is, and as an independent computation gives it."
    marker = request.node.get_closest_marker('silent')
    assert marker is not None and marker.args, (
        'mark the test: @pytest.mark.silent("what the row is about")'
    )

    def report(was: object, now: object, independent: object) -> None:
        cells = [shown(value) for value in (was, now, independent)]
        record_property('silent', [marker.args[0], *cells])

    return report


def shown(value: object) -> str:
    "Return a number with six significant digits, and anything else as a string."
    return f'{value:.6g}' if isinstance(value, float) else str(value)
