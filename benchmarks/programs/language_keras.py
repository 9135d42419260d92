"A character model with Keras 3 on torch."

import keras


def train(data, model, epochs, lr):
    steps = epochs * -(-len(data.x) // 32)
    schedule = keras.optimizers.schedules.CosineDecay(
        lr / 25, steps * 3 // 4, warmup_target=lr, warmup_steps=steps // 4
    )
    net = keras.Sequential([keras.layers.TorchModuleWrapper(model)])
    net.compile(
        optimizer=keras.optimizers.AdamW(schedule, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    validation_data = data.x_valid, data.y_valid
    net.fit(data.x, data.y, batch_size=32, epochs=epochs, validation_data=validation_data)
