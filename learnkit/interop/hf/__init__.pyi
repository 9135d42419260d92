# SPDX-License-Identifier: Apache-2.0

from .adapter import (
    from_hf as from_hf,
)
