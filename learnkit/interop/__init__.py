# SPDX-License-Identifier: Apache-2.0
"""Adapters for callbacks of Composer, ksuit and Noether, and functions for models on the Hugging Face Hub.

The adapters `from_composer(cb)` and `from_ksuit(cb)` do not import the other packages, which need not be
installed. The functions for the Hub need huggingface_hub.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
