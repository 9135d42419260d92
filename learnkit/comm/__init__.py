# SPDX-License-Identifier: Apache-2.0
"""Collectives between the ranks of a training run, and tensors that are sharded over ranks."""
