"""Generative models with a `train_step` of their own: GANs, VAEs, diffusion."""

import keras
import numpy as np
import tensorflow as tf
from harness import fit, program
from keras import layers, ops

RNG = np.random.default_rng(2)
IMAGES = RNG.random((23, 6, 6, 1))
LABELS = RNG.integers(0, 2, 23)
INVARIANT = {"exact": ("random",)}


def discriminator(channels=1):
    return keras.Sequential(
        [
            keras.Input((6, 6, channels)),
            layers.Conv2D(3, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dense(1),
        ],
        name="discriminator",
    )


def generator(latent_dim=4):
    return keras.Sequential(
        [
            keras.Input((latent_dim,)),
            layers.Dense(3 * 3 * 2),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Reshape((3, 3, 2)),
            layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


class GAN(keras.Model):
    """The DCGAN example's: generated and real images in one batch, noise on the labels."""

    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images):
        batch_size = ops.shape(real_images)[0]
        random_latent_vectors = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        generated_images = self.generator(random_latent_vectors)
        combined_images = ops.concatenate([generated_images, real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined_images)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))
        random_latent_vectors = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        misleading_labels = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(random_latent_vectors))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def gan():
    model = GAN(discriminator(), generator(), latent_dim=4)
    model.compile(
        d_optimizer=keras.optimizers.Adam(0.0001),
        g_optimizer=keras.optimizers.Adam(0.0001),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


@program("https://keras.io/examples/generative/dcgan_overriding_train_step/", options=INVARIANT, towers=(4, 3))
def dcgan():
    """Noise of the shape of two copies of the batch, one below the other."""
    return gan, fit(IMAGES)


@program("https://keras.io/examples/generative/dcgan_overriding_train_step/", warned="(?i)random|drawn")
def dcgan_per_tower():
    """The same with random numbers per tower, the default, which is warned of."""
    return gan, fit(IMAGES)


@program("https://keras.io/examples/generative/conditional_gan/", options=INVARIANT)
def conditional_gan():
    """One-hot labels as channels of the images, repeated over the pixels, beside noise with labels."""

    class ConditionalGAN(GAN):
        def train_step(self, data):
            real_images, one_hot_labels = data
            image_one_hot_labels = ops.repeat(one_hot_labels[:, :, None, None], repeats=36)
            image_one_hot_labels = ops.reshape(image_one_hot_labels, (-1, 6, 6, 2))
            batch_size = ops.shape(real_images)[0]
            noise = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
            vector_labels = ops.concatenate([noise, one_hot_labels], axis=1)
            generated_images = self.generator(vector_labels)
            fake = ops.concatenate([generated_images, image_one_hot_labels], -1)
            real = ops.concatenate([real_images, image_one_hot_labels], -1)
            combined_images = ops.concatenate([fake, real], axis=0)
            labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, self.discriminator(combined_images))
            grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
            self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))
            with tf.GradientTape() as tape:
                fake_images = self.generator(vector_labels)
                fake = ops.concatenate([fake_images, image_one_hot_labels], -1)
                g_loss = self.loss_fn(ops.zeros((batch_size, 1)), self.discriminator(fake))
            grads = tape.gradient(g_loss, self.generator.trainable_weights)
            self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
            self.d_loss_metric.update_state(d_loss)
            self.g_loss_metric.update_state(g_loss)
            return {m.name: m.result() for m in self.metrics}

    def build():
        model = ConditionalGAN(discriminator(3), generator(6), latent_dim=4)
        model.compile(
            d_optimizer=keras.optimizers.Adam(0.0003),
            g_optimizer=keras.optimizers.Adam(0.0003),
            loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
        )
        return model

    return build, fit(IMAGES, np.eye(2)[LABELS])


@program("https://keras.io/examples/generative/wgan_gp/", options=INVARIANT, towers=(4, 3), still="dense.*/bias")
def wgan_gp():
    """Two critic steps for one of the generator; the norm of a gradient with respect to mixed images."""

    class WGAN(keras.Model):
        def __init__(self, discriminator, generator, latent_dim, discriminator_extra_steps=2, gp_weight=10.0):
            super().__init__()
            self.discriminator = discriminator
            self.generator = generator
            self.latent_dim = latent_dim
            self.d_steps = discriminator_extra_steps
            self.gp_weight = gp_weight
            self.seeds = keras.random.SeedGenerator(7)

        def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
            super().compile()
            self.d_optimizer = d_optimizer
            self.g_optimizer = g_optimizer
            self.d_loss_fn = d_loss_fn
            self.g_loss_fn = g_loss_fn

        def gradient_penalty(self, batch_size, real_images, fake_images):
            alpha = keras.random.uniform((batch_size, 1, 1, 1), seed=self.seeds)
            interpolated = real_images + alpha * (fake_images - real_images)
            with tf.GradientTape() as gp_tape:
                gp_tape.watch(interpolated)
                pred = self.discriminator(interpolated, training=True)
            grads = gp_tape.gradient(pred, [interpolated])[0]
            norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]))
            return tf.reduce_mean((norm - 1.0) ** 2)

        def train_step(self, real_images):
            if isinstance(real_images, tuple):
                real_images = real_images[0]
            batch_size = tf.shape(real_images)[0]
            for _ in range(self.d_steps):
                latent = keras.random.normal((batch_size, self.latent_dim), seed=self.seeds)
                with tf.GradientTape() as tape:
                    fake_images = self.generator(latent, training=True)
                    fake_logits = self.discriminator(fake_images, training=True)
                    real_logits = self.discriminator(real_images, training=True)
                    d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                    gp = self.gradient_penalty(batch_size, real_images, fake_images)
                    d_loss = d_cost + gp * self.gp_weight
                d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
                self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables, strict=True))
            latent = keras.random.normal((batch_size, self.latent_dim), seed=self.seeds)
            with tf.GradientTape() as tape:
                generated_images = self.generator(latent, training=True)
                g_loss = self.g_loss_fn(self.discriminator(generated_images, training=True))
            gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
            self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables, strict=True))
            return {"d_loss": d_loss, "g_loss": g_loss}

    def build():
        model = WGAN(discriminator(), generator(), 4)
        model.compile(
            d_optimizer=keras.optimizers.SGD(0.01),
            g_optimizer=keras.optimizers.SGD(0.1),
            d_loss_fn=lambda real_img, fake_img: tf.reduce_mean(fake_img) - tf.reduce_mean(real_img),
            g_loss_fn=lambda fake_img: -tf.reduce_mean(fake_img),
        )
        return model

    return build, fit(IMAGES)


class Sampling(layers.Layer):
    """Draws from the latent normal distribution."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        epsilon = keras.random.normal(ops.shape(z_mean), seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


@program("https://keras.io/examples/generative/vae/", options=INVARIANT, towers=(4, 3))
def vae():
    """Reconstruction summed over pixels, meaned over rows; the divergence summed over a row, meaned."""

    class VAE(keras.Model):
        def __init__(self, encoder, decoder, **kwargs):
            super().__init__(**kwargs)
            self.encoder = encoder
            self.decoder = decoder
            self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
            self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
            self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

        @property
        def metrics(self):
            return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

        def train_step(self, data):
            with tf.GradientTape() as tape:
                z_mean, z_log_var, z = self.encoder(data)
                reconstruction = self.decoder(z)
                reconstruction_loss = ops.mean(
                    ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2))
                )
                kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
                kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
                total_loss = reconstruction_loss + kl_loss
            grads = tape.gradient(total_loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
            self.total_loss_tracker.update_state(total_loss)
            self.reconstruction_loss_tracker.update_state(reconstruction_loss)
            self.kl_loss_tracker.update_state(kl_loss)
            return {m.name: m.result() for m in self.metrics}

    def build():
        inputs = keras.Input((6, 6, 1))
        x = layers.Conv2D(2, 3, activation="relu", strides=2, padding="same")(inputs)
        x = layers.Dense(5, activation="relu")(layers.Flatten()(x))
        z_mean = layers.Dense(2, name="z_mean")(x)
        z_log_var = layers.Dense(2, name="z_log_var")(x)
        z = Sampling()([z_mean, z_log_var])
        encoder = keras.Model(inputs, [z_mean, z_log_var, z], name="encoder")
        model = VAE(encoder, generator(2))
        model.compile(optimizer=keras.optimizers.Adam())
        return model

    return build, fit(IMAGES)


@program("https://keras.io/guides/making_new_layers_and_models_via_subclassing/", options=INVARIANT)
def vae_with_add_loss():
    """The guide's unbuilt subclassed model: a divergence by `add_loss`, behind a draw of the layer's own."""

    class Encoder(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense_proj = layers.Dense(6, activation="relu")
            self.dense_mean = layers.Dense(3)
            self.dense_log_var = layers.Dense(3)
            self.sampling = Sampling()

        def call(self, inputs):
            x = self.dense_proj(inputs)
            z_mean, z_log_var = self.dense_mean(x), self.dense_log_var(x)
            return z_mean, z_log_var, self.sampling((z_mean, z_log_var))

    class Decoder(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense_proj = layers.Dense(6, activation="relu")
            self.dense_output = layers.Dense(36, activation="sigmoid")

        def call(self, inputs):
            return self.dense_output(self.dense_proj(inputs))

    class VariationalAutoEncoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = Encoder()
            self.decoder = Decoder()

        def call(self, inputs):
            z_mean, z_log_var, z = self.encoder(inputs)
            reconstructed = self.decoder(z)
            kl_loss = -0.5 * ops.mean(z_log_var - ops.square(z_mean) - ops.exp(z_log_var) + 1)
            self.add_loss(kl_loss)
            return reconstructed

    def build():
        model = VariationalAutoEncoder()
        model.compile(keras.optimizers.Adam(1e-3), keras.losses.MeanSquaredError())
        return model

    flat = IMAGES.reshape(23, 36)
    return build, fit(flat, flat)


@keras.saving.register_keras_serializable("programs")
def sinusoidal_embedding(x):
    return ops.concatenate([ops.sin(3.0 * x), ops.cos(3.0 * x)], axis=3)


@program("https://keras.io/examples/generative/ddim/", options=INVARIANT, towers=(4, 3))
def ddim():
    """Noise and diffusion times per row; after each step an average of the weights, a second network."""

    class DiffusionModel(keras.Model):
        def __init__(self):
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(3)
            self.normalizer = layers.Normalization()
            self.network = self.get_network()
            self.ema_network = keras.models.clone_model(self.network)
            self.ema_network.set_weights(self.network.get_weights())

        def get_network(self):
            noisy_images = keras.Input((6, 6, 1))
            noise_variances = keras.Input((1, 1, 1))
            e = layers.Lambda(sinusoidal_embedding, output_shape=(1, 1, 2))(noise_variances)
            e = layers.UpSampling2D(size=6, interpolation="nearest")(e)
            x = layers.Concatenate()([noisy_images, e])
            x = layers.Conv2D(3, 3, padding="same", activation="swish")(x)
            x = layers.Conv2D(1, 1)(x)
            return keras.Model([noisy_images, noise_variances], x)

        def compile(self, **kwargs):
            super().compile(**kwargs)
            self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
            self.image_loss_tracker = keras.metrics.Mean(name="i_loss")

        @property
        def metrics(self):
            return [self.noise_loss_tracker, self.image_loss_tracker]

        def diffusion_schedule(self, diffusion_times):
            start_angle, end_angle = np.arccos(0.95), np.arccos(0.02)
            diffusion_angles = start_angle + diffusion_times * (end_angle - start_angle)
            return ops.sin(diffusion_angles), ops.cos(diffusion_angles)

        def denoise(self, noisy_images, noise_rates, signal_rates, training):
            network = self.network if training else self.ema_network
            pred_noises = network([noisy_images, noise_rates**2], training=training)
            return pred_noises, (noisy_images - noise_rates * pred_noises) / signal_rates

        def train_step(self, images):
            images = self.normalizer(images, training=True)
            batch_size = ops.shape(images)[0]
            noises = keras.random.normal((batch_size, 6, 6, 1), seed=self.seed_generator)
            diffusion_times = keras.random.uniform(
                (batch_size, 1, 1, 1), minval=0.0, maxval=1.0, seed=self.seed_generator
            )
            noise_rates, signal_rates = self.diffusion_schedule(diffusion_times)
            noisy_images = signal_rates * images + noise_rates * noises
            with tf.GradientTape() as tape:
                pred_noises, pred_images = self.denoise(noisy_images, noise_rates, signal_rates, training=True)
                noise_loss = self.loss(noises, pred_noises)
                image_loss = self.loss(images, pred_images)
            gradients = tape.gradient(noise_loss, self.network.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
            self.noise_loss_tracker.update_state(noise_loss)
            self.image_loss_tracker.update_state(image_loss)
            for weight, ema_weight in zip(self.network.weights, self.ema_network.weights, strict=True):
                ema_weight.assign(0.9 * ema_weight + 0.1 * weight)
            return {m.name: m.result() for m in self.metrics}

    def build():
        model = DiffusionModel()
        model.normalizer.adapt(IMAGES)
        model.compile(
            optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4),
            loss=keras.losses.MeanAbsoluteError(),
        )
        return model

    return build, fit(IMAGES)


@program("https://www.tensorflow.org/tutorials/generative/pix2pix")
def pix2pix():
    """One batch through both networks under two tapes; an L1 loss beside the adversarial one."""

    class Pix2Pix(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator = keras.Sequential(
                [keras.Input((6, 6, 1)), layers.Conv2D(3, 3, padding="same"), layers.Conv2D(1, 1)]
            )
            self.discriminator = discriminator(2)
            self.loss_object = keras.losses.BinaryCrossentropy(from_logits=True)

        def compile(self):
            super().compile()
            self.generator_optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)
            self.discriminator_optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)

        def train_step(self, data):
            input_image, target = data
            with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
                gen_output = self.generator(input_image, training=True)
                disc_real = self.discriminator(tf.concat([input_image, target], -1), training=True)
                disc_generated = self.discriminator(tf.concat([input_image, gen_output], -1), training=True)
                gan_loss = self.loss_object(tf.ones_like(disc_generated), disc_generated)
                l1_loss = tf.reduce_mean(tf.abs(target - gen_output))
                gen_total_loss = gan_loss + 100 * l1_loss
                real_loss = self.loss_object(tf.ones_like(disc_real), disc_real)
                generated_loss = self.loss_object(tf.zeros_like(disc_generated), disc_generated)
                disc_loss = real_loss + generated_loss
            generator_gradients = gen_tape.gradient(gen_total_loss, self.generator.trainable_variables)
            discriminator_gradients = disc_tape.gradient(disc_loss, self.discriminator.trainable_variables)
            self.generator_optimizer.apply_gradients(
                zip(generator_gradients, self.generator.trainable_variables, strict=True)
            )
            self.discriminator_optimizer.apply_gradients(
                zip(discriminator_gradients, self.discriminator.trainable_variables, strict=True)
            )
            return {"gen_total_loss": gen_total_loss, "gen_l1_loss": l1_loss, "disc_loss": disc_loss}

    def build():
        model = Pix2Pix()
        model.compile()
        return model

    return build, fit(IMAGES, np.sqrt(IMAGES[:, ::-1]))


@program("https://keras.io/examples/generative/cyclegan/")
def cyclegan():
    """Four networks with an optimizer each, one persistent tape, cycle and identity losses."""

    class CycleGan(keras.Model):
        def __init__(self, generator_G, generator_F, discriminator_X, discriminator_Y):
            super().__init__()
            self.gen_G, self.gen_F = generator_G, generator_F
            self.disc_X, self.disc_Y = discriminator_X, discriminator_Y
            self.adv_loss_fn = keras.losses.MeanSquaredError()
            self.cycle_loss_fn = keras.losses.MeanAbsoluteError()

        def compile(self):
            super().compile()
            self.optimizers = [keras.optimizers.Adam(2e-4, beta_1=0.5) for _ in range(4)]

        def train_step(self, batch_data):
            real_x, real_y = batch_data
            with tf.GradientTape(persistent=True) as tape:
                fake_y, fake_x = self.gen_G(real_x, training=True), self.gen_F(real_y, training=True)
                cycled_x, cycled_y = self.gen_F(fake_y, training=True), self.gen_G(fake_x, training=True)
                same_x, same_y = self.gen_F(real_x, training=True), self.gen_G(real_y, training=True)
                disc_real_x, disc_fake_x = self.disc_X(real_x, training=True), self.disc_X(fake_x)
                disc_real_y, disc_fake_y = self.disc_Y(real_y, training=True), self.disc_Y(fake_y)
                total_loss_G = (
                    self.adv_loss_fn(tf.ones_like(disc_fake_y), disc_fake_y)
                    + 10.0 * self.cycle_loss_fn(real_y, cycled_y)
                    + 5.0 * self.cycle_loss_fn(real_y, same_y)
                )
                total_loss_F = (
                    self.adv_loss_fn(tf.ones_like(disc_fake_x), disc_fake_x)
                    + 10.0 * self.cycle_loss_fn(real_x, cycled_x)
                    + 5.0 * self.cycle_loss_fn(real_x, same_x)
                )
                disc_X_loss = 0.5 * (
                    self.adv_loss_fn(tf.ones_like(disc_real_x), disc_real_x)
                    + self.adv_loss_fn(tf.zeros_like(disc_fake_x), disc_fake_x)
                )
                disc_Y_loss = 0.5 * (
                    self.adv_loss_fn(tf.ones_like(disc_real_y), disc_real_y)
                    + self.adv_loss_fn(tf.zeros_like(disc_fake_y), disc_fake_y)
                )
            networks = [self.gen_G, self.gen_F, self.disc_X, self.disc_Y]
            losses = [total_loss_G, total_loss_F, disc_X_loss, disc_Y_loss]
            gradients = [
                tape.gradient(loss, network.trainable_variables) for loss, network in zip(losses, networks, strict=True)
            ]
            for optimizer, grads, network in zip(self.optimizers, gradients, networks, strict=True):
                optimizer.apply_gradients(zip(grads, network.trainable_variables, strict=True))
            return dict(zip(("G_loss", "F_loss", "D_X_loss", "D_Y_loss"), losses, strict=True))

    def network():
        return keras.Sequential(
            [keras.Input((6, 6, 1)), layers.Conv2D(2, 3, padding="same", activation="tanh"), layers.Conv2D(1, 1)]
        )

    def build():
        model = CycleGan(network(), network(), discriminator(), discriminator())
        model.compile()
        return model

    return build, fit(IMAGES, np.sqrt(IMAGES[:, ::-1]))


@program("https://keras.io/examples/generative/vq_vae/", towers=(4, 3), still="vector_quantizer/e")
def vq_vae():
    """The nearest codes by a product with the codebook; straight-through gradients; losses by `add_loss`."""

    class VectorQuantizer(layers.Layer):
        def __init__(self, num_embeddings, embedding_dim, beta=0.25):
            super().__init__()
            self.embedding_dim, self.num_embeddings, self.beta = embedding_dim, num_embeddings, beta
            self.embeddings = self.add_weight(
                shape=(embedding_dim, num_embeddings), initializer="random_uniform", name="embeddings_vqvae"
            )

        def call(self, x):
            flattened = ops.reshape(x, [-1, self.embedding_dim])
            similarity = ops.matmul(flattened, self.embeddings)
            distances = (
                ops.sum(flattened**2, axis=1, keepdims=True) + ops.sum(self.embeddings**2, axis=0) - 2 * similarity
            )
            encodings = ops.one_hot(ops.argmin(distances, axis=1), self.num_embeddings, dtype=x.dtype)
            quantized = ops.matmul(encodings, ops.transpose(self.embeddings))
            quantized = ops.reshape(quantized, ops.shape(x))
            commitment_loss = ops.mean((ops.stop_gradient(quantized) - x) ** 2)
            codebook_loss = ops.mean((quantized - ops.stop_gradient(x)) ** 2)
            self.add_loss(self.beta * commitment_loss + codebook_loss)
            return x + ops.stop_gradient(quantized - x)

    class VQVAETrainer(keras.Model):
        def __init__(self, train_variance):
            super().__init__()
            self.train_variance = train_variance
            inputs = keras.Input((6, 6, 1))
            x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
            x = VectorQuantizer(5, 3)(layers.Conv2D(3, 1)(x))
            outputs = layers.Conv2DTranspose(1, 3, strides=2, padding="same")(x)
            self.vqvae = keras.Model(inputs, outputs)
            self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
            self.vq_loss_tracker = keras.metrics.Mean(name="vq_loss")

        @property
        def metrics(self):
            return [self.total_loss_tracker, self.vq_loss_tracker]

        def train_step(self, x):
            with tf.GradientTape() as tape:
                reconstructions = self.vqvae(x)
                reconstruction_loss = ops.mean((x - reconstructions) ** 2) / self.train_variance
                total_loss = reconstruction_loss + sum(self.vqvae.losses)
            grads = tape.gradient(total_loss, self.vqvae.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.vqvae.trainable_variables, strict=True))
            self.total_loss_tracker.update_state(total_loss)
            self.vq_loss_tracker.update_state(sum(self.vqvae.losses))
            return {m.name: m.result() for m in self.metrics}

    def build():
        model = VQVAETrainer(np.var(IMAGES))
        model.compile(keras.optimizers.Adam(0.001))
        return model

    return build, fit(IMAGES)
