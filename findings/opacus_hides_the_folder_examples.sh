#!/usr/bin/env bash
# The wheel of Opacus installs two more packages, `examples` and `benchmarks`, which hide a project's own folders.
#
# Both have an `__init__.py`, so they are regular packages. A project's folder `examples/` without one is a namespace
# package, and Python prefers a regular package anywhere on the path, also if the project's folder comes first. After
# `pip install opacus`, `from examples import mine` fails in a project where it worked before.
#
# Versions: opacus 1.6.0, torch 2.13.0 (not imported). Output seen:
#     before: examples.mine imported from the project
#     after: ImportError: cannot import name 'mine' from 'examples', of site-packages
#     top level of the wheel: benchmarks, examples, opacus
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
mkdir -p "$folder/project/examples"
echo 'value = 1' > "$folder/project/examples/mine.py"
cd "$folder/project"

"$folder/venv/bin/python" -c 'from examples import mine; print("before: examples.mine imported from the project")'
"$folder/venv/bin/pip" install -q --no-deps opacus==1.6.0 2> /dev/null
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import files

sys.path.insert(0, '')  # the project, as with `python -c`
try:
    from examples import mine
    raise SystemExit('examples.mine is imported: Opacus no longer hides it')
except ImportError as e:
    import examples
    assert 'site-packages' in examples.__file__, e
    print("after: ImportError: cannot import name 'mine' from 'examples', of site-packages")
names = sorted({f.parts[0] for f in files('opacus')} - {'..'})
packages = [name for name in names if not name.endswith('.dist-info')]
print('top level of the wheel:', ', '.join(packages))
assert packages == ['benchmarks', 'examples', 'opacus']
PYTHON
