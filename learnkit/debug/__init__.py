# SPDX-License-Identifier: Apache-2.0
"""Tools to inspect a training run: help, explanations, traces, representations and reports."""
