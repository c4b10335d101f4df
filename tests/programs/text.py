"""Text and speech: transformers, masked losses that are ratios of sums, CTC, recurrent networks."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from harness import fit, program
from keras import layers, ops
from thorough import some

RNG = np.random.default_rng(3)
VOCABULARY, LENGTH = 11, 5
TOKENS = RNG.integers(1, VOCABULARY, (23, LENGTH))
# Sentences of other lengths, so that the towers' shards hold other counts of valid tokens.
MASKED = TOKENS * (np.arange(LENGTH) < RNG.integers(1, LENGTH + 1, 23)[:, None])
LABELS = RNG.integers(0, 2, 23)
CHOSEN = (RNG.random((23, LENGTH)) < 0.4).astype("float64")
WORDS = RNG.integers(1, 5, (23, 3))
SPECTRA = RNG.standard_normal((23, 8, 3))
INVARIANT = {"exact": ("random",)}


class TokenAndPositionEmbedding(layers.Layer):
    """One table looked up by the batch's tokens, one by positions that are the same for every batch."""

    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        maxlen = ops.shape(x)[-1]
        positions = ops.arange(start=0, stop=maxlen, step=1)
        return self.token_emb(x) + self.pos_emb(positions)


class TransformerBlock(layers.Layer):
    """Attention and a feed-forward network, each behind a dropout and normalised.

    Attention has no biases: that of the keys has a gradient of 0, of which rounding decides the sign.
    """

    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1, causal=False):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim, use_bias=False)
        self.ffn = keras.Sequential([layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)
        self.causal = causal

    def call(self, inputs, training=False):
        attn_output = self.att(inputs, inputs, use_causal_mask=self.causal)
        attn_output = self.dropout1(attn_output, training=training)
        out1 = self.layernorm1(inputs + attn_output)
        ffn_output = self.ffn(out1)
        ffn_output = self.dropout2(ffn_output, training=training)
        return self.layernorm2(out1 + ffn_output)


# Every optimizer of Keras that trains: their rates are small, so that none amplifies rounding. `parity` holds each of
# them in float32; here are those whose updates compare elements, or know of steps.
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.001),
    "amsgrad": lambda: keras.optimizers.Adam(0.001, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.001),
    "adamax": lambda: keras.optimizers.Adamax(0.001),
    "nadam": lambda: keras.optimizers.Nadam(0.001),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.001, momentum=0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.001),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
    "lion": lambda: keras.optimizers.Lion(0.001),
    "lamb": lambda: keras.optimizers.Lamb(0.001),
    "muon": lambda: keras.optimizers.Muon(0.001),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.001)),
    "clipped": lambda: keras.optimizers.Adam(0.001, global_clipnorm=0.1),
    "accumulating": lambda: keras.optimizers.Adam(0.001, gradient_accumulation_steps=2),
    "averaged": lambda: keras.optimizers.RMSprop(0.001, use_ema=True, ema_momentum=0.9),
}


def classifier_by(optimizer):
    """Text classification with a transformer, whose positions are looked up by `arange`."""

    def build():
        inputs = keras.Input((LENGTH,), dtype="int64")
        x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, 4)(inputs)
        x = TransformerBlock(4, 2, 4)(x)
        x = layers.GlobalAveragePooling1D()(x)
        x = layers.Dropout(0.1)(x)
        x = layers.Dense(5, activation="relu")(x)
        outputs = layers.Dense(2, activation="softmax")(x)
        model = keras.Model(inputs, outputs)
        model.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return build, fit(TOKENS, LABELS)


def _classifier_of(optimizer):
    def make():
        return classifier_by(optimizer)

    make.__doc__ = classifier_by.__doc__
    return make


SAMPLE = ("sgd", "adam", "adafactor", "lamb", "muon", "loss_scale", "clipped", "accumulating")

for _name in some(SAMPLE, OPTIMIZERS):
    program(
        "https://keras.io/examples/nlp/text_classification_with_transformer/",
        name=f"text_classification_{_name}",
        options=INVARIANT,
    )(_classifier_of(OPTIMIZERS[_name]))


def masked_loss(label, pred):
    """The tutorial's: a sum over the valid tokens by their count."""
    mask = label != 0
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    loss = loss_object(label, pred)
    mask = tf.cast(mask, dtype=loss.dtype)
    loss *= mask
    return tf.reduce_sum(loss) / tf.reduce_sum(mask)


def masked_accuracy(label, pred):
    """The same of the tokens that are right."""
    pred = tf.argmax(pred, axis=2)
    label = tf.cast(label, pred.dtype)
    mask = label != 0
    match = (label == pred) & mask
    match = tf.cast(match, dtype="float64")
    mask = tf.cast(mask, dtype="float64")
    return tf.reduce_sum(match) / tf.reduce_sum(mask)


def translator(rate):
    class Translator(keras.Model):
        """The tutorial's encoder and decoder: unbuilt until the first call, positions by a constant table."""

        def __init__(self):
            super().__init__()
            self.source = layers.Embedding(VOCABULARY, 4, mask_zero=True)
            self.target = layers.Embedding(VOCABULARY, 4, mask_zero=True)
            self.pos_encoding = tf.constant(np.sin(np.arange(LENGTH * 4).reshape(1, LENGTH, 4)))
            self.dropout = layers.Dropout(rate)
            self.encoder = TransformerBlock(4, 1, 4, rate)
            self.decoder = TransformerBlock(4, 1, 4, rate, causal=True)
            self.cross = layers.MultiHeadAttention(1, 4, use_bias=False)
            self.add = layers.Add()
            self.layernorm = layers.LayerNormalization()
            self.final_layer = layers.Dense(VOCABULARY)

        def call(self, inputs):
            context, x = inputs
            context = self.dropout(self.source(context) * 2.0 + self.pos_encoding)
            context = self.encoder(context)
            x = self.decoder(self.dropout(self.target(x) * 2.0 + self.pos_encoding))
            x = self.layernorm(self.add([x, self.cross(query=x, key=context, value=context)]))
            logits = self.final_layer(x)
            with contextlib.suppress(AttributeError):
                del logits._keras_mask  # as the tutorial does, so that Keras does not scale what is masked
            return logits

    def build():
        model = Translator()
        optimizer = keras.optimizers.Adam(0.001, beta_1=0.9, beta_2=0.98, epsilon=1e-6)
        model.compile(optimizer, masked_loss, metrics=[masked_accuracy])
        return model

    x = (MASKED, np.roll(MASKED, 1, axis=0))
    return build, fit(x, np.roll(MASKED, 1, axis=0), predict=x, evaluate=True)


@program("https://www.tensorflow.org/text/tutorials/transformer", options=INVARIANT, towers=(4, 3))
def translation_transformer():
    """A masked loss and accuracy, each a ratio of sums, behind dropouts and attention."""
    return translator(rate=0.1)


@program("https://www.tensorflow.org/text/tutorials/transformer")
def translation_transformer_without_dropout():
    """The same without random numbers."""
    return translator(rate=0.0)


@program("https://www.tensorflow.org/text/tutorials/nmt_with_attention")
def translation_with_gru():
    """Two GRUs, attention, and the same masked loss."""

    class Translator(keras.Model):
        def __init__(self, units=4):
            super().__init__()
            self.embedding = layers.Embedding(VOCABULARY, units, mask_zero=True)
            self.rnn = layers.GRU(units, return_sequences=True)
            self.target_embedding = layers.Embedding(VOCABULARY, units, mask_zero=True)
            self.decoder = layers.GRU(units, return_sequences=True)
            self.attention = layers.MultiHeadAttention(key_dim=units, num_heads=1, use_bias=False)
            self.layernorm = layers.LayerNormalization()
            self.add = layers.Add()
            self.output_layer = layers.Dense(VOCABULARY)

        def call(self, inputs):
            context, x = inputs
            context = self.rnn(self.embedding(context))
            x = self.decoder(self.target_embedding(x))
            x = self.layernorm(self.add([x, self.attention(query=x, value=context)]))
            return self.output_layer(x)

    def build():
        model = Translator()
        model.compile(keras.optimizers.Adam(0.001), masked_loss, metrics=[masked_accuracy])
        return model

    x = (MASKED, np.roll(MASKED, 1, axis=0))
    return build, fit(x, np.roll(MASKED, 1, axis=0), predict=x)


@program("https://keras.io/examples/nlp/ner_transformers/", options=INVARIANT)
def named_entities():
    """A loss class that divides a sum over valid tokens by their count, of an unbuilt subclassed model."""

    class NERModel(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding_layer = TokenAndPositionEmbedding(LENGTH, VOCABULARY, 4)
            self.transformer_block = TransformerBlock(4, 2, 4)
            self.dropout1 = layers.Dropout(0.1)
            self.ff = layers.Dense(5, activation="relu")
            self.dropout2 = layers.Dropout(0.1)
            self.ff_final = layers.Dense(4, activation="softmax")

        def call(self, inputs, training=False):
            x = self.embedding_layer(inputs)
            x = self.transformer_block(x)
            x = self.dropout1(x, training=training)
            x = self.ff(x)
            x = self.dropout2(x, training=training)
            return self.ff_final(x)

    class CustomNonPaddingTokenLoss(keras.losses.Loss):
        def __init__(self, name="custom_ner_loss"):
            super().__init__(name=name)

        def call(self, y_true, y_pred):
            loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=False, reduction=None)
            loss = loss_fn(y_true, y_pred)
            mask = ops.cast((y_true > 0), dtype=loss.dtype)
            loss = loss * mask
            return ops.sum(loss) / ops.sum(mask)

    def build():
        model = NERModel()
        model.compile(keras.optimizers.Adam(0.001), loss=CustomNonPaddingTokenLoss())
        return model

    return build, fit(TOKENS, MASKED % 4, predict=TOKENS)


@program("https://keras.io/examples/nlp/masked_language_modeling/")
def masked_language_model():
    """Sample weights choose the tokens that were masked; the metric is weighted alike."""

    class MaskedLanguageModel(keras.Model):
        def train_step(self, inputs):
            features, labels, sample_weight = inputs
            with tf.GradientTape() as tape:
                predictions = self(features, training=True)
                loss = loss_fn(labels, predictions, sample_weight=sample_weight)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.loss_tracker.update_state(loss, sample_weight=sample_weight)
            return {"loss": self.loss_tracker.result()}

        @property
        def metrics(self):
            return [self.loss_tracker]

    loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    def build():
        inputs = keras.Input((LENGTH,), dtype="int64")
        x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, 4)(inputs)
        x = TransformerBlock(4, 1, 4, rate=0.0)(x)
        outputs = layers.Dense(VOCABULARY, activation="softmax")(x)
        model = MaskedLanguageModel(inputs, outputs)
        model.loss_tracker = keras.metrics.Mean(name="loss")
        model.compile(keras.optimizers.SGD(0.01))
        return model

    masked = np.where(CHOSEN > 0, 1, TOKENS)
    dataset = tf.data.Dataset.from_tensor_slices((masked, TOKENS, CHOSEN))
    return build, fit(dataset.batch(10), predict=TOKENS)


@program("https://keras.io/examples/generative/text_generation_with_miniature_gpt/", options=INVARIANT)
def miniature_gpt():
    """Two outputs, of which one has a loss; a causal mask that is built of the batch's size."""

    def causal_attention_mask(batch_size, n_dest, n_src, dtype):
        i = ops.arange(n_dest)[:, None]
        j = ops.arange(n_src)
        m = i >= j - n_src + n_dest
        mask = tf.reshape(tf.cast(m, dtype), [1, n_dest, n_src])
        mult = tf.concat([tf.expand_dims(batch_size, -1), tf.constant([1, 1], dtype=tf.int32)], 0)
        return tf.tile(mask, mult)

    class CausalBlock(TransformerBlock):
        def compute_output_spec(self, inputs):
            return keras.KerasTensor(inputs.shape, inputs.dtype)

        def call(self, inputs):
            input_shape = tf.shape(inputs)
            batch_size, seq_len = input_shape[0], input_shape[1]
            causal_mask = causal_attention_mask(batch_size, seq_len, seq_len, "bool")
            attention_output = self.dropout1(self.att(inputs, inputs, attention_mask=causal_mask))
            out1 = self.layernorm1(inputs + attention_output)
            return self.layernorm2(out1 + self.dropout2(self.ffn(out1)))

    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, 4)(inputs)
        x = CausalBlock(4, 2, 4)(x)
        outputs = layers.Dense(VOCABULARY)(x)
        model = keras.Model(inputs, [outputs, x])
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss=[loss_fn, None])
        return model

    return build, fit(TOKENS, np.roll(TOKENS, -1, axis=1), predict=TOKENS)


class CTCLayer(layers.Layer):
    """Adds the loss of each sample, a vector, to the model's losses: their sum is differentiated."""

    def __init__(self, reduce=None, **kwargs):
        super().__init__(**kwargs)
        self.reduce = reduce

    def call(self, y_true, y_pred):
        batch_len = ops.cast(ops.shape(y_true)[0], dtype="int32")
        input_length = ops.cast(ops.shape(y_pred)[1], dtype="int32") * ops.ones((batch_len,), dtype="int32")
        label_length = ops.cast(ops.shape(y_true)[1], dtype="int32") * ops.ones((batch_len,), dtype="int32")
        loss = ops.ctc_loss(y_true, y_pred, label_length, input_length)
        self.add_loss(loss if self.reduce is None else self.reduce(loss))
        return y_pred


def captcha(reduce):
    def build():
        inputs, labels = keras.Input((8, 3), name="image"), keras.Input((3,), name="label", dtype="int32")
        x = layers.Dense(4, activation="relu")(inputs)
        x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
        x = layers.Dense(5)(x)
        output = CTCLayer(reduce, name="ctc_loss")(labels, x)
        model = keras.Model([inputs, labels], output)
        model.compile(keras.optimizers.SGD(0.01))
        return model

    x = {"image": SPECTRA, "label": WORDS}
    return build, fit(x, predict=x)


# Float32: TensorFlow's CTC loss takes nothing else.
CTC = {"floatx": "float32", "tolerance": 2e-6}


@program("https://keras.io/examples/vision/captcha_ocr/", **CTC)
def captcha_ocr():
    """The example's endpoint layer: `add_loss` of a vector."""
    return captcha(None)


@program("https://keras.io/examples/vision/captcha_ocr/", **CTC)
def captcha_ocr_by_sum():
    """The same with the sum written out."""
    return captcha(ops.sum)


@program("https://keras.io/examples/audio/ctc_asr/", **CTC)
def speech_recognition():
    """The loss of each sample as a compiled loss function, of which Keras takes the mean."""

    def ctc_loss(y_true, y_pred):
        batch_len = ops.shape(y_true)[0]
        input_length = ops.full((batch_len,), ops.shape(y_pred)[1], dtype="int32")
        label_length = ops.full((batch_len,), ops.shape(y_true)[1], dtype="int32")
        return ops.ctc_loss(y_true, y_pred, label_length, input_length)

    def build():
        inputs = keras.Input((8, 3))
        x = layers.Conv1D(4, 3, padding="same", use_bias=False, activation="relu")(inputs)
        x = layers.Bidirectional(layers.GRU(3, return_sequences=True))(x)
        model = keras.Model(inputs, layers.Dense(5)(x))
        model.compile(keras.optimizers.SGD(0.05), loss=ctc_loss)
        return model

    return build, fit(SPECTRA, WORDS, predict=SPECTRA)
