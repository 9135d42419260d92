# SPDX-License-Identifier: Apache-2.0
"""Modules that all other packages use: errors, time, batches, watched values, random state, files, HTML."""
