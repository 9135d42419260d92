"""Times and timestamps of Composer compare and combine as they do there."""

import pytest

from learnkit.core.errors import TimeError
from learnkit.interop.composer.time import ComposerTime, ComposerTimestamp, TimeUnit


def test_times_compare_and_combine_as_in_composer() -> None:
    t = ComposerTime(7, 'ba')
    assert t == 7 == int(t)
    assert t == '7ba'
    assert t > 6
    assert t <= '7ba'
    assert t != ComposerTime(8, TimeUnit.BATCH)
    assert (t - '9ba').value == -2
    assert (t + 2).value == 9
    assert (t / '14ba').value == 0.5
    assert (t % 2).value == 1
    assert str(t) == '7ba'
    with pytest.raises(TimeError, match='different units'):
        _ = t < '1ep'
    now = ComposerTimestamp(epoch=1, batch=7)
    assert now < '8ba' and now >= ComposerTime(1, 'ep') and now == '7ba' and now.get('ba') == t
    assert now == ComposerTimestamp(epoch=1, batch=7) != ComposerTimestamp(epoch=2, batch=7)
    with pytest.raises(TimeError, match='get_elapsed_duration'):
        now.get('dur')
