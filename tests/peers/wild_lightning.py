"""What modules and callbacks that users wrote for Lightning are trained with.

A call of the table makes a LightningModule, callbacks and a data module, or some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch import callbacks

from tests.peers import lightning_bench as bench, lightning_modules as lm
from tests.peers.rows import Row
from tests.peers.wild_bench import Case

NAMES = {**vars(L), 'L': L, 'pl': L, 'callbacks': callbacks}
STAND_INS: dict[str, Any] = {}
# options of `lightning_bench.Case`, for example those of the Trainer
CONDITIONS: dict[str, Any] = {
    'several_batches_a_step': {'options': {'accumulate_grad_batches': 2}},
    'streams': {'data': lm.streams},
}


def compare(case: Case, make: Callable[[], list[Any]]) -> list[Row]:
    "Compare a whole run and a killed one with a run in Lightning's Trainer."
    bench.silence()

    def pick(kind: type) -> list[Any]:
        return [made for made in make() if isinstance(made, kind)]

    def module() -> Any:
        return next(iter(pick(L.LightningModule)), None) or lm.Classifier()

    def data() -> Any:
        return next(iter(pick(L.LightningDataModule)), None) or lm.loaders()

    options = {'data': data, 'name': case.name, 'why': case.why, **case.options}
    compared = bench.Case(module, callbacks=lambda: pick(L.Callback), **options)
    theirs = bench.run_lightning(compared)
    part = 'Programs of Lightning users'
    return [
        bench.run_case(compared, bench.run_learner, theirs, part),
        bench.run_case(compared, bench.run_killed, theirs, f'{part}, killed and resumed'),
    ]
