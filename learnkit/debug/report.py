# SPDX-License-Identifier: Apache-2.0
"""Write a report of a run as one HTML file: settings, history, curves, predictions, top losses, versions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learnkit.callbacks.model_summary import summarize_learner
from learnkit.callbacks.recorder import Recorder, recorder_of
from learnkit.checkpoint.save_load import resolve_path
from learnkit.core.device import find_used_accelerator
from learnkit.core.environment import describe_environment
from learnkit.core.errors import MetricError, OptionError
from learnkit.core.files import atomic_write
from learnkit.core.html import definitions, table
from learnkit.core.plotting import color, encode_figure, new_axes, pyplot
from learnkit.core.random import own_generators, preserved_rng
from learnkit.core.validation import check_count
from learnkit.core.version import VERSION
from learnkit.data.dataloaders import describe_loader, evaluation_loaders, n_batches
from learnkit.data.tables import Table
from learnkit.debug.repr import learner_html
from learnkit.inference.interpretation import ClassificationInterpretation, Interpretation
from learnkit.loggers.values import configuration

if TYPE_CHECKING:
    from learnkit.learner import Learner

PANEL = (4.8, 3.2)  # size of a plot in inches
DPI = 130
MAX_POINTS = 5000  # points of the plot of predicted numbers

# the Content-Security-Policy keeps the browser from loading anything: no scripts, no frames, no URLs
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 0 auto; padding: 1rem }}
h1 {{ font-size: 1.6rem; margin: 0 }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .6rem; border-bottom: thin solid rgba(128,128,128,.4) }}
.scroll {{ overflow-x: auto; margin: .6rem 0 }}
td, th {{ padding: .15rem .6rem; font-variant-numeric: tabular-nums }}
.scroll td {{ white-space: nowrap }}
.wrap td {{ white-space: normal; overflow-wrap: anywhere }}
.plots {{ display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start }}
img {{ max-width: 100%; height: auto; border-radius: 4px }}
img.plot {{ width: min(100%, 32rem) }}
</style>
</head>
<body>
"""


def write_report(
    learn: Learner,
    *,
    fname: str | Path,
    predictions: bool,
    top_k: int,
) -> Path:
    "Write a report of a run as one HTML file, and return its path."
    check_count('top_k', top_k)
    path = resolve_path(fname, learn.path, suffix='.html')
    missing = learn.world.broadcast(not path.parent.is_dir())
    if missing:
        raise OptionError(
            f'report({str(fname)!r}): there is no folder {path.parent}. Create it, or pass a path in '
            'another folder.'
        )
    with preserved_rng():
        page = _Page(learn, predictions, top_k)
        if learn.world.is_first:
            text = page.render()
            with atomic_write(path) as tmp:
                # folder names may contain bytes that are not valid text
                tmp.write_text(text, 'utf-8', 'replace')
    return path


class _Page:
    "Sections of a report; the parts that need all ranks are computed in the constructor."

    def __init__(self, learn: Learner, predictions: bool, top_k: int) -> None:
        self.learn = learn
        self.top_k = top_k
        self.left_out: dict[str, str] = {}  # error messages by name of the part that is left out
        self.layers = self._try('Layers', partial(_describe_layers, learn))
        self.interp: Interpretation | None = None
        if predictions and evaluation_loaders(learn.dls):
            self.interp = self._try('Predictions', partial(_interpret, learn))

    def _try(self, part: str, f: Callable[[], Any]) -> Any:
        "Return the result of a function; for an error, return None and note the error in the report."
        try:
            return f()
        except Exception as e:  # the other parts are useful, even after a failed run
            self.left_out[part] = f'{type(e).__name__}: {e}'
            return None

    def render(self) -> str:
        "Return the HTML of the page."
        learn = self.learn
        title = f'{type(learn.model).__name__}: report of a run'
        now = datetime.now().astimezone()
        sections = {
            'Run': lambda: _wrap(learner_html(learn)),
            'History': self._render_history,
            'Schedule': self._render_schedule,
            'Predictions': self._render_predictions,
            'Layers': lambda: self.layers or '',
            'Settings': lambda: _render_settings(learn),
            'Data and seeds': lambda: _render_data(learn),
            'Machine and versions': _render_environment,
        }
        body = ''
        for name, render in sections.items():
            html = self._try(name, render)
            if html:
                body += f'<section><h2>{escape(name)}</h2>\n{html}</section>\n'
        if self.left_out:
            body += f'<section><h2>Left out</h2>\n{_wrap(definitions(self.left_out))}</section>\n'
        return (
            f'{_HEAD.format(title=escape(title))}<h1>{escape(type(learn.model).__name__)}</h1>\n'
            f'<p>learnkit {escape(VERSION)}, {now:%Y-%m-%d %H:%M %Z}</p>\n'
            f'{body}</body>\n</html>\n'
        )

    def _render_history(self) -> str:
        "Return the curves and the table of epochs, or an empty string before the first step."
        recorder = recorder_of(self.learn)
        if recorder is None or not (recorder.history or recorder.losses):
            return ''
        plots = self._try('Curves', partial(_plot_history, recorder)) or ''
        rows = recorder.history._repr_html_() if recorder.history else ''
        return f'<div class="plots">{plots}</div>{_scroll(rows)}'

    def _render_schedule(self) -> str:
        "Return plots of the hyperparameters that have changed in the last fit."
        recorder = recorder_of(self.learn)
        if recorder is None or not recorder.losses:
            return ''
        plots = ''
        for name, values in recorder.hps.items():
            if values and min(values) < max(values):
                plots += _plot(partial(recorder.plot_sched, [name], figsize=PANEL))
        return f'<div class="plots">{plots}</div>' if plots else ''

    def _render_predictions(self) -> str:
        "Return the confusion matrix or the predicted numbers, and the samples with the largest losses."
        interp = self.interp
        if interp is None or not len(interp):
            return ''
        name = evaluation_loaders(self.learn.dls)[0][0]
        figures = ''
        if isinstance(interp, ClassificationInterpretation):
            plot = self._try('Confusion matrix', lambda: _plot(interp.plot_confusion_matrix)) or ''
            figures = f'{plot}<div>{_format_hits(interp)}</div>'
        elif _are_numbers(interp):
            plot = self._try('Plot of predictions', lambda: _plot(lambda: _plot_numbers(interp)))
            figures = plot or ''
        top = partial(interp.plot_top_losses, self.top_k)
        shown = self._try('Top losses', lambda: _show_samples(top)) or ''
        return (
            f'<p>Loader <b>{escape(name)}</b>, {len(interp):,} samples.</p>'
            f'<div class="plots">{figures}</div>'
            f'<p><b>Largest losses</b></p>{shown}'
        )


# -- parts -----------------------------------------------------------------------------------------


def _describe_layers(learn: Learner) -> str:
    summary = summarize_learner(learn)
    head = ['layer', 'type', 'output shape', 'parameters', 'trained']
    rows = [layer.cells() for layer in summary.layers]
    totals = (
        f'{summary.n_params:,} parameters, {summary.n_trained:,} of them trained; '
        f'{summary.input} to {summary.output}'
    )
    count = '1 layer' if len(rows) == 1 else f'{len(rows)} layers'
    title = f'<summary>{count}, {escape(totals)}</summary>'
    return f'<details>{title}{_scroll(table(head, rows))}</details>'


def _interpret(learn: Learner) -> Interpretation:
    "Return the predictions of the first validation loader, as classes if the targets are classes."
    with learn.no_bar():
        try:
            return ClassificationInterpretation.from_learner(learn)
        except OptionError:  # the targets are not classes
            return Interpretation.from_learner(learn)


def _are_numbers(interp: Interpretation) -> bool:
    "Return True if the predictions are floating-point numbers, one for each target."
    preds = interp.preds
    targs = interp.targs
    if not isinstance(preds, Tensor) or not isinstance(targs, Tensor):
        return False
    return preds.numel() == targs.numel() and preds.is_floating_point() and not targs.is_complex()


def _plot_numbers(interp: Interpretation) -> Any:
    "Plot at most `MAX_POINTS` predictions against their targets."
    preds, targs = (o.flatten().float() for o in (interp.preds, interp.targs))
    step = -(-len(targs) // MAX_POINTS)
    ax = new_axes(figsize=PANEL)[0]
    ax.plot(targs[::step], preds[::step], '.', color=color(0), alpha=0.5, markersize=4)
    ax.axline((float(targs[0]),) * 2, slope=1, color='grey', linewidth=1)
    ax.set(xlabel='target', ylabel='prediction')
    return ax


def _format_hits(interp: ClassificationInterpretation) -> str:
    matrix = interp.confusion_matrix()
    right, n = matrix.diagonal().sum(), matrix.sum()
    share = f': <b>{right / n:.2%}</b>' if n else ''
    return f'<p>{right:,} of {n:,} right{share}</p>'


def _render_settings(learn: Learner) -> str:
    settings = {
        name: _format_number(value) if isinstance(value, float) else value
        for name, value in configuration(learn).items()
    }
    return _wrap(definitions(settings))


def _render_data(learn: Learner) -> str:
    rows = []
    for name, dl in [('train', learn.dls.train), *evaluation_loaders(learn.dls)]:
        n = n_batches(getattr(dl, 'dataset', None))
        rows.append((name, describe_loader(dl), 'unknown' if n is None else f'{n:,}'))
    sizes = _scroll(table(['loader', 'batches', 'samples'], rows))
    return sizes + _scroll(table(['generator', 'seed'], _list_seeds(learn)))


def _list_seeds(learn: Learner) -> Iterator[tuple[str, str]]:
    "Yield the seeds of torch's generators; Python and NumPy do not keep their seeds."
    yield 'torch', str(torch.initial_seed())
    accelerator = find_used_accelerator()
    module: Any = accelerator and torch.get_device_module(accelerator)
    if hasattr(module, 'initial_seed'):
        yield f'torch, {accelerator}', str(module.initial_seed())
    for name, dl in [('train', learn.dls.train), *evaluation_loaders(learn.dls)]:
        for path, generator in own_generators(dl).items():
            if isinstance(generator, torch.Generator):
                yield f'{name}: {path}', str(generator.initial_seed())


def _render_environment() -> str:
    pairs = (line.partition(': ') for line in describe_environment().splitlines())
    return _wrap(definitions({name: value for name, _, value in pairs}))


def _format_number(value: float) -> str:
    return f'{value:.6g}'


# -- pictures --------------------------------------------------------------------------------------


def _plot_history(recorder: Recorder) -> str:
    "Return the curves of the loss and of all metrics, if any were recorded."
    html = ''
    if recorder.losses:
        html += _plot(lambda: recorder.plot_loss(ax=new_axes(figsize=PANEL)[0]))
    with suppress(MetricError):
        html += _plot(lambda: recorder.plot_metrics()[0])
    return html


def _show_samples(show: Callable[[], Any]) -> str:
    "Return the picture or the table that a function shows, as HTML."
    with _temporary_figures():
        shown = show()
        is_table = isinstance(shown, Table)
        return _scroll(shown._repr_html_()) if is_table else _as_image(shown.figure, 'samples')


def _plot(draw: Callable[[], Any]) -> str:
    "Return the figure that a function draws, as HTML."
    with _temporary_figures():
        return _as_image(draw().figure, 'plot')


def _as_image(figure: Any, css_class: str) -> str:
    content = encode_figure(figure, dpi=DPI, facecolor='white')
    return f'<img class="{css_class}" alt="" src="data:image/png;base64,{content}">'


@contextmanager
def _temporary_figures() -> Iterator[None]:
    "Return a context with matplotlib's default style, in which dollar signs are plain text; close all new figures."
    plt = pyplot()
    before = set(plt.get_fignums())
    try:
        with (
            plt.ioff(),
            plt.style.context('default'),
            plt.rc_context({'text.parse_math': False}),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings('ignore', 'Glyph .* missing')  # in names, such as Chinese
            yield
    finally:
        for number in set(plt.get_fignums()) - before:
            plt.close(number)


def _scroll(html: str | None) -> str:
    return f'<div class="scroll">{html}</div>' if html else ''


def _wrap(html: str | None) -> str:
    return f'<div class="scroll wrap">{html}</div>' if html else ''
