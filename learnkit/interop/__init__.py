"""Callbacks of other training loops, `from_composer(cb)` and `from_ksuit(cb)`, and models on the Hugging Face Hub.

The other packages are not imported, and need not be installed; the Hub needs huggingface_hub."""

from learnkit.interop.composer import from_composer
from learnkit.interop.hub import from_hub, push_to_hub, save_for_hub
from learnkit.interop.ksuit import from_ksuit

__all__ = ['from_composer', 'from_hub', 'from_ksuit', 'push_to_hub', 'save_for_hub']
