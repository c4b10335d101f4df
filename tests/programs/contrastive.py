"""Losses that compare samples with each other, as they are written for one device."""

import keras
import numpy as np
import tensorflow as tf
from harness import fit, program
from keras import layers, ops

RNG = np.random.default_rng(1)
IMAGES = RNG.random((23, 6, 6, 3))
VECTORS = RNG.standard_normal((23, 8))
LABELS = RNG.integers(0, 3, 23)


def image_encoder(width=6):
    return keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(4, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(width, activation="relu"),
        ],
        name="encoder",
    )


def vector_encoder(width=6, name="encoder"):
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, activation="tanh"), layers.Dense(width, name="features")], name=name
    )


class ContrastiveModel(keras.Model):
    """SimCLR as in the example on semi-supervised training: two augmented views, NT-Xent, a linear probe."""

    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature
        self.contrastive_augmenter = keras.Sequential(
            [keras.Input((6, 6, 3)), layers.RandomFlip("horizontal"), layers.GaussianNoise(0.2)]
        )
        self.encoder = image_encoder()
        self.projection_head = keras.Sequential(
            [keras.Input((6,)), layers.Dense(6, activation="relu"), layers.Dense(5)]
        )
        self.contrastive_loss_tracker = keras.metrics.Mean(name="loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")

    @property
    def metrics(self):
        return [self.contrastive_loss_tracker, self.contrastive_accuracy]

    def contrastive_loss(self, projections_1, projections_2):
        projections_1 = ops.normalize(projections_1, axis=1)
        projections_2 = ops.normalize(projections_2, axis=1)
        similarities = ops.matmul(projections_1, ops.transpose(projections_2)) / self.temperature
        batch_size = ops.shape(projections_1)[0]
        contrastive_labels = ops.arange(batch_size)
        self.contrastive_accuracy.update_state(contrastive_labels, similarities)
        self.contrastive_accuracy.update_state(contrastive_labels, ops.transpose(similarities))
        loss_1_2 = keras.losses.sparse_categorical_crossentropy(contrastive_labels, similarities, from_logits=True)
        loss_2_1 = keras.losses.sparse_categorical_crossentropy(
            contrastive_labels, ops.transpose(similarities), from_logits=True
        )
        return (loss_1_2 + loss_2_1) / 2

    def train_step(self, data):
        augmented_1 = self.contrastive_augmenter(data, training=True)
        augmented_2 = self.contrastive_augmenter(data, training=True)
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        with tf.GradientTape() as tape:
            projections_1 = self.projection_head(self.encoder(augmented_1, training=True), training=True)
            projections_2 = self.projection_head(self.encoder(augmented_2, training=True), training=True)
            contrastive_loss = self.contrastive_loss(projections_1, projections_2)
        gradients = tape.gradient(contrastive_loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.contrastive_loss_tracker.update_state(contrastive_loss)
        return {m.name: m.result() for m in self.metrics}


@program("https://keras.io/examples/vision/semisupervised_simclr/", options={"exact": ("random",)}, towers=(4, 3))
def simclr():
    """NT-Xent; the loss is a vector over the batch, and the gradient is asked of the vector: of its sum."""

    def build():
        model = ContrastiveModel()
        model.compile(keras.optimizers.SGD(0.01))
        return model

    return build, fit(IMAGES)


@program("https://github.com/google-research/simclr/blob/master/tf2/objective.py", coupled=True)
def nt_xent_with_masked_diagonal():
    """SimCLR's own loss: the similarities within a view too, their diagonal taken out by a large number."""

    class Pretraining(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = vector_encoder()

        def call(self, x):
            return self.encoder(x)

        def train_step(self, x):
            with tf.GradientTape() as tape:
                hidden1 = tf.math.l2_normalize(self(x + 0.1, training=True), -1)
                hidden2 = tf.math.l2_normalize(self(x * 0.9, training=True), -1)
                batch_size = tf.shape(hidden1)[0]
                labels = tf.one_hot(tf.range(batch_size), batch_size * 2, dtype=hidden1.dtype)
                masks = tf.one_hot(tf.range(batch_size), batch_size, dtype=hidden1.dtype)
                logits_aa = tf.matmul(hidden1, hidden1, transpose_b=True) / 0.5 - masks * 1e9
                logits_bb = tf.matmul(hidden2, hidden2, transpose_b=True) / 0.5 - masks * 1e9
                logits_ab = tf.matmul(hidden1, hidden2, transpose_b=True) / 0.5
                logits_ba = tf.matmul(hidden2, hidden1, transpose_b=True) / 0.5
                loss_a = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ab, logits_aa], 1))
                loss_b = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ba, logits_bb], 1))
                loss = tf.reduce_mean(loss_a + loss_b)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"nt_xent": loss}

    def build():
        model = Pretraining()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return build, fit(VECTORS, predict=VECTORS)


def supervised_contrastive_loss(temperature=0.5):
    """Khosla et al. 2020; the labels' rows are compared, a mean over each anchor's positives."""

    class SupervisedContrastiveLoss(keras.losses.Loss):
        def call(self, labels, feature_vectors):
            feature_vectors = ops.normalize(feature_vectors, axis=1)
            logits = ops.divide(ops.matmul(feature_vectors, ops.transpose(feature_vectors)), temperature)
            labels = ops.reshape(labels, (-1, 1))
            same = ops.cast(ops.equal(labels, ops.transpose(labels)), logits.dtype)
            mask = same - ops.eye(ops.shape(same)[0], dtype=logits.dtype)
            others = 1.0 - ops.eye(ops.shape(same)[0], dtype=logits.dtype)
            log_prob = logits - ops.log(ops.sum(ops.exp(logits) * others, axis=1, keepdims=True))
            return -ops.sum(mask * log_prob, axis=1) / ops.maximum(ops.sum(mask, axis=1), 1.0)

    return SupervisedContrastiveLoss()


@program("https://keras.io/examples/vision/supervised-contrastive-learning/", coupled=True, towers=(4, 3))
def supcon():
    """A compiled loss class of one's own that multiplies the features with each other."""

    def build():
        inputs = keras.Input((8,))
        features = vector_encoder()(inputs)
        outputs = layers.Dense(4, activation="relu")(features)
        model = keras.Model(inputs, outputs, name="encoder_with_projection_head")
        model.compile(keras.optimizers.Adam(0.001), supervised_contrastive_loss())
        return model

    return build, fit(VECTORS, LABELS, predict=VECTORS, evaluate=True)


@program("https://keras.io/examples/nlp/nl_image_search/", coupled=True)
def clip_dual_encoder():
    """The dual encoder of natural language image search: soft targets from similarities within each side."""

    class DualEncoder(keras.Model):
        def __init__(self, text_encoder, image_encoder, temperature=1.0):
            super().__init__()
            self.text_encoder = text_encoder
            self.image_encoder = image_encoder
            self.temperature = temperature
            self.loss_tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.loss_tracker]

        def call(self, features, training=False):
            caption_embeddings = self.text_encoder(features["caption"], training=training)
            image_embeddings = self.image_encoder(features["image"], training=training)
            return caption_embeddings, image_embeddings

        def compute_loss(self, caption_embeddings, image_embeddings):
            logits = ops.matmul(caption_embeddings, ops.transpose(image_embeddings)) / self.temperature
            images_similarity = ops.matmul(image_embeddings, ops.transpose(image_embeddings))
            captions_similarity = ops.matmul(caption_embeddings, ops.transpose(caption_embeddings))
            targets = keras.activations.softmax((captions_similarity + images_similarity) / (2 * self.temperature))
            captions_loss = keras.losses.categorical_crossentropy(targets, logits, from_logits=True)
            images_loss = keras.losses.categorical_crossentropy(
                ops.transpose(targets), ops.transpose(logits), from_logits=True
            )
            return (captions_loss + images_loss) / 2

        def train_step(self, features):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(*self(features, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}

    def build():
        model = DualEncoder(vector_encoder(4, "text_encoder"), image_encoder(4))
        model.compile(keras.optimizers.AdamW(0.001, weight_decay=0.001))
        return model

    features = {"caption": VECTORS, "image": IMAGES}
    return build, fit(features, predict=features)


@program("https://github.com/openai/CLIP/blob/main/README.md", coupled=True)
def clip_with_logit_scale():
    """Symmetric cross entropy with a trained temperature, of which the gradient is a sum over all pairs."""

    class CLIP(keras.Model):
        def __init__(self):
            super().__init__()
            self.visual = image_encoder(4)
            self.textual = vector_encoder(4, "textual")
            self.logit_scale = self.add_weight(
                shape=(), initializer=keras.initializers.Constant(1.0), name="logit_scale"
            )

        def call(self, inputs):
            image, text = inputs
            return ops.normalize(self.visual(image), axis=-1), ops.normalize(self.textual(text), axis=-1)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            image_features, text_features = y_pred
            logits = ops.exp(self.logit_scale) * ops.matmul(image_features, ops.transpose(text_features))
            labels = ops.arange(ops.shape(logits)[0])
            loss_i = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss_t = keras.losses.sparse_categorical_crossentropy(labels, ops.transpose(logits), from_logits=True)
            return (ops.mean(loss_i) + ops.mean(loss_t)) / 2

    def build():
        model = CLIP()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        return model

    return build, fit((IMAGES, VECTORS), predict=(IMAGES, VECTORS))


class BarlowTwins(keras.Model):
    """The example's model: cross-correlation of two views' features, normalised over the batch."""

    def __init__(self, augment, lambd=5e-3):
        super().__init__()
        self.augment = augment
        self.encoder = vector_encoder(5)
        self.lambd = lambd
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def barlow_loss(self, z_a, z_b):
        batch_size = ops.cast(ops.shape(z_a)[0], z_a.dtype)
        z_a = (z_a - ops.mean(z_a, axis=0)) / (ops.std(z_a, axis=0) + 1e-6)
        z_b = (z_b - ops.mean(z_b, axis=0)) / (ops.std(z_b, axis=0) + 1e-6)
        cross_corr = ops.matmul(ops.transpose(z_a), z_b) / batch_size
        on_diagonal = ops.sum(ops.square(ops.diagonal(cross_corr) - 1.0))
        off_diagonal = ops.sum(ops.square(cross_corr * (1.0 - ops.eye(5, dtype=z_a.dtype))))
        return on_diagonal + self.lambd * off_diagonal

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z_a = self.encoder(self.augment(data, training=True), training=True)
            z_b = self.encoder(self.augment(data, training=True) + 0.5 * ops.sin(data), training=True)
            loss = self.barlow_loss(z_a, z_b)
        gradients = tape.gradient(loss, self.encoder.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.encoder.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


# The last layer's bias is taken out again by the normalisation over the batch.
BARLOW = {"towers": (4, 3), "still": "features/bias"}


@program("https://keras.io/examples/vision/barlow_twins/", coupled=True, **BARLOW)
def barlow_twins():
    """Moments and a product over the batch, without random numbers."""

    def build():
        model = BarlowTwins(layers.Activation("tanh"))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    # Of one row there is no deviation: two epochs of batches of 10, none of them smaller than 3.
    return build, fit(VECTORS, epochs=2)


@program("https://keras.io/examples/vision/barlow_twins/", options={"exact": ("random",)}, **BARLOW)
def barlow_behind_noise():
    """The same behind a random layer, which must not hide that the loss compares samples."""

    def build():
        model = BarlowTwins(layers.GaussianNoise(0.1))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    return build, fit(VECTORS)


@program(
    "https://keras.io/examples/vision/barlow_twins/", warned="(?i)random|GaussianNoise|dropout", still="features/bias"
)
def barlow_behind_noise_per_tower():
    """The same with random numbers per tower, the default, which is warned of."""

    def build():
        model = BarlowTwins(layers.GaussianNoise(0.1))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    return build, fit(VECTORS)


@program("https://github.com/facebookresearch/vicreg/blob/main/main_vicreg.py", coupled=True, still="features/bias")
def vicreg():
    """Invariance, a hinge on each feature's deviation, the covariances squared: all over the batch."""

    class VICReg(keras.Model):
        def __init__(self):
            super().__init__()
            self.backbone = vector_encoder(5)

        def call(self, inputs):
            x, y = inputs
            return self.backbone(x), self.backbone(y)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            x, y = y_pred
            rows = ops.cast(ops.shape(x)[0], x.dtype)
            repr_loss = ops.mean(ops.square(x - y))
            x = x - ops.mean(x, axis=0)
            y = y - ops.mean(y, axis=0)
            std_x = ops.sqrt(ops.sum(ops.square(x), 0) / (rows - 1) + 1e-4)
            std_y = ops.sqrt(ops.sum(ops.square(y), 0) / (rows - 1) + 1e-4)
            std_loss = ops.mean(ops.relu(1 - std_x)) / 2 + ops.mean(ops.relu(1 - std_y)) / 2
            cov_x = ops.matmul(ops.transpose(x), x) / (rows - 1)
            cov_y = ops.matmul(ops.transpose(y), y) / (rows - 1)
            off = 1 - ops.eye(5, dtype=x.dtype)
            cov_loss = (ops.sum(ops.square(cov_x * off)) + ops.sum(ops.square(cov_y * off))) / 5
            return 25.0 * repr_loss + 25.0 * std_loss + cov_loss

    def build():
        model = VICReg()
        model.compile(keras.optimizers.SGD(0.001))
        return model

    # A row alone has no deviation, on one device neither.
    return build, fit((VECTORS, VECTORS + 0.3 * np.cos(VECTORS)), epochs=2)


@program("https://www.tensorflow.org/recommenders/examples/basic_retrieval", coupled=True, towers=(4, 3))
def two_tower_retrieval():
    """In-batch softmax: a user's positive is its own row's item, all other rows' items are negatives."""

    class Retrieval(keras.Model):
        def __init__(self):
            super().__init__()
            self.user_model = keras.Sequential([layers.Embedding(12, 4), layers.Dense(4)])
            self.item_model = keras.Sequential([layers.Embedding(9, 4), layers.Dense(4)])

        def train_step(self, features):
            with tf.GradientTape() as tape:
                users = self.user_model(features["user_id"])
                items = self.item_model(features["movie_title"])
                scores = tf.linalg.matmul(users, items, transpose_b=True)
                labels = tf.eye(tf.shape(scores)[0], tf.shape(scores)[1], dtype=scores.dtype)
                loss = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")(labels, scores)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            best = tf.argmax(scores, axis=1, output_type=tf.int32)
            hits = tf.reduce_mean(tf.cast(best == tf.range(tf.shape(scores)[0]), scores.dtype))
            return {"total_loss": loss, "top_1_accuracy": hits}

    def build():
        model = Retrieval()
        model.compile(keras.optimizers.Adagrad(0.01))
        return model

    rng = np.random.default_rng(2)
    return build, fit({"user_id": rng.integers(0, 12, 23), "movie_title": rng.integers(0, 9, 23)})


@program(
    "https://github.com/tensorflow/addons/blob/master/tensorflow_addons/losses/triplet.py",
    coupled=True,
    still="features/bias",
)
def triplet_semihard():
    """Distances of all pairs, the hardest semi-hard negative of each by masked minima and maxima."""

    def masked_maximum(data, mask, dim=1):
        axis_minimums = tf.math.reduce_min(data, dim, keepdims=True)
        return tf.math.reduce_max((data - axis_minimums) * mask, dim, keepdims=True) + axis_minimums

    def masked_minimum(data, mask, dim=1):
        axis_maximums = tf.math.reduce_max(data, dim, keepdims=True)
        return tf.math.reduce_min((data - axis_maximums) * mask, dim, keepdims=True) + axis_maximums

    def pairwise_distance(feature):
        squared = tf.reduce_sum(feature**2, 1, keepdims=True)
        distances = squared - 2.0 * tf.matmul(feature, feature, transpose_b=True) + tf.transpose(squared)
        distances = tf.maximum(distances, 0.0)
        return distances * (1.0 - tf.eye(tf.shape(feature)[0], dtype=feature.dtype))

    def triplet_semihard_loss(y_true, y_pred, margin=1.0):
        labels = tf.reshape(y_true, [-1, 1])
        pdist_matrix = pairwise_distance(y_pred)
        adjacency = tf.math.equal(labels, tf.transpose(labels))
        adjacency_not = tf.math.logical_not(adjacency)
        batch_size = tf.size(labels)
        pdist_matrix_tile = tf.tile(pdist_matrix, [batch_size, 1])
        mask = tf.math.logical_and(
            tf.tile(adjacency_not, [batch_size, 1]),
            tf.math.greater(pdist_matrix_tile, tf.reshape(tf.transpose(pdist_matrix), [-1, 1])),
        )
        mask_final = tf.reshape(
            tf.math.greater(tf.reduce_sum(tf.cast(mask, y_pred.dtype), 1, keepdims=True), 0.0), [batch_size, batch_size]
        )
        mask_final = tf.transpose(mask_final)
        mask = tf.cast(mask, y_pred.dtype)
        adjacency_not = tf.cast(adjacency_not, y_pred.dtype)
        negatives_outside = tf.transpose(tf.reshape(masked_minimum(pdist_matrix_tile, mask), [batch_size, batch_size]))
        negatives_inside = tf.tile(masked_maximum(pdist_matrix, adjacency_not), [1, batch_size])
        semi_hard_negatives = tf.where(mask_final, negatives_outside, negatives_inside)
        loss_mat = margin + pdist_matrix - semi_hard_negatives
        mask_positives = tf.cast(adjacency, y_pred.dtype) - tf.eye(batch_size, dtype=y_pred.dtype)
        num_positives = tf.reduce_sum(mask_positives)
        return tf.math.truediv(
            tf.reduce_sum(tf.maximum(loss_mat * mask_positives, 0.0)), tf.maximum(num_positives, 1.0)
        )

    def build():
        model = keras.Sequential([keras.Input((8,)), vector_encoder(3)])
        model.compile(keras.optimizers.SGD(0.02), triplet_semihard_loss)
        return model

    # A distance does not change with what is added to all: the last bias is
    # still.
    return build, fit(VECTORS, LABELS, predict=VECTORS)


@program("https://www.jmlr.org/papers/v13/gretton12a.html", coupled=True)
def maximum_mean_discrepancy():
    """An InfoVAE's penalty: a kernel of all pairs, by broadcasting `x[:, None] - y[None]`."""

    class Discrepancy(layers.Layer):
        def call(self, z):
            prior = ops.cos(ops.reshape(ops.arange(12, dtype=z.dtype), (6, 2)))

            def kernel(x, y):
                return ops.mean(ops.exp(-ops.sum(ops.square(x[:, None] - y[None]), axis=-1) / 2.0))

            self.add_loss(kernel(z, z) + kernel(prior, prior) - 2.0 * kernel(z, prior))
            return z

    def build():
        inputs = keras.Input((8,))
        z = Discrepancy()(layers.Dense(2)(inputs))
        outputs = layers.Dense(8)(layers.Dense(6, activation="relu")(z))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    return build, fit(VECTORS, VECTORS, predict=VECTORS, evaluate=True)


@program("https://keras.io/examples/vision/metric_learning/", coupled=True)
def metric_learning_by_einsum():
    """Similarities by `einsum` of normalised embeddings; row i of one half belongs to row i of the other."""

    class EmbeddingModel(keras.Model):
        def train_step(self, data):
            anchors, positives = data
            with tf.GradientTape() as tape:
                anchor_embeddings = self(anchors, training=True)
                positive_embeddings = self(positives, training=True)
                similarities = ops.einsum("ae,pe->ap", anchor_embeddings, positive_embeddings)
                similarities /= 0.2
                sparse_labels = ops.arange(ops.shape(anchors)[0])
                loss = self.compute_loss(y=sparse_labels, y_pred=similarities)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(sparse_labels, similarities)
            return {m.name: m.result() for m in self.metrics}

    def build():
        inputs = keras.Input((6, 6, 3))
        outputs = layers.UnitNormalization()(layers.Dense(4)(image_encoder()(inputs)))
        model = EmbeddingModel(inputs, outputs)
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    return build, fit(IMAGES, IMAGES[:, ::-1], predict=IMAGES)


@program("https://keras.io/examples/vision/siamese_contrastive/")
def siamese():
    """Two inputs through one network, their distance, the margin loss: of each row alone."""

    def loss(margin=1.0):
        def contrastive_loss(y_true, y_pred):
            square_pred = ops.square(y_pred)
            margin_square = ops.square(ops.maximum(margin - y_pred, 0))
            return ops.mean((1 - y_true) * square_pred + y_true * margin_square)

        return contrastive_loss

    def euclidean_distance(vects):
        x, y = vects
        sum_square = ops.sum(ops.square(x - y), axis=1, keepdims=True)
        return ops.sqrt(ops.maximum(sum_square, keras.backend.epsilon()))

    def build():
        embedding_network = image_encoder()
        input_1, input_2 = keras.Input((6, 6, 3)), keras.Input((6, 6, 3))
        merge_layer = layers.Lambda(euclidean_distance, output_shape=(1,))(
            [embedding_network(input_1), embedding_network(input_2)]
        )
        output_layer = layers.Dense(1, activation="sigmoid")(merge_layer)
        model = keras.Model([input_1, input_2], output_layer)
        model.compile(keras.optimizers.RMSprop(0.001), loss(), metrics=["accuracy"])
        return model

    x = (IMAGES, IMAGES[::-1])
    return build, fit(x, (LABELS > 1).astype("float64")[:, None], predict=x, evaluate=True)
