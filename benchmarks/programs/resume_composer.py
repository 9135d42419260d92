"""Checkpoints and resume with Composer: `save_interval` and `autoresume=True`.

https://docs.mosaicml.com/projects/composer/en/stable/trainer/checkpointing.html
https://docs.mosaicml.com/projects/composer/en/stable/notebooks/auto_resumption.html"""

from composer import Trainer
from composer.algorithms import EMA
from composer.callbacks import EarlyStopper
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW

from benchmarks.programs import resume_task as task


def train(folder):
    model = ComposerClassifier(task.Net(), num_classes=task.N_CLASSES)
    step = task.SAVE_EVERY // task.ACCUMULATED
    trainer = Trainer(
        model=model,
        train_dataloader=task.train_loader(batch_size=task.BATCH * task.ACCUMULATED),
        device_train_microbatch_size=task.BATCH,
        eval_dataloader=task.valid_loader(),
        optimizers=DecoupledAdamW(model.parameters(), task.LR),
        schedulers=CosineAnnealingWithWarmupScheduler(f'{task.STEPS // 4}ba'),
        algorithms=[EMA(half_life='5ba')],
        callbacks=[EarlyStopper('CrossEntropy', 'eval', patience=f'{task.PATIENCE}ep')],
        max_duration=f'{task.EPOCHS}ep',
        run_name='run',
        save_folder=str(folder),
        save_interval=f'{step}ba',
        save_num_checkpoints_to_keep=2,
        autoresume=True,
        seed=0,
        device='cpu',
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return model.module.state_dict(), None
