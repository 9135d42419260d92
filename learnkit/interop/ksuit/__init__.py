# SPDX-License-Identifier: Apache-2.0
"""Run callbacks of ksuit and Noether in a Learner: `from_ksuit`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
