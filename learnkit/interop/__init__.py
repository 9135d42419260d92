# SPDX-License-Identifier: Apache-2.0
"""Adapters for callbacks of Composer, ksuit and Noether, for LightningModules, and functions for the Hugging Face Hub.

The adapters `from_composer(cb)`, `from_ksuit(cb)` and `from_lightning(module, dls)` do not import the other packages,
which need not be installed. The functions for the Hub need huggingface_hub.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
