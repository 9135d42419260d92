"""Checkpoints and resume with Ignite: `Checkpoint` and `DeterministicEngine`.

https://docs.pytorch.org/ignite/engine.html#resuming-the-training
https://docs.pytorch.org/ignite/generated/ignite.engine.deterministic.DeterministicEngine.html"""

import torch
from ignite.engine import Events, create_supervised_evaluator, supervised_training_step
from ignite.engine.deterministic import DeterministicEngine
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, EMAHandler
from ignite.handlers.param_scheduler import LRScheduler
from ignite.metrics import Loss
from ignite.utils import manual_seed
from torch.nn import functional as F

from benchmarks.programs import resume_task as task


def train(folder):
    manual_seed(0)
    model = task.Net()
    optimizer = torch.optim.AdamW(model.parameters(), task.LR)
    scheduler = LRScheduler(torch.optim.lr_scheduler.OneCycleLR(optimizer, task.LR, task.STEPS))
    update = supervised_training_step(
        model, optimizer, F.cross_entropy, gradient_accumulation_steps=task.ACCUMULATED
    )
    trainer = DeterministicEngine(update)
    every_step = Events.ITERATION_COMPLETED(every=task.ACCUMULATED)
    trainer.add_event_handler(every_step, scheduler)
    average = EMAHandler(model, momentum=1 - task.DECAY)
    average.attach(trainer, event=every_step)
    evaluator = create_supervised_evaluator(model, {'loss': Loss(F.cross_entropy)})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(task.valid_loader()))
    stopper = EarlyStopping(task.PATIENCE, lambda e: -e.state.metrics['loss'], trainer)
    evaluator.add_event_handler(Events.COMPLETED, stopper)
    to_save = {
        'model': model,
        'optimizer': optimizer,
        'scheduler': scheduler,
        'trainer': trainer,
        'average': average.ema_model,
        'stopper': stopper,
    }
    saver = Checkpoint(to_save, DiskSaver(folder, require_empty=False), n_saved=2)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=task.SAVE_EVERY), saver)
    saved = sorted(folder.glob('checkpoint_*.pt'), key=lambda path: int(path.stem.split('_')[1]))
    if saved:
        Checkpoint.load_objects(to_save, torch.load(saved[-1], weights_only=False))
    trainer.run(task.train_loader(), task.EPOCHS)
    return model.state_dict(), None
