"""Checkpoints and resume with Keras 3 on torch: `BackupAndRestore`.

https://keras.io/api/callbacks/backup_and_restore/"""

import csv

import keras
import torch

from benchmarks.programs import resume_task as task


class Features(keras.layers.Layer):
    "Logs the samples' numbers, and returns the features."

    def call(self, x, training=False):
        if training and x.device.type == 'cpu':
            task.log_samples(x[:, 0])
        return x[:, 1:]


def train(folder):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((task.N_FEATURES + 1,)),
            Features(),
            keras.layers.Dense(64),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(task.N_CLASSES),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(
        task.LR / 25, task.STEPS * 3 // 4, warmup_target=task.LR, warmup_steps=task.STEPS // 4
    )
    optimizer = keras.optimizers.AdamW(
        rate,
        gradient_accumulation_steps=task.ACCUMULATED,
        use_ema=True,
        ema_momentum=task.DECAY,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    callbacks = [
        keras.callbacks.BackupAndRestore(str(folder / 'backup'), save_freq=task.SAVE_EVERY),
        keras.callbacks.EarlyStopping('val_loss', patience=task.PATIENCE),
        keras.callbacks.CSVLogger(str(folder / 'log.csv'), append=True),
    ]
    model.fit(
        task.train_loader(),
        epochs=task.EPOCHS,
        validation_data=task.valid_loader(),
        callbacks=callbacks,
        verbose=0,
    )
    weights = {f'{i}': torch.tensor(w) for i, w in enumerate(model.get_weights())}
    rows = csv.DictReader((folder / 'log.csv').open())
    return weights, [float(row['val_loss']) for row in rows]
