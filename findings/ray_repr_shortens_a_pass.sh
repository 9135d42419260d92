#!/usr/bin/env bash
# `repr` of a data set of Ray, called while a pass over it runs, makes the pass end early.
#
# A debugger, a notebook cell that ends in the data set, or a log line that prints it does so. No error is raised and no
# warning is issued: a training epoch has half of its batches. The next passes are complete.
#
# Versions: ray 2.60.0, numpy 2.3.5, pandas 2.3.3. Output seen:
#     16 batches; with repr after the first one: 8; the next pass: 16
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'ray[data]==2.60.0' numpy==2.3.5 pandas==2.3.3 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import ray

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level='ERROR')
data = ray.data.from_items([{'id': i} for i in range(64)], override_num_blocks=4)


def count(look):
    n = 0
    for _ in data.iter_batches(batch_size=4):
        n += 1
        if look and n == 1:
            repr(data)
    return n


before, within, after = count(False), count(True), count(False)
print(f'{before} batches; with repr after the first one: {within}; the next pass: {after}')
assert before == after == 16 and within < 16
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
