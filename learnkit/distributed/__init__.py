# SPDX-License-Identifier: Apache-2.0
"""Training in several processes, on one machine or many, through torch.distributed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
