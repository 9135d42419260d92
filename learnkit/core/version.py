# SPDX-License-Identifier: Apache-2.0
"""Version of the package, which checkpoints and saved Learners record."""

VERSION = '0.1.0'  # the same in settings.ini
