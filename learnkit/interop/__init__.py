# SPDX-License-Identifier: Apache-2.0
"""Adapters for code of Composer, ksuit, Noether, Lightning, Keras and Hugging Face's Trainer; functions for the Hub.

The adapters do not import the other packages, which need not be installed. The functions for models on the
Hugging Face Hub need huggingface_hub.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
