"""Checkpoints and resume with Hugging Face's Trainer: `save_steps` and `train(resume_from_checkpoint=...)`.

https://huggingface.co/docs/transformers/trainer
The state of callbacks is restored, as the option `restore_callback_states_from_checkpoint` asks for."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.programs import resume_task as task


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = task.Net()

    def forward(self, x, labels):
        logits = self.net(x)
        return {'loss': F.cross_entropy(logits, labels), 'logits': logits}


def collate(rows):
    x, y = torch.utils.data.default_collate(rows)
    return {'x': x, 'labels': y}


def train(folder):
    set_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), task.LR)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.LR, task.STEPS)
    options = TrainingArguments(
        str(folder),
        num_train_epochs=task.EPOCHS,
        per_device_train_batch_size=task.BATCH,
        per_device_eval_batch_size=task.N_VALID,
        gradient_accumulation_steps=task.ACCUMULATED,
        dataloader_num_workers=2,
        eval_strategy='epoch',
        save_strategy='steps',
        save_steps=task.SAVE_EVERY // task.ACCUMULATED,
        save_total_limit=2,
        metric_for_best_model='eval_loss',
        greater_is_better=False,
        restore_callback_states_from_checkpoint=True,
        remove_unused_columns=False,
        report_to='none',
        use_cpu=True,
    )
    trainer = Trainer(
        model,
        options,
        train_dataset=task.train_rows(),
        eval_dataset=task.valid_rows(),
        data_collator=collate,
        optimizers=(optimizer, scheduler),
        callbacks=[EarlyStoppingCallback(task.PATIENCE)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    losses = [row['eval_loss'] for row in trainer.state.log_history if 'eval_loss' in row]
    return model.net.state_dict(), losses
