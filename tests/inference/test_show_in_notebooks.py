"""The last line of a cell shows each picture exactly once, and each table as HTML."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip('nbformat')
pytest.importorskip('nbclient')
pytest.importorskip('ipykernel')
pytest.importorskip('matplotlib')
pytestmark = pytest.mark.notebook

from tests.helpers.notebooks import execute, faults  # noqa: E402  # it needs them too

SETUP = """
import torch
from torch import nn
from learnkit import *
x, y = torch.rand(60, 1, 4, 4), torch.arange(60) % 3
dls = DataLoaders.from_tensors((x, y), (x, y), bs=4)
learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), nn.CrossEntropyLoss(), metrics=accuracy,
                cbs=[ActivationStats(with_hist=True), StepTimeMonitor()])
with learn.no_bar(), learn.no_logging(): learn.fit(1)
interp = ClassificationInterpretation.from_learner(learn)
"""
PICTURES = [
    'learn.recorder.plot_loss()',
    'learn.recorder.plot_metrics()',
    'learn.recorder.plot_sched()',
    'with learn.no_bar(): rates = learn.lr_find()',
    'learn.recorder.plot_lr_find()',
    'learn.timings.plot()',
    'learn.activation_stats.plot_layer_stats(0)',
    'learn.activation_stats.color_dim(0)',
    'learn.activation_stats.plot_hist()',
    'interp.plot_confusion_matrix()',
    'interp.plot_top_losses(4)',
    'interp.show_results([0, 1])',
    'dls.show_batch()',
    'learn.show_results()',
]
TABLE = 'DataLoaders.from_tensors((x.flatten(1), y)).show_batch()'


def test_each_picture_is_shown_once(tmp_path: Path) -> None:
    nb = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(code) for code in (SETUP, *PICTURES, TABLE)]
    )
    execute(nb, tmp_path)
    assert not faults(nb)
    _, *cells, table = nb.cells
    for cell in cells:
        kinds = [
            kind for out in cell.outputs for kind in out.get('data', ()) if kind != 'text/plain'
        ]
        assert kinds == ['image/png'], cell.source
    (out,) = table.outputs
    # a head, nine samples
    assert out.output_type == 'execute_result' and out.data['text/html'].count('<tr>') == 10
