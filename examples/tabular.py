"""Predict the rents of flats from a table with categories, numbers and missing values.

    python examples/tabular.py                                 # choose settings, five seeds, test: minutes
    python examples/tabular.py --quick                         # the same with few flats: seconds
    python examples/tabular.py --resume                        # continue after a kill, with the same arguments
    torchrun --nproc-per-node=2 examples/tabular.py            # two processes

The table is generated, so that the best possible error is known: the logarithm of a rent has noise with a standard
deviation of 0.08. `nbs/project_tabular.ipynb` explains each part. pip install pandas scikit-learn."""

from __future__ import annotations

import argparse
import json
import os
from itertools import islice, product
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import Callback, Checkpoint, DataLoaders, Learner, rmse

NOISE = 0.08  # standard deviation of the noise in the logarithm of a rent
CATEGORIES = ['street', 'district', 'heating', 'condition', 'elevator', 'weekday']
NUMBERS = ['area', 'rooms', 'year', 'floor', 'distance']
Settings = dict[str, Any]

# -- data ------------------------------------------------------------------------------------------


def make_flats(
    n: int = 20_000,  # number of flats
    seed: int = 1,
    n_streets: int = 200,  # scikit-learn's boosting takes up to 255 categories
) -> pd.DataFrame:
    "Generate a table of flats with their rents. The hidden level of each street is in `attrs`."
    rng = np.random.default_rng(seed)
    n_districts = 12
    district_levels = rng.normal(0, 0.15, n_districts)
    district_distances = rng.uniform(1, 9, n_districts)
    districts_of_streets = rng.integers(n_districts, size=n_streets)
    street_levels = rng.normal(0, 0.12, n_streets)

    # a few streets have many flats, and many streets have few
    popularity = 1 / (3 + np.arange(n_streets))
    street = rng.choice(n_streets, n, p=popularity / popularity.sum())
    district = districts_of_streets[street]
    heating = rng.choice(4, n, p=[0.5, 0.25, 0.15, 0.1])
    condition = rng.choice(4, n, p=[0.1, 0.3, 0.45, 0.15])
    area = np.exp(rng.normal(4.2, 0.4, n)).round(0)
    rooms = np.clip((area / 28 + rng.normal(0, 0.6, n)).round(0), 1, None)
    year = np.where(rng.random(n) < 0.35, rng.integers(1880, 1919, n), rng.integers(1950, 2024, n))
    floor = rng.poisson(2.5, n)
    elevator = rng.random(n) < np.where(year > 1970, 0.7, 0.2)
    distance = np.abs(district_distances[district] + rng.normal(0, 0.8, n)).round(1)

    log_rent = (
        6.8
        + 0.8 * np.log(area / 60)
        + 0.05 * (rooms - area / 28)
        + district_levels[district]
        + street_levels[street]
        + np.array([0.0, -0.03, -0.08, 0.05])[heating]
        + np.array([-0.15, -0.05, 0.0, 0.1])[condition]
        + 0.08 * (year < 1919)
        + 0.12 * (year >= 2002)
        + np.where(elevator, 0.015, -0.04) * floor
        - 0.05 * distance
        + rng.normal(0, NOISE, n)
    )

    flats = pd.DataFrame(
        {
            'street': np.array([f'street {i:03}' for i in range(n_streets)])[street],
            'district': np.array([f'district {i:02}' for i in range(n_districts)])[district],
            'heating': np.array(['gas', 'district', 'oil', 'heat pump'])[heating],
            'condition': np.array(['poor', 'fair', 'good', 'new'])[condition],
            'elevator': np.array(['no', 'yes'])[elevator.astype(int)],
            'weekday': np.array(['Mon', 'Tue', 'Wed', 'Thu', 'Fri', 'Sat', 'Sun'])[
                rng.integers(7, size=n)  # of the advertisement: without influence on the rent
            ],
            'area': area,
            'rooms': rooms,
            'year': year.astype(float),
            'floor': floor.astype(float),
            'distance': distance,
            'rent': np.exp(log_rent).round(0),
        }
    )
    # the year of an old house is often unknown
    flats.loc[rng.random(n) < np.where(year < 1919, 0.4, 0.05), 'year'] = np.nan
    for column, share in {'district': 0.05, 'condition': 0.1, 'distance': 0.08}.items():
        flats.loc[rng.random(n) < share, column] = np.nan
    flats.attrs['street_levels'] = {
        f'street {i:03}': district_levels[districts_of_streets[i]] + street_levels[i]
        for i in range(n_streets)
    }
    return flats


def split_flats(flats: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    "Return 70 % of the rows for training, 15 % for validation and 15 % for the test."
    rows = flats.sample(frac=1, random_state=0).reset_index(drop=True)
    ends = [int(0.7 * len(rows)), int(0.85 * len(rows))]
    return rows[: ends[0]], rows[ends[0] : ends[1]], rows[ends[1] :]


class Encoder:
    """Turn rows of the table into tensors, with what it has learned from the training rows.

    A category becomes its number from 1. Number 0 stands for a missing category and for one that the training rows do
    not have. A number is standardized; a missing one becomes 0, the mean, and a second column marks it."""

    def __init__(self, names: dict[str, list[str]], means: list[float], scales: list[float]):
        self.names, self.means, self.scales = names, means, scales

    @classmethod
    def fit(cls, flats: pd.DataFrame) -> Self:
        "Learn the names of the categories, and mean and standard deviation of the numbers."
        names = {column: sorted(flats[column].dropna().unique()) for column in CATEGORIES}
        numbers = flats[NUMBERS]
        return cls(names, numbers.mean().tolist(), numbers.std().tolist())

    @property
    def sizes(self) -> list[int]:
        "How many numbers there are for each column of categories, with number 0."
        return [len(names) + 1 for names in self.names.values()]

    def encode(self, flats: pd.DataFrame) -> dict[str, Tensor]:
        "Return a dict of tensors with one row per flat; with the target, if there are rents."
        codes = [
            pd.Index(names).get_indexer(flats[column]) + 1  # the indexer gives -1 for other values
            for column, names in self.names.items()
        ]
        numbers = (flats[NUMBERS].to_numpy(float) - self.means) / self.scales
        is_missing = np.isnan(numbers)
        tensors = {
            'categories': torch.tensor(np.stack(codes, 1), dtype=torch.long),
            'numbers': torch.tensor(
                np.hstack([np.where(is_missing, 0, numbers), is_missing]), dtype=torch.float32
            ),
        }
        if 'rent' in flats:
            tensors['target'] = torch.tensor(np.log(flats['rent'].to_numpy()), dtype=torch.float32)
        return tensors

    def save(self, path: Path) -> None:
        "Write what was learned as JSON."
        path.write_text(json.dumps(vars(self)))

    @classmethod
    def load(cls, path: Path) -> Self:
        "Read what `save` has written."
        return cls(**json.loads(path.read_text()))


# -- model -----------------------------------------------------------------------------------------


class RentModel(nn.Module):
    "Predict the logarithm of a rent: an embedding per column of categories, then two hidden layers."

    def __init__(
        self,
        sizes: list[int],  # categories per column
        width: int = 64,  # of the hidden layers
        dropout: float = 0.1,
        mean: float = 0.0,  # of the target: the prediction before training
    ):
        super().__init__()
        self.embeddings = nn.ModuleList(
            nn.Embedding(size, min(16, (size + 1) // 2)) for size in sizes
        )
        n_embedded = sum(embedding.embedding_dim for embedding in self.embeddings)
        self.layers = nn.Sequential(
            nn.Linear(n_embedded + 2 * len(NUMBERS), width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, 1),
        )
        nn.init.constant_(self.layers[-1].bias, mean)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        embedded = [
            embedding(column)
            for embedding, column in zip(self.embeddings, categories.T, strict=True)
        ]
        return self.layers(torch.cat([*embedded, numbers], 1))[:, 0]


class HideCategories(Callback):
    "Replace some categories of a training batch by number 0, so that the model learns what to do with it."

    run_valid = False

    def __init__(self, share: float = 0.03):
        self.share = share

    def before_batch(self) -> None:
        categories = self.x['categories']
        is_hidden = torch.rand(categories.shape, device=categories.device) < self.share
        self.learn.xb = ({**self.x, 'categories': categories.masked_fill(is_hidden, 0)},)


def make_learner(
    train: dict[str, Tensor],
    valid: dict[str, Tensor],
    sizes: list[int],  # of the encoder
    folder: str | Path = '.',  # for checkpoints
    seed: int = 0,
    bs: int = 128,  # flats per batch
    width: int = 64,
    dropout: float = 0.1,
    wd: float = 0.3,  # weight decay, which keeps the embeddings of rare streets small
) -> Learner:
    "Return a Learner for one fit."
    torch.manual_seed(seed)
    dls = DataLoaders.from_tensors(train, valid, bs=bs, seed=seed)
    model = RentModel(sizes, width, dropout, float(train['target'].mean()))
    return Learner(
        dls,
        model,
        F.mse_loss,
        wd=wd,
        metrics=rmse,
        path=folder,
        cbs=[HideCategories(), Checkpoint('5ep')],
    )


# -- comparison ------------------------------------------------------------------------------------


def boost(
    encoder: Encoder,
    train: pd.DataFrame,
    valid: pd.DataFrame,
    test: pd.DataFrame,
    rates: tuple[float, ...] = (0.03, 0.1, 0.3),
    leaves: tuple[int, ...] = (7, 15, 31, 63),
    n_trees: int = 1000,  # at most: the best number is chosen, too
) -> tuple[Settings, float, np.ndarray]:
    """Choose settings of scikit-learn's gradient boosting on the validation rows.

    Returns the settings, their error on the validation rows, and the predictions for the test rows."""

    def convert(flats: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        tensors = encoder.encode(flats)
        codes = tensors['categories'].numpy().astype(float)
        codes[codes == 0] = np.nan  # boosting has its own treatment of missing values
        return np.hstack([codes, flats[NUMBERS].to_numpy(float)]), tensors['target'].numpy()

    (x_train, y_train), (x_valid, y_valid), (x_test, _) = map(convert, (train, valid, test))
    best: tuple[Settings, float, np.ndarray] = ({}, np.inf, np.array([]))
    for rate, n_leaves in product(rates, leaves):
        model = HistGradientBoostingRegressor(
            learning_rate=rate,
            max_leaf_nodes=n_leaves,
            max_iter=n_trees,
            early_stopping=False,
            categorical_features=range(len(CATEGORIES)),
        )
        model.fit(x_train, y_train)
        errors = [find_rmse(preds, y_valid) for preds in model.staged_predict(x_valid)]
        n = int(np.argmin(errors))
        if errors[n] < best[1]:
            settings = {'learning_rate': rate, 'max_leaf_nodes': n_leaves, 'trees': n + 1}
            preds = next(islice(model.staged_predict(x_test), n, None))
            best = settings, errors[n], preds
    return best


def find_rmse(preds: Any, targets: Any) -> float:
    "Return the root of the mean squared error."
    return float(np.sqrt(np.mean((np.asarray(preds) - np.asarray(targets)) ** 2)))


# -- importance, and use ---------------------------------------------------------------------------


def find_importances(
    learn: Learner,
    rows: dict[str, Tensor],
    seed: int = 0,
) -> pd.Series:
    "Return how much the error grows when one column is shuffled: permutation importance."
    rng = torch.Generator().manual_seed(seed)

    def find_error(inputs: dict[str, Tensor]) -> float:
        batches = DataLoaders.from_tensors(inputs, bs=1024, shuffle=False).train
        return find_rmse(*learn.get_preds(dl=batches))

    base = find_error(rows)
    growth = {}
    for i, column in enumerate(CATEGORIES + NUMBERS):
        order = torch.randperm(len(rows['target']), generator=rng)
        categories, numbers = rows['categories'].clone(), rows['numbers'].clone()
        if column in CATEGORIES:
            categories[:, i] = categories[order, i]
        else:
            i -= len(CATEGORIES)
            columns = [i, i + len(NUMBERS)]  # the number, and the mark of a missing one
            numbers[:, columns] = numbers[order][:, columns]
        growth[column] = find_error({**rows, 'categories': categories, 'numbers': numbers}) - base
    return pd.Series(growth).sort_values()


def predict_rents(folder: Path, flats: pd.DataFrame) -> np.ndarray:
    "Return the rents that the exported model predicts. This needs the two files of `main`, and no learnkit."
    encoder = Encoder.load(folder / 'encoder.json')
    model = torch.export.load(folder / 'rents.pt2').module()
    inputs = encoder.encode(flats.drop(columns='rent', errors='ignore'))
    return model(**inputs).exp().detach().numpy().round(0)


# -- the whole -------------------------------------------------------------------------------------


def list_settings(quick: bool = False) -> list[Settings]:
    "Return the settings to try."
    choices: dict[str, list[Any]] = {
        'width': [64, 128],
        'lr': [3e-3, 1e-2],
        'wd': [0.1, 0.3, 1.0],
    }
    if quick:
        choices = {'width': [32], 'lr': [3e-3, 1e-2]}
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def train(
    learn: Learner,
    epochs: int,
    lr: float,
    resume: bool = False,  # continue from the newest checkpoint in the Learner's folder
) -> float:  # error on the validation rows
    "Fit in as many processes as the script was started in."
    with learn.no_bar(), learn.distributed('ddp', batch_size='global'):
        learn.fit_one_cycle(epochs, lr, resume=resume)
        return float(learn.validate()[1])


def report_errors(
    fits: list[tuple[float, Learner]],  # of several seeds, with their errors on the validation rows
    encoder: Encoder,
    parts: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame],  # rows for training, validation, test
    quick: bool = False,
) -> None:
    "Print the errors of the network and of boosting on the test rows."
    test = encoder.encode(parts[2])
    targets = test['target'].numpy()
    test_dl = DataLoaders.from_tensors(test, bs=1024, shuffle=False).train
    preds = []
    for _, learn in fits:
        with learn.no_bar():
            preds.append(learn.get_preds(dl=test_dl)[0].numpy())
    errors = [find_rmse(p, targets) for p in preds]
    print(
        f'network: test {np.mean(errors):.4f} +- {np.std(errors, ddof=1):.4f} over {len(fits)} '
        f'seeds; their mean prediction {find_rmse(np.mean(preds, 0), targets):.4f}'
    )
    budget: Settings = {'rates': (0.1,), 'leaves': (7,), 'n_trees': 20} if quick else {}
    chosen, error, boosted = boost(encoder, *parts, **budget)
    print(f'boosting: validation {error:.4f}, test {find_rmse(boosted, targets):.4f}, {chosen}')
    print(f'best possible: {NOISE}')


def export_best(
    folder: Path,
    fits: list[tuple[float, Learner]],
    encoder: Encoder,
    rows: pd.DataFrame,  # for the importances
) -> None:
    "Export the network with the smallest validation error, and use what was exported."
    _, learn = min(fits, key=lambda fit: fit[0])
    with learn.no_bar():
        print(find_importances(learn, encoder.encode(rows)).round(4).to_string())
    learn.export((folder / 'rents.pt2').absolute())
    encoder.save(folder / 'encoder.json')
    some = rows[:5]
    table = some[['street', 'area', 'rent']].assign(predicted=predict_rents(folder, some))
    print(table.to_string(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description='Predict the rents of flats from a table.')
    parser.add_argument('--folder', type=Path, default=Path('rents'), help='for all files')
    parser.add_argument('--quick', action='store_true', help='few flats and short fits')
    parser.add_argument('--resume', action='store_true', help='continue a run that was killed')
    args = parser.parse_args()
    n_flats, epochs, seeds = (600, 2, 2) if args.quick else (20_000, 40, 5)
    is_first = os.environ.get('RANK', '0') == '0'  # of the processes that torchrun has started

    if args.quick and is_first:
        print('--quick shows that the script runs: its figures mean nothing.', flush=True)
    parts = split_flats(make_flats(n_flats))
    encoder = Encoder.fit(parts[0])
    train_data, valid_data, _ = map(encoder.encode, parts)

    def fit(name: str, seed: int, lr: float, **options: Any) -> tuple[float, Learner]:
        folder = args.folder / name
        learn = make_learner(train_data, valid_data, encoder.sizes, folder, seed, **options)
        error = train(learn, epochs, lr, args.resume)
        if is_first:
            print(f'{name}: validation {error:.4f}, lr {lr}, {options}', flush=True)
        return error, learn

    settings = list_settings(args.quick)
    errors = [fit(f'setting-{i}', 0, **options)[0] for i, options in enumerate(settings)]
    best = settings[int(np.argmin(errors))]
    fits = [fit(f'seed-{seed}', seed, **best) for seed in range(1, seeds + 1)]
    if is_first:
        print(f'the best settings: {best}')
        report_errors(fits, encoder, parts, args.quick)  # the test rows are looked at here
        export_best(args.folder, fits, encoder, parts[2])


if __name__ == '__main__':
    main()
