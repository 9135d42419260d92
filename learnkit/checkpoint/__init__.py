# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, weight files, and exported models."""
