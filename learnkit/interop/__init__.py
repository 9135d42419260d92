"""Adapters for callbacks of Composer, ksuit and Noether, and functions for models on the Hugging Face Hub.

The adapters `from_composer(cb)` and `from_ksuit(cb)` do not import the other packages, which need not be
installed. The functions for the Hub need huggingface_hub.
"""

from learnkit.interop.composer import from_composer
from learnkit.interop.hub import from_hub, push_to_hub, save_for_hub
from learnkit.interop.ksuit import from_ksuit

__all__ = ['from_composer', 'from_hub', 'from_ksuit', 'push_to_hub', 'save_for_hub']
