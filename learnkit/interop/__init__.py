"""Callbacks written for other training loops: `from_composer(cb)` and `from_ksuit(cb)`.

The other packages are not imported, and need not be installed."""

from learnkit.interop.composer import from_composer
from learnkit.interop.ksuit import from_ksuit

__all__ = ['from_composer', 'from_ksuit']
