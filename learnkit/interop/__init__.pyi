# SPDX-License-Identifier: Apache-2.0

from .composer import (
    from_composer as from_composer,
)
from .hf import (
    from_hf as from_hf,
)
from .hub import (
    from_hub as from_hub,
    push_to_hub as push_to_hub,
    save_for_hub as save_for_hub,
)
from .keras import (
    from_keras as from_keras,
)
from .ksuit import (
    from_ksuit as from_ksuit,
)
from .lightning import (
    from_lightning as from_lightning,
)
