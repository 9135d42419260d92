"""Custom loaders in runs that are killed at three places and resumed, against a run without a stop."""

import itertools
import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from tests.faults.fault_helpers import others_in_full
from tests.helpers import own_loaders as own
from tests.helpers.forks import start
from tests.helpers.own_loaders import N_BATCHES, PLACES, Run, live, train


def stateful(dataset: Callable[[], Any]) -> Callable[[], Any]:
    "Return a function that makes torchdata's loader."
    torchdata = pytest.importorskip('torchdata.stateful_dataloader')
    return lambda: torchdata.StatefulDataLoader(dataset(), own.BS)


@cache
def without_stop(make: Callable[[], Any]) -> Run:
    with TemporaryDirectory() as folder:
        return train(make, Path(folder))


EXACT = {
    kind.__name__: kind
    for kind in (
        own.Seeding,
        own.Starting,
        own.NextEpoch,
        own.EndOfEpoch,
        own.Augmenting,
        own.OwnNoise,
        own.PermutedLate,
        own.PermutedNoise,
        own.Prefetching,
        own.SharedMemory,
        own.Weighted,
        own.Noisy,
    )
}
TWICE = (5, 21)  # a run that is killed in its first life and in its second
AT_ALL_PLACES = ('NextEpoch', 'EndOfEpoch')  # their state is different at the end of an epoch


@pytest.mark.parametrize(
    ('kind', 'kills'),
    [
        *itertools.product(EXACT, [TWICE]),
        *others_in_full(
            ((kind, (n,)) for kind in EXACT for n in PLACES),
            lambda kind, kills: kind in AT_ALL_PLACES,
        ),
    ],
    ids=str,
)
def test_a_killed_run_is_exact(kind: str, kills: tuple[int, ...], tmp_path: Path) -> None:
    whole = without_stop(EXACT[kind])
    killed = train(EXACT[kind], tmp_path, kills)
    assert killed.is_exact(whole)
    assert len(whole.ids) == own.N_EPOCH * N_BATCHES
    assert not whole.warnings and not killed.warnings


LOADERS = {
    'workers': lambda: DataLoader(own.Ordered(), own.BS, shuffle=True, num_workers=2),
    'no workers': lambda: DataLoader(own.Ordered(), own.BS, shuffle=True),
    'iterable': lambda: DataLoader(own.ByEpoch(), own.BS),
    'iterable, workers': lambda: DataLoader(own.ByEpoch(), own.BS, num_workers=1),
    'batches': lambda: [own.batch_of(list(range(i, i + own.BS))) for i in range(0, own.N, own.BS)],
}


@pytest.mark.parametrize('kind', LOADERS)
def test_torchs_loaders_are_exact_without_a_warning(kind: str, tmp_path: Path) -> None:
    whole, killed = without_stop(LOADERS[kind]), train(LOADERS[kind], tmp_path, (5, 21))
    assert killed.is_exact(whole) and not whole.warnings and not killed.warnings


@pytest.mark.parametrize('n', PLACES)
def test_the_state_of_a_data_set_in_a_stateful_loader(n: int, tmp_path: Path) -> None:
    make = stateful(own.ByEpoch)
    whole, killed = train(make, tmp_path / 'whole'), train(make, tmp_path / 'killed', (n,))
    assert killed.is_exact(whole) and not killed.warnings
    drawn = [i for batch in whole.ids for i in batch]
    assert drawn == [i for epoch in range(own.N_EPOCH) for i in own.order_of(epoch)]


def seeded_when_made(data: Any) -> Any:
    return own.SeededWhenMade()


@pytest.mark.parametrize(
    ('sampler', 'is_stateful', 'n'),
    others_in_full(
        itertools.product([RandomSampler, seeded_when_made], [False, True], PLACES),
        lambda sampler, is_stateful, n: n == (21 if is_stateful else 32),
    ),
)
def test_a_wrapper_of_a_loader(sampler: Any, is_stateful: bool, n: int, tmp_path: Path) -> None:
    def make() -> Any:
        data = own.Plain()
        batches = BatchSampler(sampler(data), own.BS, drop_last=False)
        if not is_stateful:
            return own.Adapter(DataLoader(data, batch_sampler=batches))
        torchdata = pytest.importorskip('torchdata.stateful_dataloader')
        return own.Adapter(torchdata.StatefulDataLoader(data, batch_sampler=batches))

    whole, killed = train(make, tmp_path / 'whole'), train(make, tmp_path / 'killed', (n,))
    assert killed.is_exact(whole) and not whole.warnings and not killed.warnings
    epochs = torch.tensor(whole.ids).reshape(own.N_EPOCH, own.N).tolist()
    assert [sorted(ids) for ids in epochs] == [list(range(own.N))] * own.N_EPOCH
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize('n', [5, pytest.param(21, marks=pytest.mark.full)])
def test_a_shuffle_buffer_that_the_state_leaves_out(n: int, tmp_path: Path) -> None:
    torchdata = pytest.importorskip('torchdata.stateful_dataloader')
    datasets = pytest.importorskip('datasets')

    def collate(rows: Any) -> Any:
        return own.batch_of([row['id'] for row in rows])

    def make() -> Any:
        data = datasets.Dataset.from_dict({'id': list(range(own.N))}).to_iterable_dataset()
        shuffled = data.shuffle(seed=3, buffer_size=20).map(dict)
        return torchdata.StatefulDataLoader(shuffled, own.BS, collate_fn=collate)

    whole, killed = train(make, tmp_path / 'whole'), train(make, tmp_path / 'killed', (n,))
    assert killed.is_exact(whole) and not killed.warnings
    assert len(whole.ids) == own.N_EPOCH * N_BATCHES


def test_epochs_of_another_length_after_a_resume_are_named(tmp_path: Path) -> None:
    make = stateful(own.Sticky)
    killed = train(make, tmp_path, (21,))
    (text,) = killed.warnings
    assert 'Epoch 2 had 11 batches, and each epoch before it 16' in text
    assert 'StatefulDataLoader' in text


@pytest.mark.parametrize('kind', [own.Raising, own.RaisingCount])
@pytest.mark.parametrize('n', PLACES)
def test_counts_are_kept_if_state_dict_raises(kind: Any, n: int, tmp_path: Path) -> None:
    whole, killed = without_stop(kind), train(kind, tmp_path, (n,))
    assert killed.is_exact(whole)
    text = f'{kind.__name__}.state_dict() raised AttributeError'
    assert len(whole.warnings) == 1 and len(killed.warnings) == 2  # one in each process
    assert all(text in message for message in killed.warnings)


# ------------------------------------------------------------------------------ repeated otherwise


@pytest.mark.parametrize('n', PLACES)
def test_an_epoch_that_is_repeated_otherwise_is_named(n: int, tmp_path: Path) -> None:
    (text,) = train(own.Unseeded, tmp_path, (n,)).warnings
    assert '(Unseeded) returns other batches when it repeats the epoch' in text
    assert f'batch {(n - 1) % N_BATCHES} differs' in text and 'state_dict' in text


@pytest.mark.parametrize('dataset', [own.Buffer, own.Mixture])
@pytest.mark.parametrize('n', PLACES[:2])
def test_an_order_that_the_model_disturbs_is_named(dataset: Any, n: int, tmp_path: Path) -> None:
    texts = train(lambda: DataLoader(dataset(), own.BS), tmp_path, (n,)).warnings
    assert f'(DataLoader of {dataset.__name__}) returns other batches' in texts[0]
    assert 'global random generator, from which the model' in texts[0]


def test_an_epoch_that_is_shorter_when_it_is_repeated_is_refused(tmp_path: Path) -> None:
    errors = set()
    for n in (6, 8, 9):
        killed = train(lambda: DataLoader(own.Ending(), own.BS), tmp_path / str(n), (n,))
        errors.add(killed.error)
    refused = [text for text in errors if text]
    assert refused and all('from which the model or other code draws' in text for text in refused)
    assert not any('data have changed' in text for text in refused)


def test_nodes_out_of_order_are_named_at_the_first_checkpoint(tmp_path: Path) -> None:
    nodes = pytest.importorskip('torchdata.nodes')

    def make(in_order: bool) -> Any:
        sampler = SequentialSampler(range(own.N))
        batches = nodes.Batcher(nodes.SamplerWrapper(sampler), own.BS)
        options = {'num_workers': 2, 'method': 'thread', 'in_order': in_order}
        return nodes.Loader(nodes.ParallelMapper(batches, own.batch_of, **options))

    texts = train(lambda: make(False), tmp_path / 'a').warnings
    assert 'A ParallelMapper with in_order=False' in texts[0]
    assert not train(lambda: make(True), tmp_path / 'b', (21,)).warnings


# ------------------------------------------------------------------------------- unknown lengths


ERRORS = [TypeError, NotImplementedError, RuntimeError, ValueError]


@pytest.mark.parametrize('error', ERRORS)
def test_a_length_that_raises_is_unknown(error: type[Exception], tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(own.Ordered(), batch_sampler=own.Endless(error))

    whole, killed = train(make, tmp_path / 'whole'), train(make, tmp_path / 'killed', (21,))
    assert killed.is_exact(whole) and not killed.warnings


@pytest.mark.parametrize('error', ERRORS)
def test_the_length_of_an_iterator_in_a_loader(error: type[Exception], tmp_path: Path) -> None:
    def make() -> Any:
        return own.Wrapping(own.Counting(error))

    whole, killed = train(make, tmp_path / 'whole'), train(make, tmp_path / 'killed', (21,))
    assert killed.is_exact(whole) and not killed.error


# ------------------------------------------------------------------------------------- processes


def in_a_process(make: Callable[[], Any], folder: Path, seed: int, n: int | None = None) -> Any:
    "Train in a child, which ends itself by SIGKILL before a batch; return its exit code and its run."

    def job() -> Any:
        run = Run()

        def kill(n_drawn: int) -> None:
            if n_drawn == n:
                os.kill(os.getpid(), signal.SIGKILL)

        live(run, make, folder, seed, kill)
        return run.ids, run.weights, run.history, run.warnings

    with start(job) as child:
        code = child.wait()
        return code, child.result if code == 0 else None


@pytest.mark.parametrize('kind', [own.NextEpoch, own.Prefetching])
def test_another_process_resumes_after_sigkill(kind: Any, tmp_path: Path) -> None:
    assert in_a_process(kind, tmp_path, 0, 21)[0] == -signal.SIGKILL
    assert in_a_process(kind, tmp_path, 1, 11)[0] == -signal.SIGKILL  # after 32 batches
    code, (ids, weights, history, texts) = in_a_process(kind, tmp_path, 2)
    whole = without_stop(kind)
    assert code == 0 and not texts
    assert (ids, weights, history) == (whole.ids[32:], whole.weights, whole.history)
