"""Objects in a wrong place are refused in one line, and a user's note hides neither hint nor place of an error."""

from typing import Any

import torch
from torch import Tensor, nn

from learnkit import Learner
from learnkit.core.errors import LearnkitError
from learnkit.distributed.failures import describe_place
from learnkit.interop import from_composer, from_hf, from_keras, from_lightning
from tests.silent.cases import case

BATCHES = [(torch.zeros(2, 1), torch.zeros(2, 1))]
NOTE = 'in row 7 of data.csv'
Pair = tuple[Any, Any]


def stand_in(module: str, name: str) -> Any:
    "Return an instance of a class as another library defines it."
    do_nothing = lambda self, *args, **kwargs: None
    methods = {'fit': do_nothing, 'close': do_nothing, 'log_metrics': do_nothing}
    return type(name, (), {'__module__': module, **methods})()


def try_call(f: Any, *args: Any) -> str:
    "Return the name of an error and the number of lines of its message, or the class of the result."
    try:
        return type(f(*args)).__name__
    except LearnkitError as e:
        return f'{type(e).__name__}, {len(str(e).splitlines())} line'


class Module(nn.Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@case(
    'one line',
    'from_lightning(module, data, L.Trainer(...))',
    old='a Learner that ignores the options',
)
def trainer_of_lightning() -> Pair:
    trainer = stand_in('lightning.pytorch.trainer.trainer', 'Trainer')
    return try_call(from_lightning, Module(1, 1), BATCHES, trainer), 'CallbackError, 1 line'


@case('one line', 'from_keras(model)', old='a callback that does nothing')
def model_of_keras() -> Pair:
    model = stand_in('keras.src.models.model', 'Model')
    return try_call(from_keras, model), 'CallbackError, 1 line'


@case('one line', 'from_hf(model)', old='CallbackError, 4 lines')
def model_of_transformers() -> Pair:
    return try_call(from_hf, nn.Sequential(nn.Linear(1, 1), nn.ReLU())), 'CallbackError, 1 line'


@case('one line', "from_composer(Hugging Face's Trainer)", old='a callback that does nothing')
def trainer_of_transformers() -> Pair:
    trainer = stand_in('transformers.trainer', 'Trainer')
    return try_call(from_composer, trainer), 'CallbackError, 1 line'


@case('one line', 'from_composer(Trainer of Composer)', old='a callback that does nothing')
def trainer_of_composer() -> Pair:
    trainer = stand_in('composer.trainer.trainer', 'Trainer')
    return try_call(from_composer, trainer), 'CallbackError, 1 line'


@case('one line', 'Learner(data, MSELoss())', old='a Learner')
def loss_as_model() -> Pair:
    return try_call(Learner, BATCHES, nn.MSELoss()), 'ModelError, 1 line'


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        e = ValueError('broken')
        e.add_note(NOTE)
        raise e


@case('one line', "notes of an error with a user's note", old='[in row 7 of data.csv]')
def notes() -> Pair:
    learn = Learner(BATCHES, Failing(1, 1), nn.MSELoss())
    try:
        with learn.no_bar():
            learn.fit(1)
    except ValueError as e:
        found = e.__notes__
    hint, place = 'Failing got (Tensor[2, 1] float32,)', 'in train (epoch 0, batch 0)'
    return found, [NOTE, hint, place]


@case('one line', 'place of such an error in the report of a rank', old='in row 7 of data.csv')
def place_in_report() -> Pair:
    e = ValueError('broken')
    e.add_note(NOTE)
    learn = Learner(BATCHES, nn.Linear(1, 1), nn.MSELoss())
    return describe_place(e, learn), 'in train (epoch 0, batch 0)'
