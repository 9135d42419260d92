"""Fields of the loop: every field has a type, and every type a field."""

from __future__ import annotations

from learnkit.engine.fields import FIELDS, LoopFields


def test_every_field_is_typed_once() -> None:
    assert sorted(LoopFields.__annotations__) == sorted(field.name for field in FIELDS)
