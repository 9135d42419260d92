"""Cases that the sweep over loaders of data libraries has found."""

from collections.abc import Iterator
from random import Random
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from learnkit.data.position import LoaderPosition
from tests.silent.cases import case


class Stage:
    "A stage of a pipeline, which shuffles by the number of its pass."

    def __init__(self) -> None:
        self.epoch = -1

    def run(self, source: list[int]) -> list[int]:
        self.epoch += 1
        return Random(self.epoch).sample(source, len(source))


class Pipeline(IterableDataset[int]):
    "A stream that runs stages in a list, as webdataset."

    def __init__(self) -> None:
        self.pipeline = [list(range(6)), Stage()]

    def __iter__(self) -> Iterator[int]:
        source, stage = self.pipeline
        return iter(stage.run(source))


@case(
    'sweep',
    'the rest of a second epoch that is shuffled by a stage in a list',
    old='[0, 1, 2, 4]',
)
def resume_stages() -> tuple[Any, Any]:
    dl = DataLoader(Pipeline(), 2)
    list(dl)
    position = LoaderPosition(dl)
    next(position.begin())
    state = position.state_dict(1)
    rest = LoaderPosition.resume(DataLoader(Pipeline(), 2), state).begin()
    samples = [i for batch in rest for i in batch.tolist()]
    return samples, Random(1).sample(range(6), 6)[2:]
