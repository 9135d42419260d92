"""Print each case of this folder with the value before, the value now and an independent value.

python -m tests.silent [PART]
"""

import sys
import warnings
from typing import Any

import torch

from tests.silent.cases import is_equal, load_cases


def as_text(value: Any) -> str:
    "Return a value with six digits."
    if isinstance(value, float):
        return f'{value:.6g}'
    if isinstance(value, dict):
        return ', '.join(f'{name} {as_text(v)}' for name, v in value.items())
    if isinstance(value, (list, tuple)):
        return f'[{", ".join(map(as_text, value))}]'
    return str(value)


def main() -> int:
    "Print the table; return the number of cases that differ."
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    wanted = sys.argv[1:]
    n_wrong = 0
    part = ''
    for case in load_cases():
        if wanted and case.part not in wanted:
            continue
        if case.part != part:
            part = case.part
            print(f'\n{part}')
        new, independent = case.compute()
        equal = is_equal(case, new, independent)
        n_wrong += not equal
        verdict = 'equal' if equal else 'WRONG'
        print(
            f'  {verdict}  {case.title}: before {case.old}, now {as_text(new)}, '
            f'independent {as_text(independent)}'
        )
    print(f'\n{n_wrong} of {len(load_cases())} differ')
    return n_wrong


if __name__ == '__main__':
    sys.exit(1 if main() else 0)
