"""Programs of libraries that are built on Keras and that the tests do not install."""

import keras
import numpy as np
from harness import fit, program
from keras import layers, ops

RNG = np.random.default_rng(10)
X = RNG.standard_normal((23, 4))
IDS = RNG.integers(0, 6, (23, 3))
LABELS = RNG.integers(0, 2, 23)
SERIES = RNG.standard_normal((23, 8, 2))
TOKENS = RNG.integers(1, 11, (23, 5))


@program("https://keras.io/keras_rs/examples/dcn/", extra="keras_rs")
def deep_and_cross_of_keras_rs():
    """`FeatureCross` and `DotInteraction` on embeddings of a row's fields."""
    import keras_rs

    class DCN(keras.Model):
        def __init__(self):
            super().__init__()
            self.tables = [layers.Embedding(6, 3) for _ in range(3)]
            self.cross = keras_rs.layers.FeatureCross(projection_dim=2)
            self.dot = keras_rs.layers.DotInteraction()
            self.dense = layers.Dense(1)

        def call(self, ids):
            fields = [table(ids[:, i]) for i, table in enumerate(self.tables)]
            x0 = ops.concatenate(fields, axis=-1)
            return self.dense(ops.concatenate([self.cross(x0), self.dot(fields)], axis=-1))

    def build():
        model = DCN()
        model.compile(keras.optimizers.AdamW(0.001), "mse", metrics=["mae"])
        return model

    return build, fit(IDS, X[:, :1], predict=IDS)


@program("https://keras.io/keras_rs/examples/basic_retrieval/", extra="keras_rs", coupled=True)
def retrieval_of_keras_rs():
    """In-batch negatives, of which those with the positive's own number are removed."""
    import keras_rs

    class Retrieval(keras.Model):
        def __init__(self):
            super().__init__()
            self.user, self.item = layers.Embedding(6, 3), layers.Embedding(6, 3)
            self.remove = keras_rs.layers.RemoveAccidentalHits()

        def call(self, inputs):
            return self.user(inputs["user"]), self.item(inputs["item"])

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            user, item = y_pred
            scores = ops.matmul(user, ops.transpose(item))
            labels = ops.eye(ops.shape(scores)[0], dtype=scores.dtype)
            scores = self.remove(scores, labels, x["item"])
            return ops.mean(keras.losses.categorical_crossentropy(labels, scores, from_logits=True))

    def build():
        model = Retrieval()
        model.compile(keras.optimizers.Adagrad(0.05))
        return model

    return build, fit({"user": IDS[:, 0], "item": IDS[:, 1]})


@program("https://keras.io/keras_rs/examples/listwise_ranking/", extra="keras_rs")
def ranking_of_keras_rs():
    """A loss of all pairs within a row's list, and a ranking metric."""
    import keras_rs

    def build():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(4)])
        model.compile(
            keras.optimizers.SGD(0.1),
            keras_rs.losses.PairwiseHingeLoss(),
            metrics=[keras_rs.metrics.NDCG(k=3, name="ndcg")],
        )
        return model

    return build, fit(X, np.argsort(X, axis=1).astype("float64"), predict=X)


@program("https://github.com/philipperemy/keras-tcn", extra="tcn", options={"exact": ("random",)})
def temporal_convolutions_of_keras_tcn():
    """Dilated causal convolutions with spatial dropout and layer normalisation."""
    from tcn import TCN

    def build():
        inputs = keras.Input((8, 2))
        x = TCN(3, kernel_size=2, dilations=(1, 2), dropout_rate=0.1, use_layer_norm=True)(inputs)
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile(keras.optimizers.Adam(0.001), "mse")
        return model

    return build, fit(SERIES, X[:, :1], predict=SERIES)


@program("https://github.com/artemmavrin/focal-loss", extra="focal_loss", floatx="float32", tolerance=2e-6)
def focal_loss_of_a_library():
    """A focal loss by a library's class."""
    from focal_loss import SparseCategoricalFocalLoss

    def build():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), SparseCategoricalFocalLoss(gamma=2, from_logits=True))
        return model

    return build, fit(X, LABELS, predict=X)


@program(
    "https://keras.io/guides/keras_hub/transformer_pretraining/",
    extra="keras_hub",
    still="key/bias",
    options={"exact": ("random",)},
)
def transformer_of_keras_hub():
    """`TokenAndPositionEmbedding`, a `TransformerEncoder` and a head for masked tokens, tied to the table."""
    import keras_hub

    def build():
        inputs = keras.Input((5,), dtype="int32")
        positions = keras.Input((2,), dtype="int32")
        embedding = keras_hub.layers.TokenAndPositionEmbedding(11, 5, 4)
        x = layers.LayerNormalization()(embedding(inputs))
        x = keras_hub.layers.TransformerEncoder(intermediate_dim=4, num_heads=2, dropout=0.1)(x)
        head = keras_hub.layers.MaskedLMHead(token_embedding=embedding.token_embedding)
        model = keras.Model([inputs, positions], head(x, mask_positions=positions))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(0.001), loss, weighted_metrics=["accuracy"])
        return model

    places = np.tile([[1, 3]], (23, 1))
    weights = (TOKENS[:, [1, 3]] > 3).astype("float64")
    return build, fit([TOKENS, places], TOKENS[:, [1, 3]], sample_weight=weights)


@program("https://keras.io/guides/keras_hub/rope/", extra="keras_hub", still="key/bias")
def decoder_of_keras_hub():
    """A `TransformerDecoder` behind learned positions, and sine positions beside them."""
    import keras_hub

    def build():
        inputs = keras.Input((5,), dtype="int32")
        x = layers.Embedding(11, 4)(inputs)
        x = x + keras_hub.layers.PositionEmbedding(5)(x) + keras_hub.layers.SinePositionEncoding()(x)
        x = keras_hub.layers.TransformerDecoder(intermediate_dim=4, num_heads=2)(x)
        model = keras.Model(inputs, layers.Dense(11)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.001), loss, metrics=["accuracy"])
        return model

    return build, fit(TOKENS, np.roll(TOKENS, -1, axis=1), predict=TOKENS)
