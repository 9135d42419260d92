# SPDX-License-Identifier: Apache-2.0
"""Metrics: functions of a batch, classes over a whole set, and torchmetrics objects."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
