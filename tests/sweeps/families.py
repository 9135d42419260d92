"""The families of the sweeps: what is tried, how it is judged, and the page of its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from tests.sweeps import (
    data,
    loaders,
    log_writers,
    losses,
    metric_claims,
    metrics,
    module_claims,
    modules,
    optimizer_claims,
    optimizers,
    schedules,
    step_time,
)
from tests.sweeps.claims import Claim, count_claims, judge_claims, make_claims_table
from tests.sweeps.verdicts import ROOT, Subject, Verdict, count_verdicts, make_table

CHECKPOINTS = ROOT / 'docs' / 'checkpoints.md'
SUPPORT = ROOT / 'docs' / 'support.md'
# what takes seconds to import
DATA_MODULES = {
    'accelerate': 'accelerate',
    'datasets': 'datasets',
    'fastai': 'fastai.data.all',
    'lightning': 'lightning',
    'litdata': 'litdata',
    'monai': 'monai.data',
    'mosaicml-streaming': 'streaming',
    'pytorch-forecasting': 'pytorch_forecasting',
    'skorch': 'skorch.dataset',
    'tensordict': 'tensordict',
    'torch-geometric': 'torch_geometric.loader',
    'torchdata': 'torchdata.nodes',
    'torchrl': 'torchrl.data',
    'webdataset': 'webdataset',
}


@dataclass(frozen=True)
class Family:
    "A kind of objects that libraries have."

    name: str
    libraries: list[str]  # names of distributions, in the order of the table
    load: Callable[[str], list[Subject]]  # f(library) -> what it has
    judge: Callable[[Subject, Path], list[Verdict]]  # f(subject, empty folder)
    describe: Callable[[Sequence[Verdict]], tuple[str, str]]  # -> counts, table
    page: Path = SUPPORT
    modules: Mapping[str, str] = field(default_factory=dict)  # module to import first, by library

    def find_lines(self) -> tuple[str, str]:
        "Return the lines of the page around the table."
        word = 'loaders' if self.name == 'data' else self.name
        return f'<!-- {word} table -->', f'<!-- end of {word} table -->'


def load_loaders_of(library: str) -> list[Subject]:
    "Return the loaders of a library."
    return [loader for loader in loaders.load_loaders() if loader.library == library]


def describe_loaders(verdicts: Sequence[Verdict]) -> tuple[str, str]:
    "Return the counts and the table of loaders."
    known = {(loader.library, loader.title) for loader in loaders.load_loaders()}
    current = [v for v in verdicts if (v.library, v.title) in known]
    table = make_table(loaders.load_loaders(), current, 'loaders')
    return count_verdicts(current, 'loaders'), table


def describe_claims(what: str, verdicts: Sequence[Verdict]) -> tuple[str, str]:
    "Return the counts and the table of a family with claims."
    return count_claims(verdicts, what), make_claims_table(verdicts, what)


def make_family(
    name: str,
    libraries: Mapping[str, object],
    load: Callable[[str], list[Subject]],
    claims: dict[str, Claim],
    modules: Mapping[str, str] = MappingProxyType({}),
) -> Family:
    "Return a family of which each subject is tried with each claim."
    return Family(
        name,
        list(libraries),
        load,
        lambda subject, folder: judge_claims(subject, claims, folder),
        partial(describe_claims, name),
        modules=modules,
    )


FAMILIES = {
    'data': Family(
        'data',
        list(dict.fromkeys(loader.library for loader in loaders.load_loaders())),
        load_loaders_of,
        lambda loader, folder: [data.judge(loader, folder)],
        describe_loaders,
        CHECKPOINTS,
        DATA_MODULES,
    ),
    'optimizers': make_family(
        'optimizers',
        optimizers.LIBRARIES,
        optimizers.load_optimizers,
        optimizer_claims.CLAIMS,
    ),
    'step-time': Family(
        'step-time',
        list(optimizers.LIBRARIES),
        optimizers.load_optimizers,
        step_time.judge,
        step_time.describe,
    ),
    'schedules': make_family(
        'schedules',
        schedules.LIBRARIES,
        schedules.load_schedules,
        schedules.CLAIMS,
    ),
    'loggers': make_family(
        'loggers',
        log_writers.LIBRARIES,
        log_writers.load_loggers,
        log_writers.CLAIMS,
    ),
    'losses': make_family('losses', losses.LIBRARIES, losses.load_losses, losses.CLAIMS),
    'metrics': make_family(
        'metrics',
        metrics.LIBRARIES,
        metrics.load_metrics,
        metric_claims.CLAIMS,
        dict.fromkeys(metrics.LIBRARIES, 'torch.distributed.fsdp'),
    ),
    'modules': make_family(
        'modules',
        modules.LIBRARIES,
        modules.load_modules,
        module_claims.CLAIMS,
        dict.fromkeys(modules.LIBRARIES, 'torch._dynamo'),
    ),
}
