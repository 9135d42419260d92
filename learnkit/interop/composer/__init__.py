# SPDX-License-Identifier: Apache-2.0
"""Run callbacks, algorithms and logger destinations of Composer in a Learner: `from_composer`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
