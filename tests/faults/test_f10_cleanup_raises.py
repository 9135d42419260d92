"""Row 10: `after_error`, `cleanup` or `close` raises too. The first error stays first; the others still clean up."""

import pytest

from learnkit import Callback, CancelError
from learnkit.core.errors import CancelFitException
from tests.faults.fault_helpers import (
    At,
    copy_without_notes,
    fits_like_fresh,
    is_clean,
    make_learner,
    notes,
    raised_by,
    start_again,
)


def ran(event: str, into: list[str], order: float = 80) -> Callback:
    cb = Callback(**{event: lambda cb: into.append(event)})
    cb.__dict__['order'] = order
    return cb


@pytest.mark.parametrize(
    'second',
    [KeyError('two'), SystemExit(3), CancelFitException('stray')],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize('event', ['after_error', 'cleanup'])
def test_the_first_error_stays_first(event: str, second: BaseException) -> None:
    first, second, others = ValueError('one', 1), copy_without_notes(second), list[str]()
    cbs = [
        At('after_step', first),
        At(event, second),
        ran('after_error', others),
        ran('cleanup', others),
    ]
    learn = make_learner(cbs)
    start_again(learn)
    e = raised_by(lambda: learn.fit(1))
    assert e is first and e.args == ('one', 1)
    assert others == ['after_error', 'cleanup'], 'the others still clean up'
    assert notes(e)[0] == 'in At.after_step (epoch 0, batch 0)'
    assert any(type(second).__name__ in n and f'At.{event}' in n for n in notes(e)[1:]), notes(e)
    is_clean(learn)
    fits_like_fresh(learn, cbs)


def test_after_a_run_without_errors_the_first_of_several_is_raised_at_the_end() -> None:
    others: list[str] = []
    cbs = [
        At('cleanup', KeyError('a')),
        At('cleanup', ValueError('b')),
        ran('cleanup', others),
        ran('after_error', others),
    ]
    learn = make_learner(cbs)
    start_again(learn)
    e = raised_by(lambda: learn.fit(1))
    assert type(e) is KeyError and e.args == ('a',) and others == ['cleanup']
    assert notes(e)[0].startswith('in At.cleanup (')
    assert any('b' in n and 'ValueError' in n for n in notes(e)), 'the second is told too'
    assert sum(n.startswith('and then ') for n in notes(e)) == 1, (
        'and the first is not told of itself'
    )
    assert len(learn.history) == 1
    is_clean(learn)
    fits_like_fresh(learn, cbs)


@pytest.mark.parametrize(
    'bad', [KeyError('two'), CancelFitException('stray')], ids=lambda e: type(e).__name__
)
def test_close_raises(bad: Exception) -> None:
    others: list[str] = []
    bad = copy_without_notes(bad)
    cbs = [
        At('close', bad, depth=0),
        At('close', ValueError('second'), depth=0),
        ran('close', others),
        ran('post_close', others),
    ]
    learn = make_learner(cbs)
    e = raised_by(learn.close)
    assert type(e) is (CancelError if isinstance(bad, CancelFitException) else type(bad))
    assert others == ['close', 'post_close']
    assert 'At.close' in (str(e) if isinstance(e, CancelError) else notes(e)[0])
    learn.close()
    assert others == ['close', 'post_close'], 'once'
    fits_like_fresh(learn, cbs)
