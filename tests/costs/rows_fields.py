"""Programs of every field, in small: text, speech, images, tables, ranking, graphs, diffusion, reinforcement."""

import functools

import keras
import numpy as np
import tensorflow as tf
from costs import fits, row, runs
from keras import layers, losses, ops

RNG = np.random.default_rng(3)
COUNT, CLASSES, TIME, WORDS, WIDTH = 22, 5, 7, 40, 16


def floats(*shape):
    return RNG.random((COUNT, *shape)).astype("float32")


def integers(high, *shape):
    return RNG.integers(0, high, (COUNT, *shape)).astype("int32")


LABELS, TOKENS, NEXT = integers(CLASSES), integers(WORDS, TIME), integers(WORDS, TIME)
IMAGES, WIDE = floats(8, 8, 3), floats(12)


def fitted(model_of, loss, x, *others, metrics=None, optimizer="sgd"):
    """A `run` of a model, which `model_of()` makes."""

    def build():
        model = model_of()
        model.compile(optimizer, loss() if callable(loss) else loss, metrics=metrics, jit_compile=False)
        return model

    return fits(build, x, *others)


def sparse():
    return losses.SparseCategoricalCrossentropy(from_logits=True)


def own(*made, x, loss):
    """A `run` of a step that trains the layers that `made` are makers of: `loss(batch, *layers)`."""

    def make():
        parts = [one() for one in made]
        optimizer = keras.optimizers.SGD(0.1)

        def step(batch):
            with tf.GradientTape() as tape:
                value = loss(batch, *parts)
            variables = [variable for part in parts for variable in part.trainable_variables]
            optimizer.apply(tape.gradient(value, variables), variables)
            return value

        return step

    return runs(make, x)


def mlp(inputs, units, *, hidden=WIDTH, activation="relu"):
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(hidden, activation), layers.Dense(units)])


# Text.


def block(x, **options):
    """A block of a transformer."""
    normal = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, WIDTH // 2)(normal, normal, **options)
    return x + layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, "gelu")(layers.LayerNormalization()(x)))


class Positions(layers.Layer):
    def build(self, shape):
        self.places = self.add_weight(shape=(TIME, WIDTH))

    def call(self, x):
        return x + self.places[: ops.shape(x)[1]]


def gpt(tied=False, mask=False):
    tokens = keras.Input((TIME,), dtype="int32")
    table = layers.ReversibleEmbedding(WORDS, WIDTH, mask_zero=mask)
    x = Positions()(table(tokens))
    for _ in range(2):
        x = block(x, use_causal_mask=True)
    return keras.Model(tokens, table(x, reverse=True) if tied else layers.Dense(WORDS)(x))


def lstm_lm(mask=True):
    words = layers.Embedding(WORDS, WIDTH, mask_zero=mask)
    return keras.Sequential(
        [keras.Input((TIME,), dtype="int32"), words, layers.LSTM(WIDTH, return_sequences=True), layers.Dense(WORDS)]
    )


def seq2seq(mask=True, cls=layers.LSTM):
    source, target = (keras.Input((TIME,), dtype="int32") for _ in range(2))
    embedded = layers.Embedding(WORDS, WIDTH, mask_zero=mask)(source)
    _, *state = cls(WIDTH, return_state=True)(embedded)
    embedded = layers.Embedding(WORDS, WIDTH, mask_zero=mask)(target)
    x = cls(WIDTH, return_sequences=True)(embedded, initial_state=state)
    return keras.Model([source, target], layers.Dense(WORDS)(x))


def transformer_seq2seq():
    source, target = (keras.Input((TIME,), dtype="int32") for _ in range(2))
    read = block(layers.Embedding(WORDS, WIDTH, mask_zero=True)(source))
    x = block(layers.Embedding(WORDS, WIDTH, mask_zero=True)(target), use_causal_mask=True)
    x = x + layers.MultiHeadAttention(2, WIDTH // 2)(x, read)
    return keras.Model([source, target], layers.Dense(WORDS)(x))


def bahdanau():
    source, target = (keras.Input((TIME,), dtype="int32") for _ in range(2))
    read = layers.Bidirectional(layers.GRU(WIDTH // 2, return_sequences=True))(
        layers.Embedding(WORDS, WIDTH, mask_zero=True)(source)
    )
    x = layers.GRU(WIDTH, return_sequences=True)(layers.Embedding(WORDS, WIDTH, mask_zero=True)(target))
    x = layers.Concatenate()([x, layers.AdditiveAttention()([x, read])])
    return keras.Model([source, target], layers.Dense(WORDS)(x))


def bert():
    """Words that are hidden are looked up by their places in each row."""
    tokens, places = keras.Input((TIME,), dtype="int32"), keras.Input((2,), dtype="int32")
    x = block(layers.Embedding(WORDS, WIDTH)(tokens))
    x = layers.Lambda(lambda both: tf.gather(*both, batch_dims=1), output_shape=(2, WIDTH))([x, places])
    return keras.Model([tokens, places], layers.Dense(WORDS)(x))


def text_cnn():
    tokens = keras.Input((TIME,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    x = [layers.GlobalMaxPooling1D()(layers.Conv1D(8, n, activation="relu")(x)) for n in (2, 3)]
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.Concatenate()(x)))


def stateful(recurrent):
    inputs = keras.Input((TIME, 4), batch_size=COUNT)
    return keras.Model(inputs, layers.Dense(CLASSES)(recurrent(inputs)))


class Memory(layers.Layer):
    """Keeps what it has seen of each row, in a variable of so many rows."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(COUNT, *shape[1:]), initializer="zeros", trainable=False)
        self.kernel = self.add_weight(shape=(shape[-1], CLASSES))

    def call(self, x):
        found = ops.reshape(self.seen * 0.9 + x, (-1, TIME * 2, 2))
        self.seen.assign(ops.stop_gradient(ops.reshape(found, (-1, TIME, 4))))
        return ops.matmul(ops.mean(ops.reshape(found, (-1, TIME, 4)), 1), self.kernel)


def remembering():
    return keras.Sequential([keras.Input((TIME, 4), batch_size=COUNT), Memory()])


class Crf(layers.Layer):
    """The forward algorithm: the log of the sum over all sequences of labels."""

    def build(self, shape):
        self.moves = self.add_weight(shape=(CLASSES, CLASSES))

    def call(self, scores):
        def after(alpha, one):
            alpha = ops.logsumexp(alpha[:, :, None] + self.moves[None], axis=1) + one
            return alpha, alpha

        steps = ops.transpose(scores, (1, 0, 2))
        return ops.logsumexp(ops.scan(after, steps[0], steps[1:])[0], axis=1)


row(
    "LSTM classifier",
    fitted(
        lambda: keras.Sequential(
            [keras.Input((TIME,), dtype="int32"), layers.Embedding(WORDS, 8), layers.LSTM(8), layers.Dense(CLASSES)]
        ),
        sparse,
        TOKENS,
        LABELS,
        metrics=["accuracy"],
        optimizer="adam",
    ),
)
row("LSTM language model", fitted(lambda: lstm_lm(mask=False), sparse, TOKENS, NEXT, metrics=["accuracy"]))
row("LSTM language model, masked", fitted(lstm_lm, sparse, TOKENS, NEXT, metrics=["accuracy"]))
KEPT = {"AssignVariableOp": "every tower has all rows of the state"}
for name, recurrent in {
    "LSTM stateful": lambda: layers.LSTM(8, stateful=True),
    "LSTM stateful, unrolled": lambda: layers.LSTM(8, stateful=True, unroll=True),
    "GRU stateful, bidirectional": lambda: layers.Bidirectional(layers.GRU(8, stateful=True)),
    "SimpleRNN stateful, return_sequences": lambda: keras.Sequential(
        [layers.SimpleRNN(8, stateful=True, return_sequences=True), layers.GlobalAveragePooling1D()]
    ),
}.items():
    build = functools.partial(lambda recurrent: stateful(recurrent()), recurrent)
    row(name, fitted(build, sparse, floats(TIME, 4), LABELS), KEPT)
row("a memory of each row", fitted(remembering, sparse, floats(TIME, 4), LABELS), KEPT)
row("GPT", fitted(gpt, sparse, TOKENS, NEXT, metrics=["accuracy"], optimizer="adam"))
row("GPT tied", fitted(lambda: gpt(tied=True), sparse, TOKENS, NEXT))
row("GPT masked", fitted(lambda: gpt(mask=True), sparse, TOKENS, NEXT, floats(TIME)))
row("BERT", fitted(bert, sparse, [TOKENS, integers(TIME, 2)], integers(WORDS, 2), floats(2)))
row("seq2seq", fitted(lambda: seq2seq(mask=False), sparse, [TOKENS, TOKENS], NEXT))
row("seq2seq masked", fitted(seq2seq, sparse, [TOKENS, TOKENS], NEXT, metrics=["accuracy"]))
row("seq2seq GRU masked", fitted(functools.partial(seq2seq, cls=layers.GRU), sparse, [TOKENS, TOKENS], NEXT))
row("seq2seq with attention", fitted(bahdanau, sparse, [TOKENS, TOKENS], NEXT))
row("seq2seq transformer", fitted(transformer_seq2seq, sparse, [TOKENS, TOKENS], NEXT, metrics=["accuracy"]))
row("text CNN", fitted(text_cnn, sparse, TOKENS, LABELS))
row(
    "CRF",
    own(lambda: layers.Dense(CLASSES), Crf, x=floats(TIME, 8), loss=lambda x, dense, crf: ops.mean(crf(dense(x)))),
)


# Sparse and ragged inputs.


def sparse_input():
    inputs = keras.Input((30,), sparse=True)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Dense(8, "relu")(inputs)))


def sparse_rows(height=30):
    dense = RNG.random((COUNT, height)) * (RNG.random((COUNT, height)) < 0.1)
    return tf.sparse.from_dense(dense.astype("float32"))


RAGGED = tf.RaggedTensor.from_row_lengths(tf.constant(RNG.integers(0, WORDS, 3 * COUNT)), [2, 4] * (COUNT // 2))


def ragged_mean(batch, table, dense):
    tokens, labels = batch
    vectors = tokens.with_flat_values(table(tokens.flat_values))
    return ops.mean(losses.sparse_categorical_crossentropy(labels, dense(tf.reduce_mean(vectors, 1)), True))


def ragged_padded(batch, table, dense):
    tokens, labels = batch
    vectors = table(tokens.to_tensor(default_value=0))
    return ops.mean(losses.sparse_categorical_crossentropy(labels, dense(ops.mean(vectors, 1)), True))


def sparse_product(batch, dense):
    tokens, labels = batch
    x = tf.sparse.sparse_dense_matmul(tokens, dense.kernel) + dense.bias
    return ops.mean(losses.sparse_categorical_crossentropy(labels, x, True))


def built(layer, *shape):
    layer.build(shape)
    return layer


LISTED = dict.fromkeys(("Unique", "GatherV2"), "the sparse gradient lists each column that the batch has once")
row("sparse input", fitted(sparse_input, sparse, sparse_rows(), LABELS), LISTED)
row(
    "tf.sparse product",
    own(lambda: built(layers.Dense(CLASSES), None, 30), x=(sparse_rows(), LABELS), loss=sparse_product),
)
row(
    "ragged mean",
    own(lambda: layers.Embedding(WORDS, 8), lambda: layers.Dense(CLASSES), x=(RAGGED, LABELS), loss=ragged_mean),
)
row(
    "ragged to_tensor",
    own(lambda: layers.Embedding(WORDS, 8), lambda: layers.Dense(CLASSES), x=(RAGGED, LABELS), loss=ragged_padded),
)


# Images.


def double(x, filters):
    for _ in range(2):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)))
    return x


def unet(classes=CLASSES):
    inputs = keras.Input((16, 16, 3))
    first = double(inputs, 8)
    x = double(layers.MaxPooling2D()(first), 16)
    x = layers.Concatenate()([first, layers.Conv2DTranspose(8, 2, strides=2)(x)])
    return keras.Model(inputs, layers.Conv2D(classes, 1)(double(x, 8)))


def residual():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same")(inputs)
    gates = layers.Dense(8, "sigmoid")(layers.Dense(2, "relu")(layers.GlobalAveragePooling2D(keepdims=True)(x)))
    x = layers.Dropout(0.2, noise_shape=(None, 1, 1, 1))(double(x * gates, 8)) + x
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def vit():
    inputs = keras.Input((8, 8, 3))
    x = layers.Dense(WIDTH)(ops.reshape(ops.image.extract_patches(inputs, (4, 4)), (-1, 4, 48)))
    first = layers.Embedding(1, WIDTH)(ops.zeros_like(x[:, :1, 0], dtype="int32"))
    return keras.Model(inputs, layers.Dense(CLASSES)(block(layers.Concatenate(axis=1)([first, x]))[:, 0]))


def boxes():
    inputs = keras.Input((8, 8, 3))
    return keras.Model(inputs, layers.Reshape((-1, 4))(layers.Conv2D(8, 3, padding="same")(inputs)))


def iou_loss(true, found):
    """One minus the intersection over union of boxes [rows, boxes, 4]."""
    top, low = ops.maximum(true[..., :2], found[..., :2]), ops.minimum(true[..., 2:], found[..., 2:])
    shared = ops.prod(ops.maximum(low - top, 0.0), axis=-1)
    area = sum(ops.prod(ops.maximum(one[..., 2:] - one[..., :2], 0.0), axis=-1) for one in (true, found))
    return 1.0 - shared / (area - shared + 1e-6)


def anchored(batch, model):
    """Each anchor has the nearest of a row's boxes, and what it tells of its class is weighted by its focus."""
    images, targets, labels = batch
    found = model(images)
    apart = ops.sum((found[:, :, None] - targets[:, None]) ** 2, -1)
    nearest = ops.argmin(apart, axis=-1)
    matched = tf.gather(targets, nearest, batch_dims=1)
    classes = tf.gather(labels, nearest, batch_dims=1)
    return ops.mean(iou_loss(matched, found)) + ops.mean(ops.cast(classes, "float32") * found[..., 0])


def soft_argmax(batch, model):
    maps = model(batch)
    weights = ops.softmax(ops.reshape(maps, (-1, 64, CLASSES)), axis=1)
    grid = ops.reshape(ops.stack(ops.meshgrid(ops.arange(8.0), ops.arange(8.0)), -1), (64, 2))
    return ops.mean(ops.einsum("bpk,pc->bkc", weights, grid) ** 2)


def attended(batch, model):
    """Two parts of each image, which it chooses itself."""
    x = model(batch)
    boxes = ops.reshape(ops.sigmoid(ops.mean(x, (1, 2))), (-1, 4))
    return ops.mean(tf.image.crop_and_resize(x, boxes, tf.repeat(tf.range(tf.shape(x)[0]), 2), [3, 3]) ** 2)


def gram(batch, model):
    maps = ops.reshape(model(batch), (-1, 64, 8))
    return ops.mean(ops.matmul(ops.transpose(maps, (0, 2, 1)), maps) ** 2)


def super_resolution():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(12, 3, padding="same", activation="relu")(inputs)
    return keras.Model(inputs, layers.Lambda(lambda one: tf.nn.depth_to_space(one, 2))(x))


def shifted_windows(x):
    """Attention within windows that are shifted, as in a Swin transformer."""
    x = ops.roll(x, (-2, -2), axis=(1, 2))
    x = ops.reshape(ops.transpose(ops.reshape(x, (-1, 2, 4, 2, 4, WIDTH)), (0, 1, 3, 2, 4, 5)), (-1, 16, WIDTH))
    x = layers.MultiHeadAttention(2, 8)(x, x)
    x = ops.reshape(ops.transpose(ops.reshape(x, (-1, 2, 2, 4, 4, WIDTH)), (0, 1, 3, 2, 4, 5)), (-1, 8, 8, WIDTH))
    return ops.roll(x, (2, 2), axis=(1, 2))


def swin():
    inputs = keras.Input((8, 8, 3))
    x = shifted_windows(layers.Dense(WIDTH)(inputs))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def conv(filters=8):
    return functools.partial(layers.Conv2D, filters, 3, padding="same")


SEGMENTS = RNG.integers(0, CLASSES, (COUNT, 16, 16))
row("U-Net, sparse loss", fitted(unet, sparse, floats(16, 16, 3), SEGMENTS, metrics=["accuracy"], optimizer="adam"))
row(
    "U-Net, Dice and IoU",
    fitted(
        lambda: unet(1),
        lambda: losses.Dice(axis=(1, 2, 3)),
        floats(16, 16, 3),
        (SEGMENTS[..., None] > 2).astype("float32"),
        metrics=[keras.metrics.BinaryIoU()],
    ),
)
row("residual blocks with gates", fitted(residual, sparse, IMAGES, LABELS, metrics=["accuracy"]))
row("ViT", fitted(vit, sparse, IMAGES, LABELS))
row("Swin", fitted(swin, sparse, IMAGES, LABELS))
row("boxes, IoU loss", fitted(boxes, lambda: iou_loss, IMAGES, floats(128, 4)))
row("boxes, matched to anchors", own(boxes, x=(IMAGES, floats(6, 4), integers(CLASSES, 6)), loss=anchored))
row("keypoints, soft argmax", own(conv(CLASSES), x=IMAGES, loss=soft_argmax))
row("crops, each image's own", own(conv(8), x=IMAGES, loss=attended))
row("style, Gram matrices", own(conv(), x=IMAGES, loss=gram))
row("super-resolution", fitted(super_resolution, "mae", IMAGES, floats(16, 16, 3)))


# Speech and series.


def listener():
    inputs = keras.Input((20, 8))
    x = layers.Conv1D(WIDTH, 3, padding="same", activation="relu")(inputs)
    x = layers.Bidirectional(layers.GRU(8, return_sequences=True))(x)
    return keras.Model(inputs, layers.Dense(CLASSES + 1)(x))


def spectral():
    inputs = keras.Input((128,))
    real, imaginary = ops.stft(inputs, 32, 16, 32)
    x = layers.Conv1D(8, 3)(ops.log(real**2 + imaginary**2 + 1e-3))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def fnet():
    """Tokens mixed by a Fourier transform."""
    inputs = keras.Input((8, WIDTH))
    x = layers.LayerNormalization()(inputs + ops.fft2((inputs, ops.zeros_like(inputs)))[0])
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(layers.Dense(WIDTH, "relu")(x))))


def neural_operator(batch, lift, mixing):
    """FNO: weights of a few frequencies, whose gradients are sums of complex numbers."""
    waves = tf.signal.rfft(tf.transpose(lift(batch[:, :, None]), (0, 2, 1)))[..., :4]
    weights = tf.complex(mixing.kernel.value, tf.sin(mixing.kernel.value))
    return ops.mean(tf.signal.irfft(tf.einsum("bck,cd->bdk", waves, weights), [12]) ** 2)


def autocorrelation(x):
    spectrum = tf.signal.rfft(tf.transpose(x, (0, 2, 1)))
    return tf.transpose(tf.signal.irfft(spectrum * tf.math.conj(spectrum)), (0, 2, 1))


def tcn():
    inputs = x = keras.Input((16, 4))
    for rate in (1, 2, 4):
        after = layers.Conv1D(8, 2, padding="causal", dilation_rate=rate, activation="relu")(x)
        x = after + layers.Conv1D(8, 1)(x)
    return keras.Model(inputs, layers.Dense(1)(x[:, -1]))


def frames():
    inputs = keras.Input((4, 8, 8, 3))
    x = layers.BatchNormalization()(layers.ConvLSTM2D(4, 3, padding="same", return_sequences=True)(inputs))
    return keras.Model(inputs, layers.Conv3D(3, 3, padding="same")(x))


def pinball(true, found):
    return ops.mean(ops.maximum(0.9 * (true - found), -0.1 * (true - found)), axis=-1)


row("speech, CTC", fitted(listener, losses.CTC, floats(20, 8), integers(CLASSES, 4) + 1))
row("speech, spectra", fitted(spectral, sparse, floats(128), LABELS))
row("FNO", own(lambda: layers.Dense(8), lambda: built(layers.Dense(8), None, 8), x=WIDE, loss=neural_operator))
row("FNet", fitted(fnet, sparse, floats(8, WIDTH), LABELS))
row(
    "autocorrelation",
    own(lambda: layers.Dense(WIDTH), x=floats(16, 4), loss=lambda x, dense: ops.mean(autocorrelation(dense(x)) ** 2)),
)
row("TCN, pinball loss", fitted(tcn, lambda: pinball, floats(16, 4), floats(1)))
row("ConvLSTM of frames", fitted(frames, "binary_crossentropy", floats(4, 8, 8, 3), floats(4, 8, 8, 3)))


# Contrastive, ranking.


def clip(batch, left, right):
    """Each text with all images of the batch."""
    one, two = (ops.normalize(part(x), axis=-1) for part, x in zip((left, right), batch, strict=True))
    logits = ops.matmul(one, ops.transpose(two)) / 0.1
    labels = ops.arange(ops.shape(logits)[0])
    return ops.mean(losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def triplet(batch, model):
    """An anchor, a positive and a negative, given."""
    anchor, positive, negative = (model(x) for x in batch)
    apart = [ops.sum((anchor - other) ** 2, -1) for other in (positive, negative)]
    return ops.mean(ops.relu(apart[0] - apart[1] + 0.5))


def vicreg(batch, model):
    """The covariance of features over the batch."""
    x = model(batch)
    x = x - ops.mean(x, axis=0, keepdims=True)
    covariance = ops.matmul(ops.transpose(x), x) / ops.cast(ops.shape(x)[0] - 1, "float32")
    return ops.sum(covariance**2) - ops.sum(ops.diagonal(covariance) ** 2)


def bank(batch, model):
    """The nearest of many entries that are kept."""
    entries = ops.reshape(ops.cos(ops.arange(50 * WIDTH, dtype="float32")), (50, WIDTH))
    near, _ = ops.top_k(ops.matmul(model(batch), ops.transpose(entries)), 3)
    return ops.mean(near)


def listwise(batch, model):
    """A softmax over the items of each row's list."""
    items, relevant = batch
    scores = ops.squeeze(model(items), -1)
    return -ops.mean(ops.sum(relevant * ops.log_softmax(scores, axis=-1), -1))


def approx_ndcg(batch, model):
    items, relevant = batch
    scores = ops.squeeze(model(items), -1)
    ranks = ops.sum(ops.sigmoid(scores[:, None, :] - scores[:, :, None]), -1) + 0.5
    ideal = ops.flip(ops.sort(relevant, axis=-1), axis=-1)
    best = ops.sum((2.0**ideal - 1) / ops.log1p(ops.arange(1.0, 7.0)), -1)
    return -ops.mean(ops.sum((2.0**relevant - 1) / ops.log1p(ranks), -1) / best)


def bpr(batch, users, items):
    user, liked, other = batch
    u = users(user)
    return -ops.mean(ops.log_sigmoid(ops.sum(u * (items(liked) - items(other)), -1)))


def sorted_batch(batch, dense):
    """The Wasserstein distance of one dimension: both sides sorted over the batch."""
    x, y = batch
    return ops.mean(ops.abs(ops.sort(dense(x), axis=0) - ops.sort(y, axis=0)))


def two_views(batch, dense):
    """Two views go through a network as one batch, and are told apart by the number of rows."""
    both, rows = dense(ops.concatenate(batch, axis=0)), ops.shape(batch[0])[0]
    return ops.mean((both[:rows] - both[rows:]) ** 2) - ops.mean(both)


def distilled(batch, dense):
    """A softmax over all rows, whose targets are another one."""
    x = dense(batch)
    scores = ops.matmul(x, ops.transpose(x))
    return ops.mean(tf.nn.softmax_cross_entropy_with_logits(ops.softmax(-scores), scores))


def recomputed(batch, dense):
    """TensorFlow lets what it computes again wait for the first number of the gradient."""
    return ops.mean(tf.recompute_grad(dense)(batch) ** 2)


ALL_ROWS = {"MatMul": "each row is compared with all rows of the other side"}
DENSE = functools.partial(layers.Dense, WIDTH)
SUMMED = {"Mul": "the gradient of the other side, whose rows all rows add to; it is scaled elsewhere than compared"}
row("CLIP", own(DENSE, DENSE, x=(WIDE, floats(9)), loss=clip), ALL_ROWS | SUMMED)
row("two views as one batch", own(DENSE, x=(WIDE, floats(12)), loss=two_views))
row("softmax over all rows", own(DENSE, x=WIDE, loss=distilled), ALL_ROWS)
row("tf.recompute_grad", own(DENSE, x=WIDE, loss=recomputed))
row("triplets", own(DENSE, x=(WIDE, floats(12), floats(12)), loss=triplet))
row("VICReg", own(DENSE, x=WIDE, loss=vicreg))
row("nearest of a bank", own(DENSE, x=WIDE, loss=bank))
row("listwise softmax", own(lambda: layers.Dense(1), x=(floats(6, 4), floats(6)), loss=listwise))
row("ApproxNDCG", own(lambda: layers.Dense(1), x=(floats(6, 4), floats(6)), loss=approx_ndcg))
row(
    "BPR",
    own(
        lambda: layers.Embedding(30, 8),
        lambda: layers.Embedding(50, 8),
        x=(integers(30), integers(50), integers(50)),
        loss=bpr,
    ),
)
row(
    "sorted over the batch",
    own(DENSE, x=(WIDE, floats(WIDTH)), loss=sorted_batch),
    {"TopKV2": "what is sorted is the batch"},
)


# Graphs.

EDGES = RNG.random((COUNT, 10, 10)).round().astype("float32")


def gcn(batch, first, second):
    nodes, edges = batch
    degree = ops.sum(edges, -1, keepdims=True) + 1
    x = ops.relu(ops.matmul(edges / degree, first(nodes)))
    return ops.mean(second(ops.mean(x, axis=1)) ** 2)


def gat(batch, dense, scores):
    nodes, edges = batch
    x = dense(nodes)
    weights = scores(x) + ops.transpose(scores(x), (0, 2, 1))
    weights = ops.softmax(ops.where(edges > 0, ops.leaky_relu(weights), -1e9), axis=-1)
    return ops.mean(ops.einsum("bij,bjd->bid", weights, x) ** 2)


def edge_list(batch, dense):
    """Edges as pairs of nodes of each graph, gathered and added up row by row."""
    nodes, pairs = batch
    x = dense(nodes)
    sent = tf.gather(x, pairs[..., 0], batch_dims=1)
    received = ops.matmul(ops.transpose(ops.one_hot(pairs[..., 1], 10), (0, 2, 1)), sent)
    return ops.mean(received**2)


def sampled(batch, table, dense):
    """A sample of neighbours of each node, from one table of all nodes, as in GraphSAGE."""
    nodes, neighbours = batch
    x = ops.concatenate([table(nodes), ops.mean(table(neighbours), axis=1)], -1)
    return ops.mean(dense(x) ** 2)


row("GCN", own(DENSE, DENSE, x=(floats(10, 4), EDGES), loss=gcn))
row("GAT", own(DENSE, lambda: layers.Dense(1), x=(floats(10, 4), EDGES), loss=gat))
row("graph of edge lists", own(DENSE, x=(floats(10, 4), integers(10, 14, 2)), loss=edge_list))
row("GraphSAGE", own(lambda: layers.Embedding(60, 8), DENSE, x=(integers(60), integers(60, 5)), loss=sampled))


# Generative.


class Seeds(keras.random.SeedGenerator):
    trainable_variables = ()


def diffused(batch, model, table, seeds):
    """DDPM: noise at a time of each row's own, drawn by Keras' seeds."""
    rows = ops.shape(batch)[0]
    times = keras.random.randint((rows,), 0, 10, seed=seeds)
    kept = ops.take(ops.cumprod(ops.linspace(0.99, 0.9, 10)), times)[:, None, None, None]
    noise = keras.random.normal(ops.shape(batch), seed=seeds)
    noisy = ops.sqrt(kept) * batch + ops.sqrt(1 - kept) * noise
    return ops.mean((model(noisy) + table(times)[:, None, None] - noise) ** 2)


def vae(batch, encoder, decoder):
    mean, log = ops.split(encoder(batch), 2, axis=-1)
    drawn = mean + ops.exp(0.5 * log) * batch[:, :8]
    apart = -0.5 * ops.sum(1 + log - mean**2 - ops.exp(log), -1)
    return ops.mean(ops.sum((decoder(drawn) - batch) ** 2, -1) + apart)


def quantised(batch, encoder, codes):
    """VQ-VAE: the nearest code of a table."""
    x = encoder(batch)
    table = codes.embeddings
    apart = ops.sum(x**2, -1, keepdims=True) - 2 * ops.matmul(x, ops.transpose(table)) + ops.sum(table**2, -1)
    nearest = codes(ops.argmin(apart, axis=-1))
    return ops.mean((nearest - ops.stop_gradient(x)) ** 2) + ops.mean((x - ops.stop_gradient(nearest)) ** 2)


def wgan(batch, critic):
    real, made = batch
    mixed = 0.5 * (real + made)
    with tf.GradientTape() as tape:
        tape.watch(mixed)
        scores = critic(mixed)
    norm = ops.sqrt(ops.sum(tape.gradient(scores, mixed) ** 2, -1) + 1e-6)
    return ops.mean(critic(made)) - ops.mean(critic(real)) + ops.mean((norm - 1) ** 2)


def nerf(batch, model):
    """Colours along a ray, by the product of what is let through."""
    out = model(batch)
    opacity = 1 - ops.exp(-ops.relu(out[..., 0]))
    through = tf.math.cumprod(1 - opacity + 1e-6, axis=1, exclusive=True)
    return ops.mean(ops.sum((opacity * through)[..., None] * ops.sigmoid(out[..., 1:]), axis=1) ** 2)


def flow(batch, model):
    """A coupling layer, with the log of its determinant."""
    left, right = ops.split(batch, 2, axis=-1)
    scale, shift = ops.split(model(left), 2, axis=-1)
    made = right * ops.exp(ops.tanh(scale)) + shift
    return ops.mean(0.5 * ops.sum(made**2, -1) - ops.sum(ops.tanh(scale), -1))


def gaussian(batch, model):
    """The log-density of a Gaussian with a covariance of each row's own."""
    out = ops.reshape(model(batch), (-1, 4, 4))
    lower = tf.linalg.cholesky(ops.matmul(out, ops.transpose(out, (0, 2, 1))) + ops.eye(4))
    solved = tf.linalg.triangular_solve(lower, batch[:, :4, None])
    return ops.mean(ops.sum(solved**2, (1, 2)) + ops.sum(ops.log(ops.diagonal(lower, axis1=1, axis2=2)), -1))


row("DDPM", own(conv(3), lambda: layers.Embedding(10, 3), lambda: Seeds(1), x=IMAGES, loss=diffused))
row("VAE", own(lambda: mlp(12, 16), lambda: mlp(8, 12), x=WIDE, loss=vae))
row("VQ-VAE", own(lambda: mlp(12, 8), lambda: built(layers.Embedding(20, 8)), x=WIDE, loss=quantised))
row("WGAN, gradient penalty", own(lambda: mlp(12, 1), x=(WIDE, floats(12)), loss=wgan))
row("NeRF", own(lambda: layers.Dense(4), x=floats(10, 6), loss=nerf))
row("flow", own(lambda: mlp(6, 12), x=WIDE, loss=flow))
row("Gaussians of covariances", own(lambda: mlp(12, 16), x=WIDE, loss=gaussian))


# Reinforcement.


def dqn(batch, model):
    state, action, reward, after = batch
    best = ops.max(ops.stop_gradient(model(after)), axis=-1)
    value = tf.gather(model(state), action, batch_dims=1)
    return ops.mean(losses.huber((reward + 0.9 * best)[:, None], value[:, None]))


def ppo(batch, actor, critic):
    state, action, old, advantage = batch
    advantage = (advantage - ops.mean(advantage)) / (ops.std(advantage) + 1e-6)
    new = ops.sum(ops.one_hot(action, 4) * ops.log_softmax(actor(state)), -1)
    ratio = ops.exp(new - old)
    clipped = ops.minimum(ratio * advantage, ops.clip(ratio, 0.8, 1.2) * advantage)
    return -ops.mean(clipped) + ops.mean((critic(state)[:, 0] - advantage) ** 2)


def a2c(batch, actor, critic):
    """Returns from the end of each row's episode to its begin."""
    states, rewards = batch

    def before(total, reward):
        total = reward + 0.9 * total
        return total, total

    turned = ops.transpose(rewards)
    returns = ops.transpose(ops.scan(before, ops.zeros_like(turned[0]), turned, reverse=True)[1])
    values = critic(states)[..., 0]
    advantage = ops.stop_gradient(returns - values)
    return -ops.mean(ops.log_softmax(actor(states))[..., 0] * advantage) + ops.mean((returns - values) ** 2)


ACTIONS = integers(4)
row("DQN", own(lambda: mlp(12, 4), x=(WIDE, ACTIONS, floats(), floats(12)), loss=dqn))
row("PPO", own(lambda: mlp(12, 4), lambda: mlp(12, 1), x=(WIDE, ACTIONS, floats(), floats()), loss=ppo))
row("A2C", own(lambda: layers.Dense(4), lambda: layers.Dense(1), x=(floats(TIME, 6), floats(TIME)), loss=a2c))


# Tables, and others.


def wide_and_deep():
    numbers, kinds = keras.Input((6,)), keras.Input((3,), dtype="int32")
    deep = layers.Concatenate()([numbers, layers.Flatten()(layers.Embedding(20, 4)(kinds))])
    crossed = layers.HashedCrossing(30, output_mode="one_hot")([kinds[:, :1], kinds[:, 1:2]])
    return keras.Model(
        [numbers, kinds], layers.Dense(1)(layers.Concatenate()([layers.Dense(8, "relu")(deep), crossed]))
    )


def deepfm():
    kinds = keras.Input((5,), dtype="int32")
    x = layers.Embedding(40, 8)(kinds)
    pairs = 0.5 * ops.sum(ops.sum(x, axis=1) ** 2 - ops.sum(x**2, axis=1), axis=-1, keepdims=True)
    return keras.Model(kinds, pairs + layers.Dense(1)(layers.Dense(8, "relu")(layers.Flatten()(x))))


def sparsemax(x):
    ordered = ops.flip(ops.sort(x, axis=-1), axis=-1)
    sums, ranks = ops.cumsum(ordered, axis=-1), ops.arange(1, x.shape[-1] + 1, dtype="float32")
    count = ops.sum(ops.cast(1 + ranks * ordered > sums, "int32"), axis=-1, keepdims=True)
    limit = (ops.take_along_axis(sums, count - 1, axis=-1) - 1) / ops.cast(count, "float32")
    return ops.maximum(x - limit, 0.0)


def experts(batch, gate, *parts):
    """The two best of four experts, of each row."""
    scores, chosen = ops.top_k(gate(batch), 2)
    every = ops.stack([part(batch) for part in parts], axis=1)
    taken = tf.gather(every, chosen, batch_dims=1)
    return ops.mean(ops.sum(ops.softmax(scores)[..., None] * taken, axis=1) ** 2)


def reinforce(batch, policy):
    """Actions are drawn without a seed: each tower draws its rows'."""
    logits = policy(batch)
    actions = tf.random.categorical(logits, 1)[:, 0]
    return ops.mean(losses.sparse_categorical_crossentropy(actions, logits, True) * ops.cast(actions, "float32"))


def neural_process(batch, dense):
    x = dense(batch)
    return ops.mean(ops.logsumexp(ops.sum((x[:, :, None] - x[:, None]) ** 2, -1), axis=(1, 2)))


def jacobians(batch, model):
    with tf.GradientTape() as tape:
        tape.watch(batch)
        out = model(batch)
    return ops.mean(tape.batch_jacobian(out, batch) ** 2) + ops.mean(out)


def per_row(batch, model):
    """Gradients of each row, clipped, as in private training."""
    x = model.layers[0](batch)
    norms = ops.sqrt(ops.sum(x**2, -1, keepdims=True))
    return ops.mean(model.layers[1](x / ops.maximum(norms, 1.0)) ** 2)


def capsules(batch, dense):
    votes = ops.reshape(dense(batch), (-1, 6, 3, 4))
    logits = ops.zeros_like(votes[..., 0])
    for _ in range(2):
        made = ops.sum(ops.softmax(logits, axis=-1)[..., None] * votes, axis=1)
        made = made / (1 + ops.norm(made, axis=-1, keepdims=True))
        logits = logits + ops.sum(votes * made[:, None], -1)
    return ops.mean(made**2)


row("wide and deep", fitted(wide_and_deep, "mse", [floats(6), integers(20, 3)], floats(1)))
row(
    "DeepFM",
    fitted(
        deepfm,
        lambda: losses.BinaryCrossentropy(True),
        integers(40, 5),
        (floats(1) > 0.5).astype("float32"),
        metrics=[keras.metrics.AUC(20, from_logits=True)],
    ),
)
row("sparsemax", own(DENSE, x=WIDE, loss=lambda x, dense: ops.mean(sparsemax(dense(x)) ** 2)))
row("mixture of experts", own(lambda: layers.Dense(4), DENSE, DENSE, DENSE, DENSE, x=WIDE, loss=experts))
row("distances within rows", own(DENSE, x=floats(6, 4), loss=neural_process))
row("Jacobians", own(lambda: mlp(12, 3), x=WIDE, loss=jacobians))
row("norms of rows, clipped", own(lambda: mlp(12, 3), x=WIDE, loss=per_row))
row("capsules", own(lambda: layers.Dense(12), x=floats(6, 5), loss=capsules))
row("actions that are drawn", own(lambda: layers.Dense(CLASSES), x=WIDE, loss=reinforce))
