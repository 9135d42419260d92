"A character model with learnkit, with weight decay on norm layers and biases too, as torch's AdamW has it."

from learnkit import CrossEntropyLossFlat, DataLoaders, GradientClip, Learner


def train(data, model, epochs, lr):
    dls = DataLoaders.from_tensors((data.x, data.y), (data.x_valid, data.y_valid), bs=32)
    learn = Learner(dls, model, CrossEntropyLossFlat(), cbs=GradientClip(1.0), wd_bn_bias=True)
    learn.fit_one_cycle(epochs, lr)
