# SPDX-License-Identifier: Apache-2.0

from .adapter import (
    from_composer as from_composer,
)
