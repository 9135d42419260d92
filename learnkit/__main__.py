# SPDX-License-Identifier: Apache-2.0
"""Commands of the package: `python -m learnkit --version`, `env` for bug reports, and `demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from learnkit.core.environment import describe_environment
from learnkit.core.version import VERSION


def main(argv: Sequence[str] | None = None) -> int:
    "Run a command and return the process's exit code."
    parser = argparse.ArgumentParser(
        prog='python -m learnkit', description='A training loop for PyTorch.', allow_abbrev=False
    )
    parser.add_argument('--version', action='version', version=f'learnkit {VERSION}')
    commands = 'env: print versions and devices; demo: train on handwritten digits'
    parser.add_argument('command', choices=('env', 'demo'), help=commands)
    parser.add_argument('options', nargs=argparse.REMAINDER, help='of the demo: demo --help')
    options = parser.parse_args(argv)
    if options.command == 'demo':
        import torch

        from learnkit import demo

        torch.set_num_threads(1)  # a second thread does not speed up images this small
        return demo.main(options.options)
    print(describe_environment())
    return 0


if __name__ == '__main__':
    sys.exit(main())
