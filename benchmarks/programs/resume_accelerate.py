"""Checkpoints and resume with Accelerate: `save_state`, `load_state` and `skip_first_batches`.

https://huggingface.co/docs/accelerate/usage_guides/checkpoint
The loop is that of the example `checkpointing.py` in Accelerate's repository; the sampler is seedable, as its
documentation recommends for reproducible training."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.programs import resume_task as task


class Stopper:
    def __init__(self):
        self.best, self.wait, self.losses = float('inf'), 0, []

    def should_stop(self, loss):
        self.losses.append(loss)
        self.wait = 0 if loss < self.best else self.wait + 1
        self.best = min(self.best, loss)
        return self.wait >= task.PATIENCE

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    return sum(F.cross_entropy(model(x), y).item() for x, y in loader) / len(loader)


def train(folder):
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=task.ACCUMULATED,
        project_config=ProjectConfiguration(str(folder), total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model = task.Net()
    optimizer = torch.optim.AdamW(model.parameters(), task.LR)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.LR, task.STEPS)
    model, optimizer, train_loader, valid_loader, scheduler = accelerator.prepare(
        model, optimizer, task.train_loader(), task.valid_loader(), scheduler
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(task.DECAY))
    stopper = Stopper()
    accelerator.register_for_checkpointing(average, stopper)

    first_epoch = n_done = 0
    saved = sorted(folder.glob('step_*'), key=lambda path: int(path.name[5:]))
    if saved:
        accelerator.load_state(str(saved[-1]))
        first_epoch, n_done = divmod(int(saved[-1].name[5:]), task.BATCHES)
    for epoch in range(first_epoch, task.EPOCHS):
        model.train()
        train_loader.set_epoch(epoch)
        loader = train_loader
        if n_done:
            loader = accelerator.skip_first_batches(train_loader, n_done)
        for i, (x, y) in enumerate(loader, n_done):
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.update_parameters(model)
            if (i + 1) % task.SAVE_EVERY == 0:
                accelerator.save_state(str(folder / f'step_{epoch * task.BATCHES + i + 1}'))
        n_done = 0
        if stopper.should_stop(validate(model, valid_loader)):
            break
    return model.state_dict(), stopper.losses
