"""Interpretation: confusion matrices compared with scikit-learn, losses with direct computation, and errors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from learnkit import ClassificationInterpretation, DataLoaders, Interpretation, Learner
from learnkit.core.batch import are_equal
from learnkit.core.errors import LoaderError, MissingExtraError, OptionError
from learnkit.core.random import capture_rng
from learnkit.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat
from tests.helpers.libraries import require

skm = require('sklearn.metrics')
N, C = 23, 4


class Own(nn.Module):
    "A model with a weight that returns its input."

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x


def interpret(
    x: Any,
    y: Any,
    loss: Any,
    kind: Any = ClassificationInterpretation,
    vocab: Any = None,
    bs: int = 5,
    **kwargs: Any,
) -> Any:
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=bs, seed=0)
    if vocab is not None:
        dls.vocab = vocab
    return kind.from_learner(Learner(dls, Own(), loss), **kwargs)


def scores() -> tuple[Tensor, Tensor]:
    return torch.randn(N, C), torch.randint(C, (N,))


# ----------------------------------------------------------------------------- the confusion matrix


@pytest.mark.parametrize('loss', [nn.CrossEntropyLoss(), F.cross_entropy, CrossEntropyLossFlat()])
def test_many_classes(loss: Any) -> None:
    x, y = scores()
    # the training loader shuffles: in the data set's order all the same
    interp = interpret(x, y, loss, ds_idx=0)
    assert (
        interp.confusion_matrix() == skm.confusion_matrix(y, x.argmax(1), labels=range(C))
    ).all()
    assert torch.equal(interp.targs, y)
    assert torch.equal(interp.decoded, x.argmax(1))
    assert interp.vocab == [0, 1, 2, 3]
    torch.testing.assert_close(interp.losses, F.cross_entropy(x, y, reduction='none'))
    assert len(interp) == N


@pytest.mark.parametrize(
    ('loss', 'of', 'cut'),
    [
        (nn.BCEWithLogitsLoss(), float, 0),
        (F.binary_cross_entropy_with_logits, float, 0),
        (BCEWithLogitsLossFlat(), int, 0),
        (nn.BCELoss(), float, 0.5),
        (F.binary_cross_entropy, float, 0.5),
    ],
)
@pytest.mark.parametrize('shape', [(N,), (N, 1)])
def test_two_classes_of_a_single_score(
    loss: Any, of: type, cut: float, shape: tuple[int, ...]
) -> None:
    x = torch.rand(shape) if cut else torch.randn(shape)
    y = torch.randint(2, shape).to(torch.float if of is float else torch.int64)
    interp = interpret(x, y, loss, vocab=['no', 'yes'])
    assert (
        interp.confusion_matrix()
        == skm.confusion_matrix(y.flatten(), x.flatten() > cut, labels=[0, 1])
    ).all()
    assert interp.confusion_matrix().sum() == N and interp.losses.shape == (N,)
    logits = x.logit() if cut else x
    expected = F.binary_cross_entropy_with_logits(logits, y.float(), reduction='none').flatten()
    torch.testing.assert_close(interp.losses, expected)


@pytest.mark.parametrize(
    ('loss', 'shape'),
    [
        (nn.CrossEntropyLoss(), (N, C, 3, 2)),
        (CrossEntropyLossFlat(axis=1), (N, C, 3, 2)),
        (CrossEntropyLossFlat(), (N, 6, C)),
    ],
)
def test_classes_of_pixels_and_tokens_but_for_ignored_ones(
    loss: Any, shape: tuple[int, ...]
) -> None:
    axis = shape.index(C)
    x = torch.randn(shape)
    y = torch.randint(C, (*shape[:axis], *shape[axis + 1 :]))
    y[::3] = -100
    kept = y != -100
    interp = interpret(x, y, loss)
    assert (
        interp.confusion_matrix()
        == skm.confusion_matrix(y[kept], x.argmax(axis)[kept], labels=range(C))
    ).all()
    assert interp.losses.shape == (N,)


def test_most_confused() -> None:
    pred, targ = torch.tensor([0, 0, 0, 1, 2, 2, 2]), torch.tensor([0, 1, 1, 0, 0, 0, 0])
    interp = interpret(torch.eye(3)[pred], targ, nn.CrossEntropyLoss(), vocab=['a', 'b', 'c'])
    assert interp.most_confused() == [('a', 'c', 3), ('b', 'a', 2), ('a', 'b', 1)]
    assert interp.most_confused(min_val=3) == [('a', 'c', 3)]
    assert all(type(n) is int for *_, n in interp.most_confused())


def test_the_picture_of_the_matrix() -> None:
    plt = pytest.importorskip('matplotlib.pyplot')
    x, y = scores()
    loss = nn.CrossEntropyLoss()
    interp = interpret(x, y, loss, vocab=['one', 'two', 'three', 'a name that is much too long'])
    mine = plt.subplots()[1]
    assert interp.plot_confusion_matrix(ax=mine) is mine and len(plt.get_fignums()) == 1
    matrix = interp.confusion_matrix()
    # whatever the counts
    assert np.allclose(mine.images[0].get_array(), matrix / matrix.sum(1, keepdims=True))
    assert [t.get_text() for t in mine.texts] == [str(n) for n in matrix.flatten()]
    assert (mine.get_xlabel(), mine.get_ylabel()) == ('predicted', 'actual')
    expected = ['one', 'two', 'three', 'a name that is mu...']
    assert [t.get_text() for t in mine.get_yticklabels()] == expected
    assert not interp.plot_confusion_matrix(plot_txt=False, figsize=(2, 2)).texts
    assert plt.gcf().get_size_inches().tolist() == [2, 2]


def test_the_report_is_scikit_learns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = scores()
    interp = interpret(x, y, nn.CrossEntropyLoss(), vocab=[*'abcde'])
    interp.print_classification_report()
    expected = skm.classification_report(
        y, x.argmax(1), labels=range(5), target_names=[*'abcde'], zero_division=0.0
    ).strip()
    assert capsys.readouterr().out.strip() == expected
    for name in ('sklearn', 'sklearn.metrics'):
        monkeypatch.setitem(__import__('sys').modules, name, None)
    with pytest.raises(MissingExtraError, match=r'needs scikit-learn: pip install scikit-learn$'):
        interp.print_classification_report()


# --------------------------------------------------------------------------------------- the losses


def test_top_losses() -> None:
    x, y = scores()
    interp = interpret(x, y, nn.CrossEntropyLoss(), Interpretation)
    by_hand = F.cross_entropy(x, y, reduction='none')
    for largest in (True, False):
        order = by_hand.argsort(descending=largest)
        losses, idxs = interp.top_losses(5, largest)
        assert torch.equal(idxs, order[:5]) and torch.equal(losses, interp.losses[order[:5]])
        assert torch.equal(interp.top_losses(largest=largest)[1], order)
    assert len(interp.top_losses(1000)[0]) == N
    for bad in (0, -1, 2.5, True):
        with pytest.raises(OptionError, match=r'k='):
            interp.top_losses(bad)  # type: ignore[arg-type]


def test_samples_are_read_again_from_the_loader_and_left_in_order() -> None:
    x, y = scores()
    interp = interpret(x, y, nn.CrossEntropyLoss(), ds_idx=0)
    before, order = capture_rng(), interp.learn.dls.train.generator.get_state()
    inps, preds, targs, decoded, losses = interp[[20, 3, 3, -1]]
    rows = [20, 3, 3, N - 1]
    for a, b in ((inps, x), (preds, x.softmax(1)), (targs, y), (decoded, x.argmax(1))):
        assert torch.equal(a, b[rows])
    assert torch.equal(losses, interp.losses[rows])
    assert torch.equal(interp[4][0], x[4:5])
    assert torch.equal(interp[torch.tensor([4, 5])][2], y[4:6])
    assert are_equal(before, capture_rng())
    assert torch.equal(order, interp.learn.dls.train.generator.get_state())
    with pytest.raises(OptionError, match='at least one'):
        interp[torch.zeros(N, dtype=torch.bool)]


def test_a_mask_selects_samples() -> None:
    x, y = scores()
    interp = interpret(x, y, nn.CrossEntropyLoss())
    mask = interp.decoded != interp.targs
    for selection in (mask, mask.numpy(), mask.tolist()):
        assert torch.equal(interp[selection][2], y[mask])


def test_images_with_the_largest_losses_have_titles_and_frames() -> None:
    pytest.importorskip('matplotlib')
    x, y = torch.rand(N, 2, 3, 2)[:, :1], torch.randint(2, (N,))
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=4)
    dls.vocab = ['cat', 'dog']
    torch.manual_seed(1)
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), nn.CrossEntropyLoss())
    interp = ClassificationInterpretation.from_learner(learn)
    axs = interp.plot_top_losses(range(1, 4))
    losses, idxs = (o[1:4] for o in interp.top_losses())
    for ax, loss, i in zip(axs, losses.tolist(), idxs.tolist(), strict=True):
        names = [dls.vocab[c] for c in (y[i], interp.decoded[i])]
        assert ax.get_title() == f'target {names[0]}\npredicted {names[1]}\nloss {loss:.4g}'
        assert np.array_equal(ax.images[0].get_array(), x[i, 0].numpy())
        assert (
            ax.spines['left'].get_visible()
            == (names[0] != names[1])
            == (ax.title.get_fontweight() == 'bold')
        )
    assert len(interp.show_results([3, 4])) == 2


def test_samples_that_are_drawn_at_random_are_drawn_again() -> None:
    x, y = torch.arange(float(N))[:, None].repeat(1, 2), torch.arange(N) % 2
    dl = DataLoader(TensorDataset(x, y), batch_size=4, sampler=WeightedRandomSampler([1.0] * N, 40))
    learn = Learner(([(x, y)], dl), Own(), nn.CrossEntropyLoss())
    interp = Interpretation.from_learner(learn, act=nn.Identity())
    torch.rand(3)  # the training goes on
    assert len(interp) == 40 and torch.equal(interp[[30, 2]][0], interp.preds[[30, 2]])


class RandomSamples(IterableDataset[Any]):
    "Yields other samples in each pass."

    n = 0

    def __iter__(self) -> Iterator[Any]:
        RandomSamples.n += 1
        return iter([(torch.rand(2), (i + RandomSamples.n) % 2) for i in range(6)])


def test_a_loader_that_gives_other_samples_is_reported() -> None:
    dl = DataLoader(RandomSamples(), batch_size=3)
    interp = Interpretation.from_learner(Learner((dl, dl), Own(), nn.CrossEntropyLoss()))
    with pytest.raises(LoaderError, match='returned other samples'):
        interp.plot_top_losses(2)


# ------------------------------------------------------------------------------------------ errors


def test_what_has_no_classes_is_reported() -> None:
    x, y = scores()
    with pytest.raises(OptionError, match=r'a class 3, and only 2 names'):
        interpret(x, y, nn.CrossEntropyLoss(), vocab=[*'ab'])
    with pytest.raises(OptionError, match='several labels a sample'):
        interpret(x, (x > 0).float(), nn.BCEWithLogitsLoss())
    for loss_func in (CrossEntropyLossFlat(), nn.CrossEntropyLoss()):
        with pytest.raises(OptionError, match=r'The targets are .* not whole numbers'):
            interpret(x, x.softmax(1), loss_func)
    with pytest.raises(LoaderError, match='There is no validation loader'):
        Interpretation.from_learner(Learner([(x, y)], Own(), nn.CrossEntropyLoss()))
