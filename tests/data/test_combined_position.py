"""Positions in several loaders: every place of a pass, saved to a file, resumes in loaders made in another process."""

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from learnkit import CombinedLoader, TensorLoader
from learnkit.core.errors import CheckpointError
from learnkit.core.random import capture_rng, restore_rng
from learnkit.data.combined_position import make_position, resume_position
from learnkit.data.position import LoaderPosition
from tests.helpers.positions import (
    EpochCountSampler,
    Items,
    OwnSeed,
    SetEpochSampler,
    Stream,
    draw_from_global_generators,
)
from tests.helpers.resuming import scramble

MODES = ('min_size', 'max_size', 'max_size_cycle', 'sequential', 'weighted')
Passed = list[tuple[Any, Any, float]]


class Stateful:
    "A loader of numbers that saves its position itself."

    def __init__(self, n: int) -> None:
        self.n = n
        self.i = self.start = 0

    def state_dict(self) -> dict[str, int]:
        return {'i': self.i}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state['i']

    def __iter__(self) -> Iterator[torch.Tensor]:
        start = self.start
        self.start = 0
        for i in range(start + 1, self.n + 1):
            self.i = i
            yield torch.tensor([i])


def with_one_generator(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        'a': DataLoader(Items(), 4, shuffle=True, generator=g),
        'b': DataLoader(Items(n=9), 3, shuffle=True, generator=g),
    }


MAKES: dict[str, Callable[[int], Any]] = {
    'global': lambda s: {
        'a': DataLoader(Items('torch'), 4, shuffle=True),
        'b': DataLoader(Items(n=9), 3, shuffle=True),
        'c': TensorLoader(torch.arange(8), bs=4, shuffle=True, seed=s),
    },
    'one generator': with_one_generator,
    'samplers': lambda s: [
        DataLoader(Items('own', s), 3, sampler=OwnSeed(s)),
        DataLoader(Items(), 4, sampler=EpochCountSampler()),
        DataLoader(Items(), 6, sampler=SetEpochSampler(s)),
    ],
    'streams': lambda s: (DataLoader(Stream(s), 3), [torch.arange(2), torch.arange(3)], Stateful(4)),
    'nested': lambda s: {
        'turns': CombinedLoader([TensorLoader(torch.arange(6), bs=2, shuffle=True), [7, 8]], 'sequential'),
        'both': CombinedLoader(with_one_generator(s), 'max_size_cycle'),
    },
    'workers': lambda s: [
        DataLoader(Items('torch'), 5, shuffle=True, num_workers=2),
        DataLoader(Items(n=9), 3, shuffle=True),
    ],
}  # fmt: skip


def as_lists(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: as_lists(entry) for name, entry in batch.items()}
    return [*map(as_lists, batch)] if isinstance(batch, (list, tuple)) else batch


def pass_over(
    position: LoaderPosition,
    n: int = 0,  # number of batches of the epoch that were drawn before
    keeps: Callable[[int], bool] = lambda n: False,  # whether a checkpoint is taken after n batches
) -> tuple[Passed, dict[int, bytes]]:
    "Draw the rest of an epoch, with other draws between the batches; return it, and checkpoints."
    seen = []
    saved = {}
    for batch in position.begin():
        n += 1
        draw_from_global_generators()
        seen.append((as_lists(batch), position.dl.batch_source, torch.rand(1).item()))
        if keeps(n):
            file = io.BytesIO()
            torch.save({'position': position.state_dict(n), 'rng': capture_rng()}, file)
            saved[n] = file.getvalue()
    return seen, saved


def resume(dl: CombinedLoader, saved: bytes) -> LoaderPosition:
    state = torch.load(io.BytesIO(saved), weights_only=True)
    position = resume_position(dl, state['position'])
    restore_rng(state['rng'])
    return position


SOME_PLACES = (0.0, 0.5, 1.0)  # after the first batch, in the middle, at the end of an epoch


def find_places(n_batches: int, shares: Iterable[float] | None) -> list[int]:
    "Return the numbers of batches after which to resume: shares of an epoch, or all."
    if shares is None:
        return [*range(1, n_batches + 1)]
    return sorted({1 + round(share * (n_batches - 1)) for share in shares})


def check(
    make: Callable[[int], Any], mode: str, shares: Iterable[float] | None = SOME_PLACES
) -> None:
    "Resume from places of the second epoch, twice; compare the rest of it, and the third epoch."

    def combine(seed: int) -> CombinedLoader:
        loaders = make(seed)
        if mode != 'weighted':
            return CombinedLoader(loaders, mode)
        weights = [3, 1, 2][: len(loaders)]
        return CombinedLoader(loaders, mode, weights=weights, n_batches=9, seed=3)

    scramble(0)
    position = make_position(combine(1))
    first, _ = pass_over(position)
    position = position.next_position(len(first))
    seen, saved = pass_over(position, keeps=lambda n: True)
    last, _ = pass_over(position.next_position(len(seen)))
    for n in find_places(len(seen), shares):
        m = n + 1 + (len(seen) - n) // 2  # where it is killed a second time, if batches are left
        scramble(50 + n)
        resumed = resume(combine(1), saved[n])
        rest, again = pass_over(resumed, n, keeps=lambda k: k == m)  # noqa: B023  # called at once
        assert rest == seen[n:], (mode, n)
        if rest:
            scramble(90 + n)
            resumed = resume(combine(1), again[m])
            assert pass_over(resumed, m)[0] == seen[m:], (mode, n, m)
        following = resumed.next_position(len(seen))
        assert pass_over(following)[0] == last, (mode, n)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('kind', [kind for kind in MAKES if kind != 'workers'])
def test_some_places_of_a_pass_resume(kind: str, mode: str) -> None:
    check(MAKES[kind], mode)


@pytest.mark.parametrize('mode', ['max_size_cycle', 'sequential'])
def test_a_pass_with_workers_resumes(mode: str) -> None:
    check(MAKES['workers'], mode, shares=(0.0, 1.0))


@pytest.mark.full
@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('kind', MAKES)
def test_every_place_of_a_pass_resumes(kind: str, mode: str) -> None:
    check(MAKES[kind], mode, shares=None)


def test_a_position_between_two_epochs_resumes() -> None:
    def make() -> CombinedLoader:
        return CombinedLoader(with_one_generator(3), 'weighted', weights={'a': 1, 'b': 1}, seed=0)

    scramble(0)
    position = make_position(make())
    n = len(list(position.begin()))
    state = position.next_position(n).state_dict(0)
    rng = capture_rng()
    following = [as_lists(batch) for batch in position.next_position(n).begin()]
    scramble(9)
    resumed = resume_position(make(), state)
    restore_rng(rng)
    assert [as_lists(batch) for batch in resumed.begin()] == following


def test_other_loaders_are_refused_by_name() -> None:
    def make(n: int = 8, mode: str = 'min_size', last: str = 'b') -> CombinedLoader:
        return CombinedLoader({'a': [1, 2], last: TensorLoader(torch.arange(n), bs=2)}, mode)

    position = make_position(make())
    next(position.begin())
    state = position.state_dict(1)
    with pytest.raises(CheckpointError, match=r"loader 'b' .*samples 8, now 10"):
        resume_position(make(10), state)
    with pytest.raises(CheckpointError, match='mode min_size, now max_size'):
        resume_position(make(mode='max_size'), state)
    with pytest.raises(CheckpointError, match='loaders'):
        resume_position(make(last='c'), state)
    with pytest.raises(CheckpointError, match='type CombinedLoader, now list'):
        resume_position([1, 2], state)


def test_a_draw_that_was_interrupted_is_repeated() -> None:
    interrupted = []

    class Failing(Items):
        def __getitem__(self, i: int) -> torch.Tensor:
            if i == 2 and not interrupted:
                interrupted.append(i)
                raise KeyboardInterrupt
            return super().__getitem__(i)

    loader = CombinedLoader([TensorLoader(torch.arange(8), bs=2), DataLoader(Failing(n=8), 2)])
    position = make_position(loader)
    batches = position.begin()
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        next(batches)  # after the batch of the first loader was drawn
    state = position.state_dict(1)
    [(first,), second] = next(resume_position(loader, state).begin())
    assert first.tolist() == [2, 3] == second[:, 0].tolist()


def test_indices_of_the_loader_whose_turn_it_was() -> None:
    position = make_position(
        CombinedLoader([DataLoader(range(4), 2), TensorLoader(torch.arange(4), bs=2)], 'sequential')
    )
    found = [position.indices(n) for n, _ in enumerate(position.begin())]
    assert found == [[0, 1], [2, 3], [0, 1], [2, 3]]
