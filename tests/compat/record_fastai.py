"""Record what fastai does, for the tests in this folder: run it where fastai is installed.

    python -m tests.compat.record_fastai [fastai_traces.json.gz]

It writes each plan with its events, a digest of the counters at each of them, losses and final weights, and the results
of the cases in fastai_style.py.in."""

import gzip
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault('MPLBACKEND', 'Agg')
FILE = Path(__file__).with_name('fastai_traces.json.gz')
N_RANDOM = 260


def record() -> dict[str, Any]:
    "Run every plan and every case with fastai."
    import fastai
    import torch

    from tests.helpers import compat_plans as plans, compat_run as c

    torch.set_num_threads(1)
    lib = plans.fastai_names()
    made = [*plans.every_single_raise(), *map(plans.random_plan, range(N_RANDOM))]
    cases = {name: f() for name, f in c.style_cases('fastai').items()}
    return {
        'fastai': fastai.__version__,
        'plans': [[plan, c.outcome(plan, lib)] for plan in made],
        'cases': c.round_to(json.loads(json.dumps(cases))),
    }


if __name__ == '__main__':
    warnings.simplefilter('ignore')
    text = json.dumps(record(), separators=(',', ':'))
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f'{path}: {path.stat().st_size / 1000:.0f} kB')
