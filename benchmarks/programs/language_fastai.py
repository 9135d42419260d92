"A character model with fastai."

# ruff: noqa: F403, F405
from fastai.basics import *
from fastai.callback.all import *
from torch.utils.data import TensorDataset


def train(data, model, epochs, lr):
    train_set = TensorDataset(torch.from_numpy(data.x), torch.from_numpy(data.y))
    valid_set = TensorDataset(torch.from_numpy(data.x_valid), torch.from_numpy(data.y_valid))
    dls = DataLoaders.from_dsets(train_set, valid_set, bs=32, num_workers=0)
    learn = Learner(dls, model, CrossEntropyLossFlat(), cbs=GradientClip(1.0))
    learn.fit_one_cycle(epochs, lr)
