# SPDX-License-Identifier: Apache-2.0
"""Modules that all adapters use: their base class, and helpers for the hooks of callbacks."""
