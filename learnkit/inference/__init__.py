# SPDX-License-Identifier: Apache-2.0
"""Predictions on a loader, sinks for predictions, interpretation, and pictures or tables of samples."""
