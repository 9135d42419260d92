"""Errors of missing optional libraries: each names the library and the command that installs it."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import ClassificationInterpretation, MissingExtraError
from learnkit.core.optional import import_library
from learnkit.core.plotting import new_axes
from learnkit.testing import synth_learner


def interpret() -> ClassificationInterpretation:
    scores, targets = torch.eye(3), torch.arange(3)
    dls = ([(scores, targets)],) * 2
    learn = synth_learner(dls=dls, model=nn.Identity(), loss_func=nn.CrossEntropyLoss())
    return ClassificationInterpretation.from_learner(learn)


@pytest.mark.parametrize(
    ('module', 'use', 'command'),
    [
        ('pandas', lambda: synth_learner().history.to_pandas(), 'pandas'),
        ('matplotlib', lambda: interpret().plot_confusion_matrix(), 'matplotlib'),
        ('matplotlib', lambda: new_axes(), 'matplotlib'),
        ('sklearn', lambda: interpret().print_classification_report(), 'scikit-learn'),
    ],
)
def test_the_error_names_the_library(
    module: str, use: Callable[[], Any], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split('.')[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as caught:
        use()
    assert str(caught.value).endswith(f' needs {command}: pip install {command}')


def test_a_library_that_an_installed_one_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_broken(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'inner'", name='inner.part')

    monkeypatch.setattr('learnkit.core.optional.import_module', import_broken)
    with pytest.raises(MissingExtraError, match=r'^This needs inner: pip install inner\. '):
        import_library('outer', 'This', '. Or that')
