"Run every callback that fastai ships in a learnkit Learner and in fastai's, and compare."

from __future__ import annotations

from tests.peers.rows import Row, define_torchvision_operators

define_torchvision_operators()

import fastai.vision.all  # noqa: E402, F401  # after the operators


def rows() -> list[Row]:
    "Return a row for each callback of fastai."
    return []
