# SPDX-License-Identifier: Apache-2.0
"""The functions of `learnkit.checkpoint.compare`, under their former path."""

from learnkit.checkpoint.compare import WALL_CLOCK, differences, digest, learn_digest, learn_state

__all__ = ['WALL_CLOCK', 'differences', 'digest', 'learn_digest', 'learn_state']
