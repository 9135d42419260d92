"Classification with learnkit, with weight decay on norm layers and biases too, as torch's AdamW has it."

from torch.nn import functional as F

from learnkit import DataLoaders, Learner, accuracy


def train(data, model, epochs, lr):
    dls = DataLoaders.from_tensors((data.x, data.y), (data.x_valid, data.y_valid), bs=64)
    learn = Learner(dls, model, F.cross_entropy, metrics=accuracy, wd_bn_bias=True)
    learn.fit_one_cycle(epochs, lr)
