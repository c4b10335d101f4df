"""Images and time series: patches, mixers, convolutional and recurrent networks, augmentation."""

import keras
import numpy as np
import tensorflow as tf
from harness import fit, program
from keras import layers, ops

RNG = np.random.default_rng(7)
IMAGES = RNG.random((23, 6, 6, 3))
LABELS = RNG.integers(0, 3, 23)
SERIES = RNG.standard_normal((23, 6, 2))
TARGETS = np.sin(SERIES.sum(axis=(1, 2)))[:, None]
WEIGHTS = 1.0 + RNG.integers(0, 3, (23, 6))
BOXES = RNG.random((23, 9, 4))
FILMS = RNG.random((23, 3, 4, 4, 1))
INVARIANT = {"exact": ("random",)}


def logits_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Patches(layers.Layer):
    """The example's, by `extract_patches` of keras.ops."""

    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def call(self, images):
        batch_size, height, width, channels = ops.shape(images)
        patches = ops.image.extract_patches(images, size=self.patch_size)
        count = (height // self.patch_size) * (width // self.patch_size)
        return ops.reshape(patches, (batch_size, count, self.patch_size**2 * channels))


@program("https://keras.io/examples/vision/image_classification_with_vision_transformer/", options=INVARIANT)
def vision_transformer():
    """Augmentation, patches, position embeddings by `arange`, AdamW, top-k accuracy."""

    class PatchEncoder(layers.Layer):
        def __init__(self, num_patches, projection_dim):
            super().__init__()
            self.num_patches = num_patches
            self.projection = layers.Dense(units=projection_dim)
            self.position_embedding = layers.Embedding(input_dim=num_patches, output_dim=projection_dim)

        def call(self, patch):
            positions = ops.expand_dims(ops.arange(start=0, stop=self.num_patches, step=1), axis=0)
            return self.projection(patch) + self.position_embedding(positions)

    def build():
        inputs = keras.Input((6, 6, 3))
        augmented = keras.Sequential([layers.RandomFlip("horizontal"), layers.GaussianNoise(0.1)])(inputs)
        encoded = PatchEncoder(4, 4)(Patches(3)(augmented))
        x1 = layers.LayerNormalization(epsilon=1e-6)(encoded)
        x2 = layers.Add()([layers.MultiHeadAttention(2, 4, dropout=0.1, use_bias=False)(x1, x1), encoded])
        x3 = layers.Dropout(0.1)(layers.Dense(4, activation="gelu")(x2))
        representation = layers.Flatten()(layers.Add()([x3, x2]))
        model = keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.5)(representation)))
        model.compile(keras.optimizers.AdamW(0.001, weight_decay=0.0001), logits_loss(), metrics=["accuracy"])
        return model

    return build, fit(IMAGES, LABELS, predict=IMAGES)


@program("https://keras.io/examples/vision/mlp_image_classification/", towers=(4, 3))
def mlp_mixer():
    """Dense layers over patches and, transposed, over channels."""

    class MLPMixerLayer(layers.Layer):
        def __init__(self, num_patches, hidden_units):
            super().__init__()
            self.mlp1 = keras.Sequential([layers.Dense(num_patches, activation="gelu")])
            self.mlp2 = keras.Sequential([layers.Dense(hidden_units, activation="gelu")])
            self.normalize = layers.LayerNormalization(epsilon=1e-6)

        def build(self, input_shape):
            return super().build(input_shape)

        def call(self, inputs):
            x = self.normalize(inputs)
            x_channels = ops.transpose(x, axes=(0, 2, 1))
            mlp1_outputs = ops.transpose(self.mlp1(x_channels), axes=(0, 2, 1))
            x = mlp1_outputs + inputs
            return x + self.mlp2(self.normalize(x))

    def build():
        inputs = keras.Input((6, 6, 3))
        x = layers.Dense(4)(Patches(3)(inputs))
        x = MLPMixerLayer(4, 4)(x)
        model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))
        model.compile(keras.optimizers.Adam(0.001), logits_loss(), metrics=["accuracy"])
        return model

    return build, fit(IMAGES, LABELS, predict=IMAGES)


@program("https://keras.io/examples/vision/mixup/", options=INVARIANT)
def mixup_within_the_step():
    """The batch mixed with itself in another order, by a permutation of its rows and a draw per row."""

    class MixUpModel(keras.Sequential):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seeds = keras.random.SeedGenerator(1)

        def train_step(self, data):
            x, y = data
            rows = ops.shape(x)[0]
            weight = keras.random.uniform((rows, 1), seed=self.seeds)
            mixed = weight[:, :, None, None] * x + (1.0 - weight[:, :, None, None]) * ops.flip(x, axis=0)
            labels = weight * y + (1.0 - weight) * ops.flip(y, axis=0)
            return super().train_step((mixed, labels))

    def build():
        model = MixUpModel([keras.Input((6, 6, 3)), layers.Conv2D(3, 3, strides=2), layers.Flatten(), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), keras.losses.CategoricalCrossentropy(from_logits=True))
        return model

    return build, fit(IMAGES, np.eye(3)[LABELS])


@program("https://keras.io/examples/timeseries/timeseries_weather_forecasting/")
def weather_lstm():
    """An LSTM on normalised windows."""

    def build():
        inputs = keras.Input((6, 2))
        model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(4)(inputs)))
        model.compile(keras.optimizers.Adam(0.001), loss="mse")
        return model

    return build, fit(SERIES, TARGETS, predict=SERIES, evaluate=True)


@program("https://www.tensorflow.org/tutorials/structured_data/time_series")
def forecast_feeding_back():
    """An LSTM cell that feeds its own predictions back, in a Python loop, of an unbuilt subclassed model."""

    class FeedBack(keras.Model):
        def __init__(self, units, out_steps):
            super().__init__()
            self.out_steps = out_steps
            self.lstm_cell = layers.LSTMCell(units)
            self.lstm_rnn = layers.RNN(self.lstm_cell, return_state=True)
            self.dense = layers.Dense(2)

        def call(self, inputs, training=None):
            x, *state = self.lstm_rnn(inputs)
            prediction = self.dense(x)
            predictions = [prediction]
            for _ in range(1, self.out_steps):
                x, state = self.lstm_cell(prediction, states=state, training=training)
                prediction = self.dense(x)
                predictions.append(prediction)
            return tf.transpose(tf.stack(predictions), [1, 0, 2])

    def build():
        model = FeedBack(4, 3)
        model.compile(keras.optimizers.Adam(0.001), keras.losses.MeanSquaredError(), metrics=["mae"])
        return model

    return build, fit(SERIES, np.cos(SERIES[:, 3:]), predict=SERIES)


@program("https://github.com/keras-team/keras/blob/master/keras/src/losses/losses.py", options=INVARIANT)
def summed_loss_behind_gru():
    """A loss of one's own that is a sum, behind a GRU and a dropout."""

    def summed(y_true, y_pred):
        return ops.sum(ops.abs(y_true - y_pred))

    def build():
        model = keras.Sequential([keras.Input((6, 2)), layers.GRU(3), layers.Dropout(0.2), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.005), summed)
        return model

    return build, fit(SERIES, TARGETS, predict=SERIES, evaluate=True)


@program("https://keras.io/examples/vision/conv_lstm/")
def conv_lstm():
    """Frames predicted by a ConvLSTM, its whole sequence returned."""

    def build():
        inputs = keras.Input((3, 4, 4, 1))
        x = layers.ConvLSTM2D(2, (3, 3), padding="same", return_sequences=True, activation="relu")(inputs)
        outputs = layers.Conv3D(1, (3, 3, 3), activation="sigmoid", padding="same")(x)
        model = keras.Model(inputs, outputs)
        model.compile(loss="binary_crossentropy", optimizer=keras.optimizers.Adam(0.001))
        return model

    return build, fit(FILMS, np.roll(FILMS, 1, axis=1), predict=FILMS)


@program("https://keras.io/examples/timeseries/timeseries_anomaly_detection/", options=INVARIANT)
def convolutional_autoencoder():
    """Strided and transposed convolutions with dropouts; losses per sample weighted by their class."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((6, 2)),
                layers.Conv1D(4, 3, padding="same", strides=2, activation="relu"),
                layers.Dropout(rate=0.2),
                layers.Conv1DTranspose(3, 3, padding="same", strides=2, activation="relu"),
                layers.Conv1DTranspose(2, 3, padding="same"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.001), "mse")
        return model

    return build, fit(SERIES, SERIES, predict=SERIES, sample_weight=WEIGHTS)


@program("https://keras.io/examples/vision/retinanet/", towers=(4, 3))
def detection_losses():
    """Focal and box losses per anchor, summed and divided by the batch's count of positive anchors."""

    class RetinaNetLoss(keras.losses.Loss):
        def call(self, y_true, y_pred):
            box_labels, box_predictions = y_true[:, :, :4], y_pred[:, :, :4]
            classes, logits = y_true[:, :, 4], y_pred[:, :, 4]
            positive = tf.cast(tf.greater(classes, 0.0), y_pred.dtype)
            cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=positive, logits=logits)
            probabilities = tf.nn.sigmoid(logits)
            pt = tf.where(tf.equal(positive, 1.0), probabilities, 1 - probabilities)
            clf_loss = tf.pow(1.0 - pt, 2.0) * cross_entropy
            difference = tf.abs(box_labels - box_predictions)
            box_loss = tf.where(tf.less(difference, 1.0), 0.5 * difference**2, difference - 0.5)
            box_loss = tf.where(tf.equal(positive, 1.0), tf.reduce_sum(box_loss, axis=-1), 0.0)
            normalizer = tf.reduce_sum(positive)
            clf_loss = tf.math.divide_no_nan(tf.reduce_sum(clf_loss), normalizer)
            return clf_loss + tf.math.divide_no_nan(tf.reduce_sum(box_loss), normalizer)

    def build():
        inputs = keras.Input((6, 6, 3))
        x = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
        model = keras.Model(inputs, layers.Reshape((9, 5))(layers.Conv2D(5, 1)(x)))
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), RetinaNetLoss())
        return model

    boxes = np.concatenate([np.cos(BOXES), (BOXES[:, :, :1] > 0.8)], axis=-1)
    return build, fit(IMAGES, boxes, predict=IMAGES, evaluate=True)


@program("https://keras.io/examples/vision/oxford_pets_image_segmentation/")
def dice_over_the_batch():
    """A soft dice of all pixels of the batch: a ratio of sums, and a loss of Keras' of that kind."""

    def soft_dice(y_true, y_pred):
        overlap = ops.sum(y_true * y_pred)
        return 1.0 - (2.0 * overlap + 1.0) / (ops.sum(y_true) + ops.sum(y_pred) + 1.0)

    def build():
        inputs = keras.Input((6, 6, 3))
        x = layers.Conv2D(3, 3, strides=2, padding="same", activation="relu")(inputs)
        x = layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid")(x)
        model = keras.Model(inputs, x)
        tversky = keras.losses.Tversky(0.3, 0.7)
        model.compile(keras.optimizers.SGD(0.5), lambda y, p: soft_dice(y, p) + tversky(y, p))
        return model

    masks = (IMAGES[..., :1] > 0.5).astype("float64")
    return build, fit(IMAGES, masks, predict=IMAGES, evaluate=True)


@program("https://keras.io/examples/vision/zero_dce/")
def zero_dce():
    """Unsupervised losses of an image's channels and neighbours, some of them roots of means."""

    class ZeroDCE(keras.Model):
        def __init__(self):
            super().__init__()
            self.dce_model = keras.Sequential(
                [keras.Input((6, 6, 3)), layers.Conv2D(3, 3, padding="same", activation="tanh")]
            )

        def train_step(self, data):
            with tf.GradientTape() as tape:
                curves = self.dce_model(data)
                x = data + curves * (tf.square(data) - data)
                mean_rgb = tf.reduce_mean(x, axis=(1, 2), keepdims=True)
                mr, mg, mb = mean_rgb[..., 0], mean_rgb[..., 1], mean_rgb[..., 2]
                d_rg, d_rb, d_gb = tf.square(mr - mg), tf.square(mr - mb), tf.square(mb - mg)
                color = tf.reduce_mean(tf.sqrt(tf.square(d_rg) + tf.square(d_rb) + tf.square(d_gb) + 1e-9))
                exposure = tf.reduce_mean(tf.square(tf.nn.avg_pool2d(x, 3, 3, "VALID") - 0.6))
                height = tf.reduce_sum(tf.square(curves[:, 1:] - curves[:, :-1]))
                width = tf.reduce_sum(tf.square(curves[:, :, 1:] - curves[:, :, :-1]))
                batch_size = tf.cast(tf.shape(curves)[0], x.dtype)
                smooth = 2.0 * (height / 90.0 + width / 90.0) / batch_size
                total = 5.0 * color + 10.0 * exposure + 20.0 * smooth
            weights = self.dce_model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
            return {"total": total, "smoothness": smooth}

    def build():
        model = ZeroDCE()
        model.compile(keras.optimizers.Adam(0.001))
        return model

    return build, fit(IMAGES)
