"""Compute how costs grow with the number of GPUs, from measured costs and assumed speeds.

Nothing is measured here. `docs/scaling.md` has the table and the source of each number."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from math import log2
from typing import Any

__all__ = ['Setting', 'add_options', 'chosen', 'costs', 'table']

SIZES = 8, 64, 1024  # GPUs


@dataclass(frozen=True)
class Setting:
    "A training and its machines. What is `measured` is of `python -m benchmarks.distributed --workloads costs`."

    parameters: float = 1e9  # of the model
    gradient_bytes: float = 4  # of a parameter, as it is sent: float32
    state_bytes: float = 12  # of a parameter in a checkpoint: weight and Adam's two averages
    step_ms: float = 400  # of a process alone, on its own batch
    backward: float = 0.6  # share of the step in which gradients are sent while others are computed
    batch: float = 16  # samples of a process
    samples: float = 1e7  # of the data set
    draw_ms: float = 5  # to make a batch, where every process has to draw all of them
    gpus: int = 8  # of a machine
    nvlink_gb_s: float = 300  # assumed: of a GPU, to others of its machine
    network_gb_s: float = 40  # assumed: of a GPU, to other machines (400 Gbit/s, 80 % used)
    bucket_mb: float = 25  # DistributedDataParallel's default: the last one is waited for
    hop_us: float = 10  # assumed: a message from GPU to GPU
    host_hop_us: float = 50  # assumed: a message from host to host, by TCP
    host_gb_s: float = 1  # assumed: of a host, by TCP
    disk_gb_s: float = 1  # assumed: of one process that writes
    disks_gb_s: float = 20  # assumed: of all together
    copy_gb_s: float = 15  # assumed: from a GPU to its host
    gathers: int = 4  # counted: at the end of an epoch with one validation loader
    messages: int = 2  # counted: broadcasts of an epoch
    read_us: float = 35  # measured: reading what one process has sent
    gathered_kb: float = 8.2  # what a process sends at the end of an epoch, at most
    tensor_ns: float = 19  # measured: a sample's place in the order of a TensorLoader
    list_ns: float = 122  # measured: the same in index lists of a DataLoader
    generators_kb: float = 13.3  # measured: the random generators of a process
    digest_gb_s: float = 1.9  # measured: SHA-256 (docs/performance.md)
    ask_us: float = 30  # measured: a question to the store of the first process


def add_options(parser: argparse.ArgumentParser) -> None:
    "Add an option for every number of a setting."
    group = parser.add_argument_group('numbers for --scale')
    for f in fields(Setting):
        group.add_argument(
            '--' + f.name.replace('_', '-'),
            type=int if f.type == 'int' else float,
            default=f.default,
            metavar='N',
            help=f'{f.default:g}',
        )


def chosen(args: argparse.Namespace) -> Setting:
    "Return the setting that the command line asks for."
    return Setting(**{f.name: getattr(args, f.name) for f in fields(Setting)})


def costs(
    s: Setting,
    n: int,  # GPUs, each with a process
) -> dict[str, float]:
    "Return the costs of `n` processes by name."
    step = s.step_ms / 1e3
    speed = (s.nvlink_gb_s if n <= s.gpus else s.network_gb_s) * 1e9
    n_bytes = s.parameters * s.gradient_bytes
    hop = s.hop_us / 1e6
    reduce = min(
        2 * (n - 1) / n * n_bytes / speed + 2 * (n - 1) * hop,
        2 * n_bytes / speed + 2 * log2(n) * hop,
    )
    last = 2 * min(s.bucket_mb * 1e6, n_bytes) / speed
    waits = max(last, reduce - s.backward * step)
    cut = 3 * ((n - 1) / n * n_bytes / speed + log2(n) * hop)
    cut_waits = max(last, cut - step)

    host_hop = s.host_hop_us / 1e6
    said = s.gathered_kb * 1e3
    ring = 2 * (n - 1) * host_hop
    tree = 2 * log2(n) * host_hop
    gather = (n - 1) * host_hop + n * (said / (s.host_gb_s * 1e9) + s.read_us / 1e6)
    epoch = s.samples / (n * s.batch) * step
    state = s.parameters * s.state_bytes
    own = n * s.generators_kb * 1e3
    writers = min(n * s.disk_gb_s, s.disks_gb_s) * 1e9
    return {
        'gradients: all-reduce, ms': reduce * 1e3,
        'gradients: waited for, ms a step': waits * 1e3,
        'gradients: throughput, relative to separate GPUs': step / (step + waits),
        'FSDP: gathered and summed, ms a step': cut * 1e3,
        'FSDP: throughput, relative to separate GPUs': step / (step + cut_waits),
        'flag: there and back in a ring, ms': ring * 1e3,
        'flag: waited for, ms a step': max(0.0, ring - step) * 1e3,
        'flag: there and back in a tree, ms': tree * 1e3,
        'epoch: length, s': epoch,
        'epoch: its end, s': s.gathers * gather + s.messages * ring,
        'data: order of a TensorLoader, s': s.samples * s.tensor_ns / 1e9,
        'data: order of a DataLoader, s': s.samples * s.list_ns / 1e9,
        'data: the latter, share of an epoch': s.samples * s.list_ns / 1e9 / epoch,
        'data: drawn whole by all, ms a step': n * s.draw_ms,
        'checkpoint: copied, training waits, s': state / (s.copy_gb_s * 1e9),
        'checkpoint: one writer, s': state / (s.disk_gb_s * 1e9) + state / (s.digest_gb_s * 1e9),
        'checkpoint: generators of all, MB': own / 1e6,
        'checkpoint: shards (FSDP), copied, s': state / n / (s.copy_gb_s * 1e9),
        'checkpoint: shards (FSDP), all write, s': state / writers
        + state / n / (s.digest_gb_s * 1e9),
        'start: sockets of a process': 2.0 * (n - 1),
        'start: questions to the first process, s': 2 * n * (n - 1) * s.ask_us / 1e6,
    }


def number(x: float) -> str:
    return f'{x:,.0f}' if x >= 100 else f'{x:.3g}'


def table(s: Setting) -> str:
    "Return the costs of several numbers of GPUs side by side."
    columns: list[dict[str, Any]] = [costs(s, n) for n in SIZES]
    lines = [f'{"GPUs":<52}' + ''.join(f'{n:>12,}' for n in SIZES)]
    lines += [
        f'{what:<52}' + ''.join(f'{number(c[what]):>12}' for c in columns) for what in columns[0]
    ]
    return '\n'.join(lines)
