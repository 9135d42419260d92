"""`microbatch='auto'` repeats a batch that runs out of memory in smaller microbatches, with equal results."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import SAM, Callback, DataLoaders, FitError, Learner
from learnkit.engine.microbatch import find_microbatch_size
from tests.helpers.learners import quiet_learner


class Hungry(nn.Module):
    "A model that raises torch's out-of-memory error for more than `fits` samples."

    def __init__(self, fits: int, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fits, self.sizes = fits, []  # type: int, list[int]
        layers: list[nn.Module] = [
            nn.Linear(3, 8),
            nn.Dropout(dropout),
            *([nn.BatchNorm1d(8)] if norm else []),
        ]
        self.layers = nn.Sequential(*layers, nn.Linear(8, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        "Return predictions [B, 1]; the first layers run before the memory runs out."
        self.sizes.append(len(x))
        out = self.layers(x)
        if self.training and len(x) > self.fits:
            raise torch.OutOfMemoryError('CUDA out of memory (raised by a test)')
        return out


def data(n: int = 40, bs: int = 16) -> DataLoaders:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    return DataLoaders.from_tensors(
        (x, x.sum(1, keepdim=True).sin()), (x[:8], x[:8].sum(1, keepdim=True)), bs=bs, shuffle=False
    )


def learner(model: Hungry, microbatch: Any = 'auto', **kwargs: Any) -> Learner:
    dls = data()
    return quiet_learner(
        dls, model, nn.MSELoss(), opt_func=torch.optim.SGD, lr=0.1, microbatch=microbatch, **kwargs
    )


def weights(learn: Learner) -> Tensor:
    return nn.utils.parameters_to_vector(learn.model.parameters()).detach()


def test_the_size_is_halved_until_it_fits_and_kept() -> None:
    learn = learner(model := Hungry(fits=5))
    learn.fit(2)
    assert model.sizes[:6] == [16, 8, 4, 4, 4, 4]  # 16 and 8 failed, 4 fit
    assert max(s for s in model.sizes[2:] if s != 8) == 4  # 8 is the validation batch
    assert learn.opt.n_steps == 6


def test_an_odd_size_is_halved_upwards() -> None:
    "A batch of 13 samples, of which 7 fit, is split into two passes, not three."
    x = torch.randn(13, 3, dtype=torch.float64)
    learn = learner(model := Hungry(fits=7))
    learn.dls = DataLoaders.from_tensors((x, x.sum(1, keepdim=True)), bs=13, shuffle=False)
    learn.fit(1)
    assert (model.sizes, learn.parts.microbatches.fitting_size) == ([13, 7, 6], 7)


def test_the_weights_match_whole_batches() -> None:
    whole, pieces = learner(Hungry(fits=16), None), learner(Hungry(fits=3))
    for learn in (whole, pieces):
        learn.fit(3)
    torch.testing.assert_close(weights(whole), weights(pieces), rtol=0, atol=1e-12)
    expected = pieces.history[-1]['valid_loss']
    assert whole.history[-1]['valid_loss'] == pytest.approx(expected, abs=1e-12)


def test_random_numbers_match_pieces_of_that_size_from_the_start() -> None:
    "With dropout, the generators are restored after failed attempts."
    found, fixed = learner(Hungry(fits=5, dropout=0.5)), learner(Hungry(fits=16, dropout=0.5), 4)
    for learn in (found, fixed):
        torch.manual_seed(7)
        learn.fit(2)
    assert torch.equal(weights(found), weights(fixed))


def test_batch_norm_statistics_are_restored_and_inexactness_is_reported() -> None:
    found, fixed = learner(Hungry(fits=5, norm=True)), learner(Hungry(fits=16, norm=True), 4)
    with pytest.warns(UserWarning, match=r"'auto': layers\.2 \(BatchNorm1d\) .* of 4 samples"):
        found.fit(2)
    with pytest.warns(UserWarning, match=r'microbatch=4: layers\.2 \(BatchNorm1d\)'):
        fixed.fit(2)
    for a, b in zip(
        found.model.state_dict().values(), fixed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


def test_pending_gradients_survive() -> None:
    "A callback that cancels a step, as accumulation does, keeps the gradients of earlier batches."

    class Two(Callback):
        def before_step(self) -> None:
            from learnkit import CancelBatchException

            if self.train_iter % 2 == 0:
                raise CancelBatchException

    found, whole = learner(Hungry(fits=5), cbs=Two), learner(Hungry(fits=16), None, cbs=Two)
    for learn in (found, whole):
        learn.fit(2)
    torch.testing.assert_close(weights(found), weights(whole), rtol=0, atol=1e-12)


def test_at_one_sample_the_error_is_raised_with_a_note() -> None:
    learn = learner(Hungry(fits=0))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        learn.fit(1)
    assert any('not even one sample fits' in note for note in caught.value.__notes__)
    assert all(p.grad is None for p in learn.model.parameters())
    learn.model.fits = 16
    learn.fit(1)


def test_other_errors_are_not_retried() -> None:
    class Broken(Hungry):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise RuntimeError('shapes')

    learn = learner(model := Broken(fits=16))
    with pytest.raises(RuntimeError, match='shapes'):
        learn.fit(1)
    assert model.sizes == [16]


def test_bad_sizes_are_refused() -> None:
    for size in ('half', 0, -1, 1.5):
        with pytest.raises(FitError, match='microbatch'):
            learner(Hungry(16), size)


@pytest.mark.parametrize('other', ['lbfgs', 'sam'])
def test_passes_that_are_made_again_keep_the_size(other: str) -> None:
    cbs = [SAM] if other == 'sam' else []
    found, fixed = learner(Hungry(fits=5), cbs=cbs), learner(Hungry(fits=16), 4, cbs=cbs)
    for learn in (found, fixed):
        if other == 'lbfgs':
            learn.opt_func = torch.optim.LBFGS
        learn.fit(1)
    assert torch.equal(weights(found), weights(fixed))


def test_buffers_that_a_forward_pass_replaces_are_restored() -> None:
    class Counts(Hungry):
        def __init__(self, fits: int) -> None:
            super().__init__(fits)
            self.register_buffer('n', torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.n = self.n + len(x)
            return super().forward(x)

    learn = learner(Counts(fits=5))
    learn.fit(1)
    assert learn.model.n == 40


def test_the_size_of_a_microbatch_is_what_was_asked_for_or_what_fits() -> None:
    learn = learner(Hungry(fits=5))
    assert find_microbatch_size(learn) is None
    learn.fit(1)
    assert find_microbatch_size(learn) == 4
    learn.microbatch = 7
    assert find_microbatch_size(learn) == 7
    learn.microbatch = None
    assert find_microbatch_size(learn) is None
