"""Steps of one's own that change what is differentiated, applied or accumulated."""

import keras
import numpy as np
import tensorflow as tf
from harness import fit, program
from keras import layers, ops

RNG = np.random.default_rng(4)
X = RNG.standard_normal((23, 8))
Y = RNG.integers(0, 3, 23)
IMAGES = RNG.random((23, 6, 6, 1))
INVARIANT = {"exact": ("random",)}


def classifier(width=6, name=None, dropout=0.0):
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(width, activation="relu"), layers.Dropout(dropout), layers.Dense(3)], name=name
    )


def logits_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@program("https://keras.io/examples/vision/knowledge_distillation/", towers=(4, 3))
def knowledge_distillation():
    """A divergence between teacher and student in `compute_loss`; the teacher is not trained."""

    class Distiller(keras.Model):
        def __init__(self, student, teacher):
            super().__init__()
            self.teacher = teacher
            self.student = student

        def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha, temperature):
            super().compile(optimizer=optimizer, metrics=metrics)
            self.student_loss_fn = student_loss_fn
            self.distillation_loss_fn = distillation_loss_fn
            self.alpha = alpha
            self.temperature = temperature

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            teacher_pred = self.teacher(x, training=False)
            student_loss = self.student_loss_fn(y, y_pred)
            distillation_loss = self.distillation_loss_fn(
                ops.softmax(teacher_pred / self.temperature, axis=1), ops.softmax(y_pred / self.temperature, axis=1)
            ) * (self.temperature**2)
            return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

        def call(self, x):
            return self.student(x)

    def build():
        teacher = classifier(8, "teacher")
        teacher.trainable = False
        model = Distiller(classifier(4, "student"), teacher)
        model.compile(
            optimizer=keras.optimizers.Adam(0.001),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
            student_loss_fn=logits_loss(),
            distillation_loss_fn=keras.losses.KLDivergence(),
            alpha=0.1,
            temperature=10,
        )
        return model

    return build, fit(X, Y, predict=X, evaluate=True)


@program("https://keras.io/guides/custom_train_step_in_tensorflow/", options=INVARIANT)
def sums_over_samples():
    """A step with `reduce_sum` for the loss, behind a dropout and a Dense on three axes."""

    class Summing(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = tf.reduce_sum(tf.square(y_pred - y))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"sum": loss, "ratio": loss / tf.reduce_sum(tf.square(y))}

    def build():
        inputs = keras.Input((4, 2))
        x = layers.Dropout(0.3)(layers.Dense(4, activation="tanh")(inputs))
        model = Summing(inputs, layers.Dense(2)(x))
        model.compile(keras.optimizers.SGD(0.001))
        return model

    data = X.reshape(23, 4, 2)
    return build, fit(data, np.sin(data), predict=data)


@program("https://keras.io/examples/vision/gradient_centralization/")
def gradient_centralization():
    """An optimizer of one's own that takes the mean out of each gradient."""

    class GCRMSprop(keras.optimizers.RMSprop):
        def apply(self, grads, trainable_variables=None):
            centralized = []
            for grad in grads:
                if len(grad.shape) > 1:
                    axis = list(range(len(grad.shape) - 1))
                    grad = grad - ops.mean(grad, axis=axis, keepdims=True)
                centralized.append(grad)
            return super().apply(centralized, trainable_variables)

    def build():
        model = classifier()
        model.compile(GCRMSprop(learning_rate=1e-3), logits_loss(), metrics=["accuracy"])
        return model

    return build, fit(X, Y, predict=X)


@program("https://keras.io/guides/writing_a_custom_training_loop_in_tensorflow/", towers=(4, 3))
def accumulated_by_variables():
    """Gradients are summed in variables, and applied and cleared by every second step, without a branch."""

    class Accumulating(keras.Sequential):
        def build(self, input_shape=None):
            super().build(input_shape)
            if not hasattr(self, "accumulated"):
                self.seen = tf.Variable(0, trainable=False)
                self.accumulated = [
                    tf.Variable(tf.zeros_like(v.value), trainable=False) for v in self.trainable_variables
                ]

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            for total, gradient in zip(self.accumulated, gradients, strict=True):
                total.assign_add(gradient)
            self.seen.assign_add(1)
            due = tf.cast(self.seen % 2 == 0, "float64")
            self.optimizer.apply([due * total for total in self.accumulated], self.trainable_variables)
            for total in self.accumulated:
                total.assign((1.0 - due) * total)
            return {"total": loss}

    def build():
        model = Accumulating([keras.Input((8,)), layers.Dense(4, activation="tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), logits_loss())
        return model

    return build, fit(X, Y, epochs=2, predict=X)


@program("https://keras.io/api/optimizers/")
def gradient_accumulation_of_keras():
    """The same by Keras' own option: the optimizer sums the gradients."""

    def build():
        model = classifier()
        optimizer = keras.optimizers.Adam(0.001, gradient_accumulation_steps=2)
        model.compile(optimizer, logits_loss())
        return model

    return build, fit(X, Y, epochs=2)


@program("https://www.tensorflow.org/neural_structured_learning/tutorials/adversarial_keras_cnn_mnist")
def adversarial_regularisation():
    """Inputs are moved along the normalised gradient of their loss, then trained on."""

    class Adversarial(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = self.compute_loss(x, y, self(x, training=True))
                gradient = inner.gradient(loss, x)
                norm = tf.sqrt(tf.reduce_sum(tf.square(gradient), axis=-1, keepdims=True)) + 1e-12
                adversarial = tf.stop_gradient(x + 0.2 * gradient / norm)
                total = loss + 0.2 * self.compute_loss(adversarial, y, self(adversarial, training=True))
            gradients = tape.gradient(total, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"total": total}

    def build():
        model = Adversarial([keras.Input((8,)), layers.Dense(4, activation="tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), logits_loss())
        return model

    return build, fit(X, Y, predict=X)


@program("https://www.tensorflow.org/tutorials/generative/adversarial_fgsm")
def fast_gradient_sign():
    """The sign of the inputs' gradient of a loss that is summed: magnitudes do not matter, zeros would."""

    class FGSM(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
            x = x + 0.1 * tf.sign(inner.gradient(loss, x))
            return super().train_step((x, y))

    def build():
        model = FGSM([keras.Input((8,)), layers.Dense(4, activation="tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), logits_loss(), metrics=["accuracy"])
        return model

    return build, fit(X, Y, predict=X, evaluate=True)


@program("https://arxiv.org/abs/1704.03976", options=INVARIANT)
def virtual_adversarial_training():
    """Power iteration for the direction that changes the output most, from noise of the inputs' shape."""

    class VAT(keras.Sequential):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seeds = keras.random.SeedGenerator(3)

        def train_step(self, data):
            x, y = data
            d = keras.random.normal(ops.shape(x), seed=self.seeds)
            with tf.GradientTape() as tape:
                logits = self(x, training=True)
                clean = tf.stop_gradient(tf.nn.softmax(logits))
                d = 1e-2 * tf.math.l2_normalize(d, axis=-1)
                with tf.GradientTape() as inner:
                    inner.watch(d)
                    divergence = keras.losses.kl_divergence(clean, tf.nn.softmax(self(x + d)))
                direction = tf.math.l2_normalize(inner.gradient(divergence, d), axis=-1)
                moved = tf.nn.softmax(self(x + tf.stop_gradient(direction)))
                loss = self.compute_loss(x, y, logits) + tf.reduce_mean(keras.losses.kl_divergence(clean, moved))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"total": loss}

    def build():
        model = VAT([keras.Input((8,)), layers.Dense(4, activation="tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), logits_loss())
        return model

    return build, fit(X, Y)


@program("https://arxiv.org/abs/1703.03400", towers=(4, 3), coupled=True)
def maml():
    """One inner step on the support, by a gradient through which the outer one goes."""

    class MAML(keras.Model):
        def __init__(self):
            super().__init__()
            self.w1 = self.add_weight(shape=(8, 5), name="w1")
            self.b1 = self.add_weight(shape=(5,), initializer="zeros", name="b1")
            self.w2 = self.add_weight(shape=(5, 1), name="w2")

        def forward(self, x, weights):
            w1, b1, w2 = weights
            return tf.matmul(tf.tanh(tf.matmul(x, w1) + b1), w2)

        def train_step(self, data):
            support, query = data
            weights = [weight.value for weight in self.trainable_variables]
            with tf.GradientTape() as outer:
                outer.watch(weights)
                with tf.GradientTape() as inner:
                    inner.watch(weights)
                    inner_loss = tf.reduce_mean((self.forward(support, weights) - support[:, :1]) ** 2)
                inner_gradients = inner.gradient(inner_loss, weights)
                fast = [w - 0.5 * g for w, g in zip(weights, inner_gradients, strict=True)]
                outer_loss = tf.reduce_mean((self.forward(query, fast) - query[:, :1]) ** 2)
            gradients = outer.gradient(outer_loss, weights)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"outer_loss": outer_loss, "inner_loss": inner_loss}

    def build():
        model = MAML()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return build, fit(X, X[::-1] * 0.9)


@program("https://keras.io/examples/vision/reptile/")
def reptile():
    """Inner steps that assign the weights, then a step from the old ones towards the new."""

    class Reptile(keras.Sequential):
        def train_step(self, data):
            x, y = data
            old_vars = [tf.identity(v.value) for v in self.trainable_variables]
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply(gradients, self.trainable_variables)
            for variable, old in zip(self.trainable_variables, old_vars, strict=True):
                variable.assign(old + 0.25 * (variable.value - old))
            return {"inner": tf.reduce_mean(loss)}

    def build():
        model = Reptile([keras.Input((8,)), layers.Dense(4, activation="tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.003))
        return model

    return build, fit(X, Y, predict=X)


@program("https://keras.io/examples/vision/sharpness_aware_minimization/", towers=(4, 3))
def sharpness_aware_minimisation():
    """Weights move by the normalised gradient, the gradient is taken there, weights move back."""

    class SAMModel(keras.Model):
        def __init__(self, net, rho=0.05):
            super().__init__()
            self.net = net
            self.rho = rho

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            images, labels = data
            e_ws = []
            with tf.GradientTape() as tape:
                loss = self.compute_loss(images, labels, self.net(images))
            trainable_params = self.net.trainable_variables
            gradients = tape.gradient(loss, trainable_params)
            grad_norm = tf.norm(tf.stack([tf.norm(grad) for grad in gradients if grad is not None]))
            scale = self.rho / (grad_norm + 1e-12)
            for gradient, param in zip(gradients, trainable_params, strict=True):
                e_w = gradient * scale
                param.assign_add(e_w)
                e_ws.append(e_w)
            with tf.GradientTape() as tape:
                predictions = self.net(images)
                loss = self.compute_loss(images, labels, predictions)
            sam_gradients = tape.gradient(loss, trainable_params)
            for param, e_w in zip(trainable_params, e_ws, strict=True):
                param.assign_sub(e_w)
            self.optimizer.apply_gradients(zip(sam_gradients, trainable_params, strict=True))
            return {"sam": loss, "norm": grad_norm}

    def build():
        model = SAMModel(classifier())
        model.compile(keras.optimizers.SGD(0.1), logits_loss())
        return model

    return build, fit(X, Y, predict=X)


@program("https://keras.io/examples/vision/adamatch/", options=INVARIANT)
def adamatch():
    """Pseudo labels: distributions aligned by means over the batch, a threshold by a mean of maxima."""

    class AdaMatch(keras.Model):
        def __init__(self):
            super().__init__()
            self.model = classifier()
            self.weak = keras.Sequential([keras.Input((8,)), layers.GaussianNoise(0.05)])
            self.tau = 0.9

        def train_step(self, data):
            source, target, labels = data
            target_w = self.weak(target, training=True)
            combined = tf.concat([source, target_w], 0)
            with tf.GradientTape() as tape:
                logits = self.model(combined, training=True)
                rows = tf.shape(source)[0]
                source_logits, target_logits = logits[:rows], logits[rows:]
                pseudo_source = tf.nn.softmax(source_logits)
                pseudo_target = tf.nn.softmax(target_logits)
                expectation = tf.reduce_mean(pseudo_source) / tf.reduce_mean(pseudo_target, axis=0)
                final = pseudo_target * expectation
                final = final / tf.reduce_sum(final, axis=-1, keepdims=True)
                row_wise_max = tf.reduce_max(pseudo_source, axis=-1)
                c_tau = self.tau * tf.reduce_mean(row_wise_max)
                mask = tf.cast(tf.reduce_max(final, axis=-1) >= c_tau, final.dtype)
                source_loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(labels, source_logits, from_logits=True)
                )
                target_loss = keras.losses.categorical_crossentropy(
                    tf.stop_gradient(final), target_logits, from_logits=True
                )
                total = source_loss + tf.reduce_mean(target_loss * mask)
            gradients = tape.gradient(total, self.model.trainable_variables)
            self.optimizer.apply(gradients, self.model.trainable_variables)
            return {"total": total, "kept": tf.reduce_mean(mask)}

    def build():
        model = AdaMatch()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    dataset = tf.data.Dataset.from_tensor_slices((X, X[::-1] + 0.3, Y))
    return build, fit(dataset.batch(10))


@program("https://keras.io/examples/vision/super_resolution_sub_pixel/")
def super_resolution():
    """Sub-pixel convolution by `depth_to_space`, and a metric from the loss' logarithm."""

    class SuperResolution(keras.Model):
        def test_step(self, data):
            logs = super().test_step(data)
            x, y = data
            error = ops.mean(ops.square(self(x, training=False) - y))
            return {**logs, "psnr": 10.0 * ops.log10(1.0 / error)}

    def build():
        inputs = keras.Input((None, None, 1))
        x = layers.Conv2D(3, 3, padding="same", activation="relu")(inputs)
        x = layers.Conv2D(4, 3, padding="same")(x)
        outputs = layers.Lambda(lambda t: tf.nn.depth_to_space(t, 2), output_shape=(None, None, 1))(x)
        model = SuperResolution(inputs, outputs)
        model.compile(keras.optimizers.Adam(0.001), keras.losses.MeanSquaredError())
        return model

    small = IMAGES[:, ::2, ::2]
    return build, fit(small, IMAGES, predict=small, evaluate=True)


@program("https://www.tensorflow.org/tutorials/generative/style_transfer")
def style_losses():
    """Gram matrices by einsum, a mean over the batch of their distance, and total variation, a sum."""

    class StyleModel(keras.Model):
        def __init__(self):
            super().__init__()
            self.features = keras.Sequential(
                [keras.Input((6, 6, 1)), layers.Conv2D(3, 3, activation="relu", trainable=False)]
            )
            self.transform = keras.Sequential(
                [keras.Input((6, 6, 1)), layers.Conv2D(1, 3, padding="same", name="transform")]
            )

        def gram_matrix(self, tensor):
            result = tf.linalg.einsum("bijc,bijd->bcd", tensor, tensor)
            shape = tf.shape(tensor)
            return result / tf.cast(shape[1] * shape[2], tensor.dtype)

        def train_step(self, data):
            content, style = data
            with tf.GradientTape() as tape:
                image = self.transform(content)
                outputs, targets = self.features(image), self.features(style)
                style_loss = tf.add_n([tf.reduce_mean((self.gram_matrix(outputs) - self.gram_matrix(targets)) ** 2)])
                content_loss = tf.reduce_mean((outputs - self.features(content)) ** 2)
                variation = tf.reduce_sum(tf.image.total_variation(image))
                loss = style_loss + 0.1 * content_loss + 0.01 * variation
            gradients = tape.gradient(loss, self.transform.trainable_variables)
            self.optimizer.apply(gradients, self.transform.trainable_variables)
            return {"style": style_loss, "variation": variation, "total": loss}

    def build():
        model = StyleModel()
        model.compile(keras.optimizers.Adam(0.002, beta_1=0.99, epsilon=1e-1))
        return model

    return build, fit(IMAGES, IMAGES[::-1])


@program("https://keras.io/guides/making_new_layers_and_models_via_subclassing/", options=INVARIANT)
def activity_summed():
    """A layer that adds the sum of its activations to the losses, behind a dropout."""

    class ActivityRegularizationLayer(layers.Layer):
        def __init__(self, rate=1e-2):
            super().__init__()
            self.rate = rate

        def call(self, inputs):
            self.add_loss(self.rate * ops.sum(ops.square(inputs)))
            return inputs

    def build():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(6, activation="relu"),
                layers.Dropout(0.2),
                ActivityRegularizationLayer(),
                layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), logits_loss())
        return model

    return build, fit(X, Y, predict=X, evaluate=True)


@program("https://keras.io/examples/vision/masked_image_modeling/", options=INVARIANT, towers=(4, 3))
def masked_autoencoder():
    """Patches chosen by `argsort` of random numbers per row, gathered by `batch_dims`; learned positions."""

    patches, kept, width = 4, 2, 9

    class PatchEncoder(layers.Layer):
        def __init__(self):
            super().__init__()
            self.projection = layers.Dense(4)
            self.position_embedding = layers.Embedding(patches, 4)
            self.mask_token = self.add_weight(shape=(1, width), name="mask_token")
            self.seeds = keras.random.SeedGenerator(5)

        def call(self, flat):
            batch_size = ops.shape(flat)[0]
            positions = ops.arange(0, patches)[None]
            pos_embeddings = ops.tile(self.position_embedding(positions), [batch_size, 1, 1])
            embeddings = self.projection(flat) + pos_embeddings
            order = ops.argsort(keras.random.uniform((batch_size, patches), seed=self.seeds), axis=-1)
            mask, unmask = order[:, :kept], order[:, kept:]
            unmasked = tf.gather(embeddings, unmask, axis=1, batch_dims=1)
            masked_positions = tf.gather(pos_embeddings, mask, axis=1, batch_dims=1)
            tokens = ops.tile(self.mask_token[None], [batch_size, kept, 1])
            return unmasked, self.projection(tokens) + masked_positions, mask

    class MaskedAutoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.patch_encoder = PatchEncoder()
            self.encoder = layers.Dense(4, activation="gelu")
            self.mixer = layers.MultiHeadAttention(1, 4, use_bias=False)
            self.decoder = layers.Dense(width, activation="sigmoid")

        def train_step(self, images):
            flat = tf.reshape(
                tf.image.extract_patches(images, [1, 3, 3, 1], [1, 3, 3, 1], [1, 1, 1, 1], "VALID"),
                (-1, patches, width),
            )
            with tf.GradientTape() as tape:
                unmasked, masked, mask = self.patch_encoder(flat)
                decoder_inputs = tf.concat([self.encoder(unmasked), masked], axis=1)
                outputs = self.decoder(self.mixer(decoder_inputs, decoder_inputs))
                loss_patch = tf.gather(flat, mask, axis=1, batch_dims=1)
                total_loss = self.compute_loss(y=loss_patch, y_pred=outputs[:, kept:])
            gradients = tape.gradient(total_loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"total": total_loss}

    def build():
        model = MaskedAutoencoder()
        model.compile(keras.optimizers.AdamW(0.001), keras.losses.MeanSquaredError())
        return model

    return build, fit(IMAGES)
