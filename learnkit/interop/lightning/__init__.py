# SPDX-License-Identifier: Apache-2.0
"""Train LightningModules and run Lightning's callbacks: `from_lightning`, and `Trainer` with the options of Lightning's."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
