# SPDX-License-Identifier: Apache-2.0
"""Loggers for files, services such as TensorBoard and Weights & Biases, and the console, with one interface."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
