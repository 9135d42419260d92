# SPDX-License-Identifier: Apache-2.0
"""Callbacks that measure a run and do not change the training, one small file a theme."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
