"A character model with learnkit."

from learnkit import CrossEntropyLossFlat, DataLoaders, GradientClip, Learner


def train(data, model, epochs, lr):
    dls = DataLoaders.from_tensors((data.x, data.y), (data.x_valid, data.y_valid), bs=32)
    learn = Learner(dls, model, CrossEntropyLossFlat(), cbs=GradientClip(1.0))
    learn.fit_one_cycle(epochs, lr)
