#!/usr/bin/env bash
# After `load_state_dict`, every later pass over a Hugging Face IterableDataset begins at the loaded position, too.
#
# The position is that of one interrupted pass, so one expects the next pass to give the rest and the passes after it to
# give everything, as torchdata's StatefulDataLoader does for data sets by index. The loaded position stays until
# `set_epoch` is called with another number: a training that resumes and does not call it trains on the same rest in all
# later epochs, and on nothing if the state was taken at the end of a pass. No warning is issued. In a StatefulDataLoader
# the number of workers decides: a worker process gives whole passes again, the main process does not.
#
# Versions: datasets 5.2.0, torch 2.13.0, torchdata 0.11.0, numpy 2.3.5. Output seen:
#     16 rows, state after 6: three passes of 10, 10, 10 rows (expected 10, 16, 16)
#     state after all 16: three passes of 0, 0, 0 rows
#     after set_epoch(1): two passes of 16, 16 rows
#     StatefulDataLoader, no worker: 10, 10, 10 rows; one worker: 10, 16, 16 rows
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 torch==2.13.0 torchdata==0.11.0 numpy==2.3.5 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
from itertools import islice

from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader


def make_stream():
    return Dataset.from_dict({'id': list(range(16))}).to_iterable_dataset()


def load(n_workers):
    return StatefulDataLoader(make_stream(), batch_size=2, num_workers=n_workers)


def count(passes):
    return ', '.join(map(str, passes))


def resume(n):
    "Return a stream with the state of another one after `n` rows."
    old, new = make_stream(), make_stream()
    rows = iter(old)
    assert len(list(islice(rows, n))) == n
    if n == 16:
        assert next(rows, None) is None
    new.load_state_dict(old.state_dict())
    return new


def resume_loader(n_workers):
    old, new = load(n_workers), load(n_workers)
    assert len(list(islice(iter(old), 3))) == 3
    new.load_state_dict(old.state_dict())
    return [sum(len(batch['id']) for batch in new) for _ in range(3)]


if __name__ == '__main__':
    stream = resume(6)
    within = [len(list(stream)) for _ in range(3)]
    print(f'16 rows, state after 6: three passes of {count(within)} rows (expected 10, 16, 16)')
    stream = resume(16)
    at_end = [len(list(stream)) for _ in range(3)]
    print(f'state after all 16: three passes of {count(at_end)} rows')
    stream = resume(6)
    stream.set_epoch(1)
    other_epoch = [len(list(stream)) for _ in range(2)]
    print(f'after set_epoch(1): two passes of {count(other_epoch)} rows')
    alone, in_worker = resume_loader(0), resume_loader(1)
    print(f'StatefulDataLoader, no worker: {count(alone)} rows; one worker: {count(in_worker)} rows')
    assert within == [10, 10, 10] and at_end == [0, 0, 0] and other_epoch == [16, 16]
    assert alone == [10, 10, 10] and in_worker == [10, 16, 16]
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
