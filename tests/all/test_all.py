"""Names that the notebook line imports."""

import importlib
from pathlib import Path


def test_the_notebook_line_brings_fastcore_as_fastai_does() -> None:
    exported = importlib.import_module('learnkit.all')
    names = 'L patch store_attr delegates noop first listify ifnone GetAttr AttrDict parallel'
    assert set(names.split()) <= set(exported.__all__)
    assert hasattr(Path, 'ls')
    assert exported.defaults is importlib.import_module('learnkit').defaults
