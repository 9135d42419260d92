"""A context that replaces an attribute."""

from types import SimpleNamespace

import pytest

from learnkit import replacing_yield


def test_replacing_yield_restores_also_after_an_error() -> None:
    o = SimpleNamespace(a=1)
    with replacing_yield(o, 'a', 2):
        assert o.a == 2
    with pytest.raises(ZeroDivisionError), replacing_yield(o, 'a', 3):
        raise ZeroDivisionError
    assert o.a == 1
