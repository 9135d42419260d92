# SPDX-License-Identifier: Apache-2.0

from .adapter import (
    from_ksuit as from_ksuit,
)
