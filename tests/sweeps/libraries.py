"""Loaders of data libraries, in the alphabetical order of the libraries; see `loaders.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from tests.sweeps.loaders import (
    BS,
    IDS,
    N_BATCH,
    N,
    NoisySamples,
    ResumableStream,
    Sample,
    Samples,
    SampleStream,
    batch_of,
    fetch,
    loader,
    make_record,
    note_fetch,
    read_tuple,
    stack,
    values_of,
)


def collate_fetched(samples: Any) -> dict[str, Tensor]:
    "Return samples of a file as a batch, and record that they were fetched."
    for _ in samples:
        note_fetch()
    return stack(samples)


def note_fetched(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    "Record that the samples of a batch are fetched, and return the batch."
    for _ in batch['id']:
        note_fetch()
    return batch


def write_once(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    "Return a file or folder that `write` has made, in this run or in an earlier one."
    path = folder / name
    if not path.exists():
        write(path)
    return path


# -- accelerate ------------------------------------------------------------------------------------


def prepare(dl: Any, **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options)).prepare(dl)


@loader('accelerate', 'prepared DataLoader')
def build_prepared(folder: Path) -> Any:
    return prepare(DataLoader(Samples(), BS, shuffle=True))


@loader('accelerate', 'seedable sampler')
def build_prepared_seedable(folder: Path) -> Any:
    return prepare(DataLoader(Samples(), BS, shuffle=True), use_seedable_sampler=True)


@loader('accelerate', 'stateful DataLoader')
def build_prepared_stateful(folder: Path) -> Any:
    return prepare(DataLoader(Samples(), BS, shuffle=True), use_stateful_dataloader=True)


@loader('accelerate', 'stateful DataLoader, seedable sampler')
def build_prepared_stateful_seedable(folder: Path) -> Any:
    dl = DataLoader(Samples(), BS, shuffle=True)
    return prepare(dl, use_stateful_dataloader=True, use_seedable_sampler=True)


@loader('accelerate', 'prepared IterableDataset')
def build_prepared_stream(folder: Path) -> Any:
    return prepare(DataLoader(SampleStream(), BS))


@loader('accelerate', 'dispatched batches')
def build_dispatched(folder: Path) -> Any:
    return prepare(DataLoader(SampleStream(), BS), dispatch_batches=True)


@loader('accelerate', 'dispatched batches, stateful DataLoader')
def build_dispatched_stateful(folder: Path) -> Any:
    dl = DataLoader(SampleStream(), BS)
    return prepare(dl, dispatch_batches=True, use_stateful_dataloader=True)


# -- datasets (Hugging Face) -----------------------------------------------------------------------


def make_rows() -> dict[str, Any]:
    return {'id': IDS, 'x': [values_of(i).tolist() for i in IDS]}


def make_hf() -> Any:
    from datasets import Dataset as HFDataset

    return HFDataset.from_dict(make_rows()).with_format('torch')


def make_hf_stream() -> Any:
    return make_hf().to_iterable_dataset(num_shards=4)


def from_parquet(folder: Path) -> Any:
    from datasets import load_dataset

    def write(path: Path) -> None:
        path.mkdir()
        for i in range(4):
            make_hf().shard(4, i).to_parquet(path / f'{i}.parquet')

    path = write_once(folder, 'parquet', write)
    data = load_dataset('parquet', data_dir=str(path), split='train', streaming=True)
    return data.with_format('torch')


def load(data: Any, **options: Any) -> Any:
    return DataLoader(data, BS, collate_fn=collate_fetched, **options)


def load_stateful(data: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, BS, collate_fn=collate_fetched, **options)


@loader('datasets', 'Dataset in a DataLoader')
def build_hf(folder: Path) -> Any:
    return load(make_hf(), shuffle=True)


@loader('datasets', 'Dataset, 2 workers')
def build_hf_workers(folder: Path) -> Any:
    return load(make_hf(), shuffle=True, num_workers=2)


@loader('datasets', 'IterableDataset in a DataLoader')
def build_hf_stream(folder: Path) -> Any:
    return load(make_hf_stream())


@loader('datasets', 'shuffled IterableDataset in a DataLoader')
def build_hf_stream_shuffled(folder: Path) -> Any:
    return load(make_hf_stream().shuffle(seed=3, buffer_size=16))


@loader('datasets', 'shuffled IterableDataset, 2 workers')
def build_hf_stream_workers(folder: Path) -> Any:
    return load(make_hf_stream().shuffle(seed=3, buffer_size=16), num_workers=2)


@loader('datasets', 'streamed Parquet files, shuffled')
def build_hf_parquet(folder: Path) -> Any:
    return load(from_parquet(folder).shuffle(seed=3, buffer_size=16))


@loader('datasets', 'interleaved streams with probabilities')
def build_hf_interleaved(folder: Path) -> Any:
    from datasets import interleave_datasets

    streams = [make_hf_stream().take(40), make_hf_stream().skip(40)]
    mixed = interleave_datasets(
        streams, probabilities=[0.6, 0.4], seed=1, stopping_strategy='all_exhausted'
    )
    return load(mixed.take(N))


@loader('datasets', 'batches of an IterableDataset, without a DataLoader')
def build_hf_batches(folder: Path) -> Any:
    return make_hf_stream().shuffle(seed=3, buffer_size=16).batch(BS)


@loader('datasets', 'IterableDataset in StatefulDataLoader')
def build_hf_stateful(folder: Path) -> Any:
    return load_stateful(make_hf_stream())


@loader('datasets', 'shuffled IterableDataset in StatefulDataLoader')
def build_hf_stateful_shuffled(folder: Path) -> Any:
    return load_stateful(make_hf_stream().shuffle(seed=3, buffer_size=16))


@loader('datasets', 'shuffled IterableDataset in StatefulDataLoader, 2 workers')
def build_hf_stateful_workers(folder: Path) -> Any:
    return load_stateful(make_hf_stream().shuffle(seed=3, buffer_size=16), num_workers=2)


@loader('datasets', 'streamed Parquet files in StatefulDataLoader')
def build_hf_parquet_stateful(folder: Path) -> Any:
    return load_stateful(from_parquet(folder))


# -- deeplake --------------------------------------------------------------------------------------


@loader('deeplake', 'data set in a DataLoader')
def build_deeplake(folder: Path) -> Any:
    import deeplake

    def write(path: Path) -> None:
        data = deeplake.create(str(path))
        data.add_column('id', deeplake.types.Int64())
        data.add_column('x', deeplake.types.Array('float32', 1))
        data.append({'id': IDS, 'x': [values_of(i) for i in IDS]})
        data.commit()

    data = deeplake.open_read_only(str(write_once(folder, 'deeplake', write)))
    return load(data.pytorch(), shuffle=True)


# -- fastai ----------------------------------------------------------------------------------------


@loader('fastai', 'DataLoader')
def build_fastai(folder: Path) -> Any:
    from fastai.data.load import DataLoader as FastaiLoader

    return FastaiLoader(Samples(), bs=BS, shuffle=True, create_batch=stack, num_workers=0)


@loader('fastai', 'DataLoader, augmented in 2 workers')
def build_fastai_workers(folder: Path) -> Any:
    from fastai.data.load import DataLoader as FastaiLoader

    return FastaiLoader(NoisySamples(), bs=BS, shuffle=True, create_batch=stack, num_workers=2)


@loader('fastai', 'TfmdDL', read=read_tuple)
def build_fastai_transformed(folder: Path) -> Any:
    from fastai.data.core import Datasets, TfmdDL

    def get_id(i: int) -> Tensor:
        note_fetch()
        return torch.tensor(i)

    data = Datasets(IDS, [[get_id], [lambda i: torch.from_numpy(values_of(i))]])
    return TfmdDL(data, bs=BS, shuffle=True, num_workers=0)


@loader('fastai', 'WeightedDL')
def build_fastai_weighted(folder: Path) -> Any:
    from fastai.callback.data import WeightedDL

    weights = [1.0 + i % 3 for i in IDS]
    return WeightedDL(Samples(), bs=BS, wgts=weights, create_batch=stack, num_workers=0)


# -- grain -----------------------------------------------------------------------------------------


def make_grain() -> Any:
    import grain

    return grain.MapDataset.source(IDS).map(fetch)


@loader('grain', 'MapDataset, shuffled')
def build_grain_map(folder: Path) -> Any:
    import grain

    data = grain.MapDataset.source(IDS).shuffle(seed=1).map(fetch)
    return data.batch(BS).to_iter_dataset()


@loader('grain', 'repeated MapDataset, as a stream', n_iter=N_BATCH)
def build_grain_repeated(folder: Path) -> Any:
    import grain

    data = grain.MapDataset.source(IDS).seed(1).shuffle().repeat().map(fetch)
    return data.batch(BS).to_iter_dataset()


@loader('grain', 'mixed data sets')
def build_grain_mixed(folder: Path) -> Any:
    import grain

    halves = [grain.MapDataset.source(ids).shuffle(seed=1).repeat() for ids in (IDS[:40], IDS[40:])]
    mixed = grain.MapDataset.mix(halves, weights=[0.7, 0.3])[:N].map(fetch)
    return mixed.batch(BS).to_iter_dataset()


@loader('grain', 'window shuffle')
def build_grain_window(folder: Path) -> Any:
    from grain import experimental

    data = make_grain().to_iter_dataset()
    return experimental.WindowShuffleIterDataset(data, window_size=16, seed=2).batch(BS)


@loader('grain', 'DataLoader')
def build_grain_loader(folder: Path) -> Any:
    import grain

    class Fetch(grain.transforms.Map):
        def map(self, element: int) -> Sample:
            return fetch(element)

    sampler = grain.samplers.IndexSampler(N, shuffle=True, num_epochs=1, seed=3)
    operations = [Fetch(), grain.transforms.Batch(BS)]
    return grain.DataLoader(data_source=IDS, sampler=sampler, operations=operations)


# -- h5py ------------------------------------------------------------------------------------------


def write_h5(path: Path) -> None:
    import h5py

    with h5py.File(path, 'w') as file:
        file['id'] = IDS
        file.create_dataset('x', data=np.stack([values_of(i) for i in IDS]), chunks=(8, 4))


class H5Samples(Samples):
    "Samples of a file that is opened at the first access."

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __getitem__(self, i: int) -> Sample:
        import h5py

        note_fetch()
        self.file = self.file or h5py.File(self.path)
        return {'id': int(self.file['id'][i]), 'x': self.file['x'][i]}


class H5Chunks(IterableDataset[Sample]):
    "Chunks of a file in an order from NumPy's global generator, the samples of a chunk in order."

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Sample]:
        import h5py

        with h5py.File(self.path) as file:
            for chunk in np.random.permutation(8):
                rows = slice(int(chunk) * 8, int(chunk) * 8 + 8)
                for i, x in zip(file['id'][rows], file['x'][rows], strict=True):
                    note_fetch()
                    yield {'id': int(i), 'x': x}


@loader('h5py', 'samples by index')
def build_h5(folder: Path) -> Any:
    return DataLoader(H5Samples(write_once(folder, 'data.h5', write_h5)), BS, shuffle=True)


@loader('h5py', 'samples by index, 2 workers')
def build_h5_workers(folder: Path) -> Any:
    data = H5Samples(write_once(folder, 'data.h5', write_h5))
    return DataLoader(data, BS, shuffle=True, num_workers=2)


@loader('h5py', 'chunks in random order')
def build_h5_chunks(folder: Path) -> Any:
    return DataLoader(H5Chunks(write_once(folder, 'data.h5', write_h5)), BS)


# -- lightning -------------------------------------------------------------------------------------


def read_combined(batch: Any) -> tuple[Tensor, Tensor]:
    "Return ids and values of the batches of two loaders as those of one."
    return torch.cat([part['id'] for part in batch]), torch.cat([part['x'] for part in batch])


@loader('lightning', 'DataLoader of Fabric')
def build_fabric(folder: Path) -> Any:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator='cpu', devices=1)
    return fabric.setup_dataloaders(DataLoader(Samples(), BS, shuffle=True))


@loader('lightning', 'stream of Fabric')
def build_fabric_stream(folder: Path) -> Any:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator='cpu', devices=1)
    return fabric.setup_dataloaders(DataLoader(SampleStream(), BS))


class Combined:
    "A loader that gives the batches of CombinedLoader alone, and has its length, which raises between two passes."

    def __init__(self, mode: str) -> None:
        from lightning.pytorch.utilities import CombinedLoader

        parts: list[Dataset[Sample]] = [Samples(), Samples()]
        if mode == 'sequential':
            parts = [Subset(Samples(), ids) for ids in (IDS[:32], IDS[32:])]
        self.dl = CombinedLoader([DataLoader(part, BS, shuffle=True) for part in parts], mode)

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in self.dl)

    def __len__(self) -> int:
        return len(self.dl)


@loader('lightning', 'CombinedLoader within a loader, sequential')
def build_combined_sequential(folder: Path) -> Any:
    return Combined('sequential')


@loader('lightning', 'CombinedLoader within a loader, max_size_cycle', read=read_combined)
def build_combined_cycle(folder: Path) -> Any:
    return Combined('max_size_cycle')


# -- litdata ---------------------------------------------------------------------------------------


def write_litdata(path: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    path.mkdir()
    writer = BinaryWriter(str(path), chunk_size=8)
    for i in IDS:
        writer[i] = make_record(i)
    writer.done()
    writer.merge()


def make_litdata(folder: Path, **options: Any) -> Any:
    import litdata

    path = write_once(folder, 'litdata', write_litdata)
    return litdata.StreamingDataset(str(path), shuffle=True, seed=3, **options)


def load_litdata(data: Any, **options: Any) -> Any:
    import litdata

    return litdata.StreamingDataLoader(
        data, batch_size=BS, collate_fn=collate_fetched, **{'num_workers': 0, **options}
    )


@loader('litdata', 'StreamingDataset in a DataLoader')
def build_litdata_plain(folder: Path) -> Any:
    return load(make_litdata(folder))


@loader('litdata', 'StreamingDataLoader')
def build_litdata(folder: Path) -> Any:
    return load_litdata(make_litdata(folder))


@loader('litdata', 'StreamingDataLoader, shuffled by the loader')
def build_litdata_shuffled(folder: Path) -> Any:
    return load_litdata(make_litdata(folder), shuffle=True)


@loader('litdata', 'StreamingDataLoader, 2 workers')
def build_litdata_workers(folder: Path) -> Any:
    return load_litdata(make_litdata(folder), num_workers=2)


@loader('litdata', 'CombinedStreamingDataset, weighted')
def build_litdata_combined(folder: Path) -> Any:
    import litdata

    halves = [make_litdata(folder), make_litdata(folder)]
    data = litdata.CombinedStreamingDataset(
        halves, seed=2, weights=(0.7, 0.3), iterate_over_all=False
    )
    return load_litdata(data)


# -- monai -----------------------------------------------------------------------------------------


def as_items() -> list[Any]:
    return [{'index': i} for i in IDS]


def fetch_item(item: dict[str, int]) -> Sample:
    return fetch(item['index'])


def make_random_transform() -> Any:
    from monai.transforms import Compose, RandLambdad

    return Compose([fetch_item, RandLambdad('x', np.negative, prob=0.5)])


def load_monai(data: Any, cls: str = 'DataLoader', **options: Any) -> Any:
    from monai import data as monai_data

    return getattr(monai_data, cls)(data, batch_size=BS, **{'collate_fn': stack, **options})


@loader('monai', 'Dataset')
def build_monai(folder: Path) -> Any:
    from monai.data import Dataset as MonaiDataset

    return load_monai(MonaiDataset(as_items(), fetch_item), shuffle=True)


@loader('monai', 'Dataset, random transforms')
def build_monai_random(folder: Path) -> Any:
    from monai.data import Dataset as MonaiDataset

    return load_monai(MonaiDataset(as_items(), make_random_transform()), shuffle=True)


@loader('monai', 'Dataset, random transforms, 2 workers')
def build_monai_random_workers(folder: Path) -> Any:
    from monai.data import Dataset as MonaiDataset

    data = MonaiDataset(as_items(), make_random_transform())
    return load_monai(data, shuffle=True, num_workers=2)


@loader('monai', 'CacheDataset, random transforms')
def build_monai_cache(folder: Path) -> Any:
    from monai.data import CacheDataset

    data = CacheDataset(as_items(), make_random_transform(), progress=False, num_workers=1)
    return load_monai(data, shuffle=True)


@loader('monai', 'PersistentDataset')
def build_monai_persistent(folder: Path) -> Any:
    from monai.data import PersistentDataset

    data = PersistentDataset(as_items(), fetch_item, cache_dir=folder / 'monai')
    return load_monai(data, shuffle=True)


@loader('monai', 'SmartCacheDataset')
def build_monai_smart(folder: Path) -> Any:
    from monai.data import SmartCacheDataset

    data = SmartCacheDataset(
        as_items() * 2, fetch_item, replace_rate=0.1, cache_num=N, progress=False, shuffle=False
    )
    return load_monai(data)


@loader('monai', 'ThreadDataLoader')
def build_monai_thread(folder: Path) -> Any:
    from monai.data import Dataset as MonaiDataset

    return load_monai(MonaiDataset(as_items(), fetch_item), 'ThreadDataLoader', shuffle=True)


@loader('monai', 'ShuffleBuffer with a seed')
def build_monai_buffer(folder: Path) -> Any:
    from monai.data import ShuffleBuffer

    data = ShuffleBuffer([make_record(i) for i in IDS], buffer_size=16, seed=1)
    return load_monai(data, collate_fn=collate_fetched)


# -- mosaicml-streaming ----------------------------------------------------------------------------


def write_mosaic(path: Path) -> None:
    from streaming import MDSWriter

    columns = {'id': 'int', 'x': 'ndarray:float32:4'}
    with MDSWriter(out=str(path), columns=columns, size_limit=512) as writer:
        for i in IDS:
            writer.write(make_record(i))


def make_mosaic(folder: Path, **options: Any) -> Any:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()  # of a killed process
    path = write_once(folder, 'mosaic', write_mosaic)
    source = {} if 'streams' in options else {'local': str(path)}
    return StreamingDataset(**source, batch_size=BS, shuffle_seed=5, **options)


def load_mosaic(data: Any, **options: Any) -> Any:
    from streaming import StreamingDataLoader

    return StreamingDataLoader(data, batch_size=BS, collate_fn=collate_fetched, **options)


@loader('mosaicml-streaming', 'StreamingDataset in a DataLoader')
def build_mosaic_plain(folder: Path) -> Any:
    return load(make_mosaic(folder, shuffle=True))


@loader('mosaicml-streaming', 'StreamingDataset in order, in a DataLoader')
def build_mosaic_plain_ordered(folder: Path) -> Any:
    return load(make_mosaic(folder))


@loader('mosaicml-streaming', 'StreamingDataLoader')
def build_mosaic(folder: Path) -> Any:
    return load_mosaic(make_mosaic(folder, shuffle=True))


@loader('mosaicml-streaming', 'StreamingDataLoader, 2 workers')
def build_mosaic_workers(folder: Path) -> Any:
    return load_mosaic(make_mosaic(folder, shuffle=True), num_workers=2)


@loader('mosaicml-streaming', 'StreamingDataLoader, weighted streams')
def build_mosaic_mixed(folder: Path) -> Any:
    from streaming import Stream

    paths = [write_once(folder, f'mosaic{i}', write_mosaic) for i in range(2)]
    streams = [
        Stream(local=str(path), proportion=p) for path, p in zip(paths, (0.7, 0.3), strict=True)
    ]
    return load_mosaic(make_mosaic(folder, shuffle=True, streams=streams, epoch_size=N))


# -- pyarrow ---------------------------------------------------------------------------------------


@loader('pyarrow', 'batches of a data set')
def build_arrow(folder: Path) -> Any:
    import pyarrow
    from pyarrow import dataset, parquet

    def write(path: Path) -> None:
        parquet.write_table(pyarrow.table(make_rows()), path)

    data = dataset.dataset(write_once(folder, 'data.parquet', write))

    class ArrowBatches:
        def __iter__(self) -> Iterator[Any]:
            for batch in data.to_batches(batch_size=BS):
                yield collate_fetched(batch.to_pylist())

    return ArrowBatches()


# -- pytorch-forecasting ---------------------------------------------------------------------------


def read_forecasting(batch: Any) -> tuple[Tensor, Tensor]:
    x, (target, _) = batch
    return target[:, 0].long(), x['encoder_cont'].flatten(1)[:, :4]


@loader('pytorch-forecasting', 'TimeSeriesDataSet', read=read_forecasting)
def build_forecasting(folder: Path) -> Any:
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet

    n = N + 4
    frame = pandas.DataFrame(
        {
            'time': range(n),
            'target': [float(i) for i in range(-4, N)],
            'group': ['a'] * n,
            'x': [float(values_of(abs(i))[0]) for i in range(-4, N)],
        }
    )
    data = TimeSeriesDataSet(
        frame,
        time_idx='time',
        target='target',
        group_ids=['group'],
        min_encoder_length=4,
        max_encoder_length=4,
        max_prediction_length=1,
        time_varying_unknown_reals=['x'],
        scalers={},
        target_normalizer=None,
    )
    return data.to_dataloader(train=True, batch_size=BS, num_workers=0)


# -- ray -------------------------------------------------------------------------------------------


class RayBatches:
    "Batches of a data set of Ray, as `iter_torch_batches` gives them."

    def __init__(self, **options: Any) -> None:
        import ray

        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
        ray.data.DataContext.get_current().enable_progress_bars = False
        ray.data.DataContext.get_current().execution_options.preserve_order = True
        self.data = ray.data.from_items([make_record(i) for i in IDS], override_num_blocks=4)
        self.options = options

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data.iter_torch_batches(batch_size=BS, device='cpu', **self.options):
            yield note_fetched(batch)


@loader('ray', 'iter_torch_batches')
def build_ray(folder: Path) -> Any:
    return RayBatches()


@loader('ray', 'iter_torch_batches, local shuffle with a seed')
def build_ray_shuffled(folder: Path) -> Any:
    return RayBatches(local_shuffle_buffer_size=32, local_shuffle_seed=1)


# -- skorch ----------------------------------------------------------------------------------------


@loader('skorch', 'Dataset of arrays', read=lambda batch: (batch[1].long(), batch[0]))
def build_skorch(folder: Path) -> Any:
    from skorch.dataset import Dataset as SkorchDataset

    x = np.stack([values_of(i) for i in IDS])
    return DataLoader(SkorchDataset(x, np.array(IDS)), BS, shuffle=True)


# -- squirrel --------------------------------------------------------------------------------------


def make_squirrel() -> Any:
    from squirrel.iterstream import IterableSource

    return IterableSource([make_record(i) for i in IDS])


@loader('squirrel-core', 'stream in order')
def build_squirrel(folder: Path) -> Any:
    return Squirrel(lambda: make_squirrel().map(note_fetch).batched(BS, stack))


@loader('squirrel-core', 'shuffled with a seed')
def build_squirrel_seeded(folder: Path) -> Any:
    return Squirrel(lambda: make_squirrel().map(note_fetch).shuffle(16, seed=1).batched(BS, stack))


@loader('squirrel-core', 'shuffled without a seed')
def build_squirrel_shuffled(folder: Path) -> Any:
    return Squirrel(lambda: make_squirrel().map(note_fetch).shuffle(16).batched(BS, stack))


@loader('squirrel-core', 'shuffled once made, in a DataLoader')
def build_squirrel_torch(folder: Path) -> Any:
    stream = make_squirrel().map(note_fetch).shuffle(16, seed=1).batched(BS, stack)
    return DataLoader(stream.to_torch_iterable(), batch_size=None)


class Squirrel:
    "A stream that is made again for each epoch."

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


# -- tensordict and torchrl ------------------------------------------------------------------------


def make_tensordict() -> Any:
    from tensordict import TensorDict

    x = torch.from_numpy(np.stack([values_of(i) for i in IDS]))
    return TensorDict({'id': torch.tensor(IDS), 'x': x}, batch_size=[N])


def to_dict(batch: Any) -> dict[str, Tensor]:
    return note_fetched({name: batch[name].clone() for name in ('id', 'x')})


@loader('tensordict', 'TensorDict in a DataLoader')
def build_tensordict(folder: Path) -> Any:
    return DataLoader(make_tensordict(), BS, shuffle=True, collate_fn=to_dict)


@loader('tensordict', 'TensorDict as the batch')
def build_tensordict_batches(folder: Path) -> Any:
    return DataLoader(make_tensordict(), BS, shuffle=True, collate_fn=note_fetched)


@loader('tensordict', 'memory-mapped TensorDict in a DataLoader')
def build_tensordict_mapped(folder: Path) -> Any:
    from tensordict import TensorDict

    path = write_once(folder, 'tensordict', lambda path: make_tensordict().memmap(path))
    data = TensorDict.load_memmap(path)
    return DataLoader(data, BS, shuffle=True, collate_fn=to_dict)


def make_replay_buffer(sampler: Any, **options: Any) -> Any:
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    buffer = ReplayBuffer(
        storage=LazyTensorStorage(N), sampler=sampler, batch_size=BS, collate_fn=to_dict, **options
    )
    buffer.extend(make_tensordict())
    return buffer


@loader('torchrl', 'replay buffer, without replacement')
def build_buffer(folder: Path) -> Any:
    from torchrl.data.replay_buffers import SamplerWithoutReplacement

    return make_replay_buffer(SamplerWithoutReplacement(drop_last=True))


# -- torch_geometric -------------------------------------------------------------------------------


def read_graphs(batch: Any) -> tuple[Tensor, Tensor]:
    return batch.y, batch.x[batch.ptr[:-1]]


def read_nodes(batch: Any) -> tuple[Tensor, Tensor]:
    n = getattr(batch, 'batch_size', None) or batch.num_nodes
    return batch.y[:n], batch.x[:n]


class Graphs(Dataset[Any]):
    "A graph of two or three nodes for each sample."

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        from torch_geometric.data import Data

        note_fetch()
        x = torch.from_numpy(values_of(i)).expand(2 + i % 2, 4)
        return Data(x=x, edge_index=torch.tensor([[0, 1], [1, 0]]), y=torch.tensor([i]))


def make_graph() -> Any:
    from torch_geometric.data import Data

    nodes = torch.arange(N)
    edges = torch.stack([nodes, (nodes + 1) % N])
    x = torch.from_numpy(np.stack([values_of(i) for i in IDS]))
    return Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=nodes)


@loader('torch-geometric', 'DataLoader', read=read_graphs)
def build_geometric(folder: Path) -> Any:
    from torch_geometric.loader import DataLoader as GraphLoader

    return GraphLoader(Graphs(), BS, shuffle=True)


@loader('torch-geometric', 'DataLoader, 2 workers', read=read_graphs)
def build_geometric_workers(folder: Path) -> Any:
    from torch_geometric.loader import DataLoader as GraphLoader

    return GraphLoader(Graphs(), BS, shuffle=True, num_workers=2)


@loader('torch-geometric', 'DynamicBatchSampler', read=read_graphs)
def build_geometric_dynamic(folder: Path) -> Any:
    from torch_geometric.loader import DataLoader as GraphLoader, DynamicBatchSampler

    sampler = DynamicBatchSampler(Graphs(), max_num=10, mode='node', shuffle=True)
    return GraphLoader(Graphs(), batch_sampler=sampler)


@loader('torch-geometric', 'ImbalancedSampler', read=read_graphs)
def build_geometric_imbalanced(folder: Path) -> Any:
    from torch_geometric.loader import DataLoader as GraphLoader, ImbalancedSampler

    return GraphLoader(Graphs(), BS, sampler=ImbalancedSampler(torch.tensor(IDS) % 3))


@loader('torch-geometric', 'RandomNodeLoader', read=read_nodes)
def build_geometric_nodes(folder: Path) -> Any:
    from torch_geometric.loader import RandomNodeLoader

    return RandomNodeLoader(make_graph(), num_parts=N_BATCH, shuffle=True)


@loader('torch-geometric', 'PrefetchLoader', read=read_graphs)
def build_geometric_prefetched(folder: Path) -> Any:
    from torch_geometric.loader import DataLoader as GraphLoader, PrefetchLoader

    return PrefetchLoader(GraphLoader(Graphs(), BS, shuffle=True), device=torch.device('cpu'))


# -- torchdata -------------------------------------------------------------------------------------


def make_nodes() -> Any:
    from torch.utils.data import RandomSampler
    from torchdata.nodes import SamplerWrapper

    return SamplerWrapper(RandomSampler(Samples()))


@loader('torchdata', 'StatefulDataLoader')
def build_stateful(folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Samples(), BS, shuffle=True)


@loader('torchdata', 'StatefulDataLoader, augmented in 2 workers')
def build_stateful_workers(folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(NoisySamples(), BS, shuffle=True, num_workers=2)


@loader('torchdata', 'StatefulDataLoader, stream without a state')
def build_stateful_stream(folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(SampleStream(), BS)


@loader('torchdata', 'StatefulDataLoader, stream with a state')
def build_stateful_resumable(folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(ResumableStream(), BS)


@loader('torchdata', 'nodes')
def build_nodes(folder: Path) -> Any:
    from torchdata.nodes import Batcher, Loader, Mapper

    return Loader(Mapper(Batcher(make_nodes(), BS), batch_of))


def build_parallel_nodes(in_order: bool, folder: Path) -> Any:
    from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper

    node = ParallelMapper(make_nodes(), fetch, num_workers=2, in_order=in_order, method='thread')
    return Loader(Mapper(Batcher(node, BS), stack))


loader('torchdata', 'nodes, 2 threads')(partial(build_parallel_nodes, True))
loader('torchdata', 'nodes, 2 threads, out of order')(partial(build_parallel_nodes, False))


@loader('torchdata', 'nodes, prefetched by a thread')
def build_nodes_prefetched(folder: Path) -> Any:
    from torchdata.nodes import Batcher, Loader, Mapper, Prefetcher

    node = Mapper(Batcher(make_nodes(), BS), batch_of)
    return Loader(Prefetcher(node, prefetch_factor=2))


@loader('torchdata', 'nodes, weighted mixture')
def build_nodes_weighted(folder: Path) -> Any:
    from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, MultiNodeWeightedSampler

    parts = {'a': IterableWrapper(IDS[:40]), 'b': IterableWrapper(IDS[40:])}
    node = MultiNodeWeightedSampler(
        parts, {'a': 0.7, 'b': 0.3}, seed=1, stop_criteria='ALL_DATASETS_EXHAUSTED'
    )
    return Loader(Mapper(Batcher(node, BS), batch_of))


# -- torchvision -----------------------------------------------------------------------------------


@loader('torchvision', 'FakeData with random transforms', read=lambda b: (b[1], b[0].flatten(1)))
def build_torchvision(folder: Path) -> Any:
    from torchvision.datasets import FakeData
    from torchvision.transforms import Compose, RandomHorizontalFlip, ToTensor

    transform = Compose([RandomHorizontalFlip(), ToTensor()])
    data = FakeData(N, (1, 2, 2), N, transform=transform)
    return DataLoader(data, BS, shuffle=True)


# -- webdataset ------------------------------------------------------------------------------------


def write_tars(path: Path) -> None:
    from webdataset import TarWriter

    path.mkdir()
    for shard in range(4):
        with TarWriter(str(path / f'{shard}.tar')) as tar:
            for i in IDS[shard::4]:
                tar.write({'__key__': f'{i:04}', 'id.cls': i, 'x.npy': values_of(i)})


def decode(sample: Any) -> Sample:
    note_fetch()
    return {'id': sample['id.cls'], 'x': sample['x.npy']}


def make_tars(folder: Path, **options: Any) -> Any:
    import webdataset

    path = write_once(folder, 'tars', write_tars)
    return webdataset.WebDataset(str(path / '{0..3}.tar'), **{'shardshuffle': False, **options})


@loader('webdataset', 'in order')
def build_tars(folder: Path) -> Any:
    return DataLoader(make_tars(folder).decode().map(decode), BS, collate_fn=stack)


@loader('webdataset', 'deterministic shuffle')
def build_tars_deterministic(folder: Path) -> Any:
    data = make_tars(folder, shardshuffle=4, detshuffle=True, seed=3)
    return DataLoader(data.decode().map(decode), BS, collate_fn=stack)


@loader('webdataset', 'deterministic shuffle of samples, WebLoader')
def build_tars_pipeline(folder: Path) -> Any:
    import webdataset as wds

    path = write_once(folder, 'tars', write_tars)
    data = wds.DataPipeline(
        wds.SimpleShardList(str(path / '{0..3}.tar')),
        wds.detshuffle(4, seed=1),
        wds.tarfile_to_samples(),
        wds.detshuffle(16, seed=2),
        wds.decode(),
        wds.map(decode),
        wds.batched(BS, collation_fn=stack),
    )
    return wds.WebLoader(data, batch_size=None)


@loader('webdataset', 'shuffled')
def build_tars_shuffled(folder: Path) -> Any:
    data = make_tars(folder, shardshuffle=4).shuffle(16)
    return DataLoader(data.decode().map(decode), BS, collate_fn=stack)


@loader('webdataset', 'shuffled with a seed')
def build_tars_seeded(folder: Path) -> Any:
    data = make_tars(folder, shardshuffle=4, seed=3).shuffle(16, seed=3)
    return DataLoader(data.decode().map(decode), BS, collate_fn=stack)


@loader('webdataset', 'WebLoader, shuffled again, with_epoch')
def build_web_loader(folder: Path) -> Any:
    import webdataset as wds

    data = make_tars(folder, resampled=True, seed=3).decode().map(decode)
    batched = data.batched(BS, collation_fn=stack)
    return wds.WebLoader(batched, batch_size=None).with_epoch(N_BATCH)


@loader('webdataset', 'RandomMix of two streams', n_iter=N_BATCH)
def build_tars_mixed(folder: Path) -> Any:
    import webdataset as wds

    halves = [make_tars(folder).decode().map(decode).repeat() for _ in range(2)]
    return DataLoader(wds.RandomMix(halves, [0.7, 0.3]), BS, collate_fn=stack)


# -- xbatcher and zarr -----------------------------------------------------------------------------


@loader('xbatcher', 'MapDataset', read=read_tuple)
def build_xbatcher(folder: Path) -> Any:
    import xarray
    import xbatcher
    from xbatcher.loaders.torch import MapDataset

    x = xarray.DataArray(np.stack([values_of(i) for i in IDS]), dims=('sample', 'value'))
    ids = xarray.DataArray(np.array(IDS), dims='sample')
    generators = [
        xbatcher.BatchGenerator(ids, {'sample': BS}),
        xbatcher.BatchGenerator(x, {'sample': BS, 'value': 4}),
    ]
    return DataLoader(MapDataset(*generators), batch_size=None, shuffle=True)


class ZarrSamples(Samples):
    "Samples of a group of arrays."

    def __init__(self, path: Path) -> None:
        import zarr

        self.group = zarr.open_group(path, mode='r')

    def __getitem__(self, i: int) -> Sample:
        note_fetch()
        return {'id': int(self.group['id'][i]), 'x': np.asarray(self.group['x'][i])}


@loader('zarr', 'samples by index')
def build_zarr(folder: Path) -> Any:
    import zarr

    def write(path: Path) -> None:
        group = zarr.open_group(path, mode='w')
        group['id'] = np.array(IDS)
        group['x'] = np.stack([values_of(i) for i in IDS])

    return DataLoader(ZarrSamples(write_once(folder, 'zarr', write)), BS, shuffle=True)
