"""Digest of the last batch: what differs, what may differ, and batches that callbacks change."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from learnkit import Callback
from learnkit.data.last_batch import differs, digest_batch, hold_batch
from tests.helpers import own_loaders as own
from tests.helpers.own_loaders import BS, N_BATCHES, Run, batch_of, live, train


def has_difference(first: Any, again: Any, everywhere: bool = False) -> bool:
    digests = (digest_batch(hold_batch(batch)) for batch in (first, again))
    return differs(*digests, everywhere=everywhere)


X = torch.arange(6.0).reshape(2, 3)
SAME: dict[str, Callable[[], Any]] = {
    'tensors': lambda: (X.clone(), X.clone().long()),
    'transposed': lambda: X.T,
    'an empty tensor': lambda: X[:0],
    'a scalar': lambda: torch.tensor(3.0),
    'bools and complex numbers': lambda: [X > 2, torch.complex(X, X).conj()],
    'bfloat16': lambda: X.bfloat16(),
    'a dict of lists of strings': lambda: {'text': ['a', 'b'], 'n': 3},
    'arrays': lambda: [X.numpy().copy(), np.asfortranarray(X.numpy())],
    'an inference tensor': lambda: torch.inference_mode()(X.clone)(),
    'a sparse tensor': lambda: X.to_sparse(),
    'packed sequences': lambda: pack_sequence([X[0], X[1]]),
    'an object': lambda: object(),
}


@pytest.mark.parametrize('kind', SAME)
def test_equal_batches_do_not_differ(kind: str) -> None:
    assert not has_difference(SAME[kind](), SAME[kind]())


@pytest.mark.parametrize(
    ('first', 'again'),
    [
        ((X, 1), (X + 1, 1)),
        ((X, 1), (X, 2)),
        ({'x': X, 'name': 'a'}, {'x': X, 'name': 'b'}),
        (X, X.double()),
        (X, X.reshape(3, 2)),
        (X.numpy(), X.numpy() + 1),
        (torch.zeros(3), -torch.zeros(3)),
        (torch.zeros(4, 3000, 90), torch.eye(4).repeat(1, 750)[:, :, None].expand(4, 3000, 90)),
        (np.zeros((4, 300000)), np.zeros((4, 300000)) + np.arange(4)[:, None]),
    ],
)
def test_other_batches_differ(first: Any, again: Any) -> None:
    assert has_difference(first, again)


def test_entries_that_are_random_may_differ() -> None:
    assert not has_difference((X, 1), (X + 1, 1), everywhere=True)
    assert has_difference((X, 1), (X + 1, 2), everywhere=True)
    assert not has_difference((), (), everywhere=True)


def test_a_tensor_that_was_changed_in_place_is_not_compared() -> None:
    first = [X.clone(), torch.ones(2)]
    held = hold_batch(first)
    first[0].add_(1)
    again = [X.clone(), torch.ones(2)]
    assert not differs(digest_batch(held), digest_batch(hold_batch(again)), everywhere=False)
    again[1] = torch.zeros(2)
    assert differs(digest_batch(held), digest_batch(hold_batch(again)), everywhere=False)


# ----------------------------------------------------------------------------------------- in a run


class Rows:
    "Gives the same batches in each epoch, in containers that can be changed."

    def __init__(self, changed: int | None = None) -> None:
        self.changed = changed  # number of a batch with other targets

    def __iter__(self) -> Iterator[Any]:
        for i in range(N_BATCHES):
            x, y = batch_of(list(range(i * BS, (i + 1) * BS)))
            yield [x, y + (i == self.changed)]


class Changing(Callback):
    "Changes the batch of the loader, in place or by another tensor."

    order = -2000

    def __init__(self, replaces: bool) -> None:
        self._replaces = replaces

    def after_draw(self) -> None:
        if not self.learn.training:
            return
        batch: Any = self.learn.batch
        x: Tensor = batch[0]
        if self._replaces:
            batch[0] = x + torch.randn_like(x)
        else:
            x.add_(torch.randn_like(x))


@pytest.mark.parametrize('replaces', [False, True])
def test_a_batch_that_a_callback_changes_is_no_difference(replaces: bool, tmp_path: Path) -> None:
    def run(folder: Path, *kills: int) -> Run:
        found = Run()
        for seed, n in enumerate((*kills, -1)):

            def kill(n_drawn: int, n: int = n) -> None:
                if n_drawn == n:
                    raise own.Killed

            live(found, Rows, folder, seed, kill, [Changing(replaces)])
        return found

    whole, killed = run(tmp_path / 'whole'), run(tmp_path / 'killed', 5, 21)
    assert killed.is_exact(whole) and not killed.warnings


def test_the_digest_is_of_the_batch_before_the_checkpoint(tmp_path: Path) -> None:
    loaders = iter([Rows(), Rows(changed=4)])
    killed = train(lambda: next(loaders), tmp_path, (5,))
    (text,) = killed.warnings
    assert '(Rows) returns other batches' in text and 'batch 4 differs' in text
