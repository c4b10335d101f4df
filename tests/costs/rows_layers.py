"""Each of Keras' layers in a typical use, before a classifier of its features."""

from unittest import mock

import keras
import numpy as np
from costs import fits, row
from keras import layers

RNG = np.random.default_rng(0)
COUNT, CLASSES, TIME, WORDS = 22, 5, 9, 50
LABELS = RNG.integers(0, CLASSES, COUNT)


def floats(*shape):
    return RNG.random((COUNT, *shape)).astype("float32")


def words(*shape, low=0, high=WORDS):
    return RNG.integers(low, high, (COUNT, *shape)).astype("int32")


def classifier(body, *arrays, dtype=None):
    """A `run`: a classifier of what `body(*inputs)` makes of inputs like these arrays."""

    def build():
        inputs = [keras.Input(array.shape[1:], dtype=dtype or array.dtype) for array in arrays]
        features = body(*inputs)
        parts = features if isinstance(features, (tuple, list)) else [features]
        parts = [layers.Flatten()(part) for part in parts]
        outputs = layers.Dense(CLASSES)(layers.Concatenate()(parts) if len(parts) > 1 else parts[0])
        model = keras.Model(inputs[0] if len(inputs) == 1 else inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
        return model

    return fits(build, arrays[0] if len(arrays) == 1 else list(arrays), LABELS)


SERIES, TOKENS = floats(TIME, 4), words(TIME)
IMAGE, VOLUME, FILM, WIDE = floats(8, 8, 3), floats(4, 4, 4, 3), floats(4, 6, 6, 3), floats(12)


def made(cls, *arguments, **options):
    """A body of one layer, made only when the model is."""
    return lambda *inputs: cls(*arguments, **options)(*inputs)


def each(*bodies):
    """A body of several, side by side."""
    return lambda *inputs: [body(*inputs) for body in bodies]


def embedded(tokens, mask_zero=True):
    return layers.Embedding(WORDS, 8, mask_zero=mask_zero)(tokens)


# Recurrent layers, every form.
RECURRENT = {"LSTM": layers.LSTM, "GRU": layers.GRU, "SimpleRNN": layers.SimpleRNN}
FORMS = {
    "": {},
    "return_sequences": {"return_sequences": True},
    "return_state": {"return_sequences": True, "return_state": True},
    "go_backwards": {"go_backwards": True, "return_sequences": True},
    "dropout": {"dropout": 0.2, "recurrent_dropout": 0.2},
    "unroll": {"unroll": True},
}
for kind, cls in RECURRENT.items():
    for form, options in FORMS.items():
        if kind == "LSTM" or form in ("", "return_state"):
            row(f"{kind} {form}".strip(), classifier(made(cls, 6, **options), SERIES))
    row(f"{kind} mask_zero", classifier(lambda x, cls=cls: cls(6)(embedded(x)), TOKENS))
    row(
        f"Bidirectional {kind}",
        classifier(lambda x, cls=cls: layers.Bidirectional(cls(6, return_sequences=True))(x), SERIES),
    )

row(
    "Bidirectional LSTM mask_zero, stacked",
    classifier(
        lambda x: layers.LSTM(6)(layers.Bidirectional(layers.LSTM(6, return_sequences=True))(embedded(x))), TOKENS
    ),
)
row("RNN of stacked cells", classifier(lambda x: layers.RNN([layers.LSTMCell(6), layers.GRUCell(5)])(x), SERIES))
row(
    "LSTM with initial_state",
    classifier(lambda x, h, c: layers.LSTM(6)(x, initial_state=[h, c]), SERIES, floats(6), floats(6)),
)


def by_cudnn(run):
    """A `run` that is traced as where there is a GPU: recurrent layers are one op, which no CPU runs."""

    def traced():
        with mock.patch("keras.src.backend.tensorflow.rnn._is_gpu_available", return_value=True):
            return run()

    return traced


CUDNN = {
    "LSTM": lambda x: layers.LSTM(6)(embedded(x, False)),
    "GRU mask_zero, return_sequences": lambda x: layers.GRU(6, return_sequences=True)(embedded(x)),
    "Bidirectional LSTM mask_zero": lambda x: layers.Bidirectional(layers.LSTM(6, return_sequences=True))(embedded(x)),
    "seq2seq": lambda x: layers.LSTM(6, return_sequences=True)(
        embedded(x), initial_state=layers.LSTM(6, return_state=True, go_backwards=True)(embedded(x))[1:]
    ),
}
for name, body in CUDNN.items():
    row(f"cuDNN: {name}", by_cudnn(classifier(body, TOKENS)))

row("ConvLSTM1D", classifier(made(layers.ConvLSTM1D, 4, 3), floats(4, 6, 3)))
row("ConvLSTM2D", classifier(made(layers.ConvLSTM2D, 4, 3, return_sequences=True), FILM))
row("ConvLSTM3D", classifier(made(layers.ConvLSTM3D, 2, 2), floats(3, 3, 3, 3, 2)))
row("TimeDistributed", classifier(lambda x: layers.TimeDistributed(layers.Conv2D(4, 3))(x), FILM))
row("TimeDistributed Dense, masked", classifier(lambda x: layers.TimeDistributed(layers.Dense(4))(embedded(x)), TOKENS))

# Attention.
row("MultiHeadAttention", classifier(lambda x: layers.MultiHeadAttention(2, 4)(x, x), SERIES))
row(
    "MultiHeadAttention causal, masked",
    classifier(lambda x: layers.MultiHeadAttention(2, 4)(embedded(x), embedded(x), use_causal_mask=True), TOKENS),
)
row("MultiHeadAttention dropout", classifier(lambda x: layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x), SERIES))
row("GroupQueryAttention", classifier(lambda x: layers.GroupQueryAttention(4, 4, 2)(x, x), SERIES))
row("Attention", classifier(lambda x, y: layers.Attention(use_scale=True)([x, y]), SERIES, floats(7, 4)))
row("Attention masked", classifier(lambda x: layers.Attention()([embedded(x), embedded(x)]), TOKENS))
row("AdditiveAttention", classifier(lambda x: layers.AdditiveAttention()([x, x]), SERIES))

# Normalisations.
row("LayerNormalization", classifier(made(layers.LayerNormalization), SERIES))
row("RMSNormalization", classifier(made(layers.RMSNormalization), SERIES))
row("BatchNormalization", classifier(lambda x: layers.BatchNormalization()(layers.Conv2D(8, 3)(x)), IMAGE))
row("BatchNormalization masked", classifier(lambda x: layers.BatchNormalization()(embedded(x)), TOKENS))
row("GroupNormalization", classifier(lambda x: layers.GroupNormalization(2)(layers.Conv2D(8, 3)(x)), IMAGE))
row("UnitNormalization", classifier(made(layers.UnitNormalization), WIDE))
row("SpectralNormalization", classifier(lambda x: layers.SpectralNormalization(layers.Dense(8))(x), WIDE))

# Pooling.
for axes, value in (("1D", SERIES), ("2D", IMAGE), ("3D", VOLUME)):
    for kind in ("Max", "Average"):
        cls, of_all, adaptive = (
            getattr(layers, f"{prefix}{kind}Pooling{axes}") for prefix in ("", "Global", "Adaptive")
        )
        bodies = [made(cls, 2), made(cls, 2, strides=1, padding="same"), made(of_all), made(adaptive, 3)]
        row(f"{kind}Pooling{axes}", classifier(each(*bodies), value))
row("GlobalAveragePooling1D masked", classifier(lambda x: layers.GlobalAveragePooling1D()(embedded(x)), TOKENS))

# Convolutions.
for axes, value in (("1D", SERIES), ("2D", IMAGE), ("3D", VOLUME)):
    plain, transposed = getattr(layers, f"Conv{axes}"), getattr(layers, f"Conv{axes}Transpose")
    bodies = [
        made(plain, 6, 2, padding="same", activation="relu"),
        made(plain, 6, 2, strides=2),
        made(transposed, 6, 2, strides=2),
    ]
    row(f"Conv{axes}, Conv{axes}Transpose", classifier(each(*bodies), value))
    row(f"Conv{axes} dilated", classifier(made(plain, 6, 2, dilation_rate=2), value))
    row(f"Conv{axes} grouped", classifier(lambda x, plain=plain: plain(6, 2, groups=3)(plain(6, 2)(x)), value))
for axes, value in (("1D", SERIES), ("2D", IMAGE)):
    separable, depthwise = getattr(layers, f"SeparableConv{axes}"), getattr(layers, f"DepthwiseConv{axes}")
    row(
        f"SeparableConv{axes}, DepthwiseConv{axes}",
        classifier(each(made(separable, 6, 3), made(depthwise, 3, depth_multiplier=2)), value),
    )
row("Conv1D causal, dilated", classifier(made(layers.Conv1D, 6, 3, padding="causal", dilation_rate=2), SERIES))

# Shapes, merges, activations.
SHAPED = {
    "Reshape": lambda x: layers.Reshape((4, TIME))(x),
    "Permute": lambda x: layers.Permute((2, 1))(x),
    "RepeatVector": lambda x: layers.RepeatVector(3)(layers.Flatten()(x)),
    "Cropping1D, ZeroPadding1D, UpSampling1D": lambda x: layers.UpSampling1D(2)(
        layers.ZeroPadding1D(1)(layers.Cropping1D(1)(x))
    ),
    "Masking": lambda x: layers.Masking()(x),
    "Dot": lambda x: layers.Dot(axes=2)([x, layers.Dense(4)(x)]),
    "Add, Subtract, Multiply, Average, Maximum, Minimum": lambda x: [
        merge([x, layers.Dense(4)(x)])
        for merge in (
            layers.Add(),
            layers.Subtract(),
            layers.Multiply(),
            layers.Average(),
            layers.Maximum(),
            layers.Minimum(),
        )
    ],
    "LeakyReLU, PReLU, ELU, ReLU, Softmax": lambda x: layers.Softmax()(
        layers.ReLU(6.0)(layers.ELU()(layers.PReLU()(layers.LeakyReLU()(x))))
    ),
    "Dropout, GaussianDropout, GaussianNoise, AlphaDropout": lambda x: layers.AlphaDropout(0.1)(
        layers.GaussianNoise(0.1)(layers.GaussianDropout(0.1)(layers.Dropout(0.1)(x)))
    ),
    "SpatialDropout1D": lambda x: layers.SpatialDropout1D(0.2)(x),
    "ActivityRegularization": lambda x: layers.ActivityRegularization(0.1, 0.1)(x),
    "EinsumDense": lambda x: layers.EinsumDense("abc,cde->abde", (TIME, 2, 3))(x),
    "Lambda": lambda x: layers.Lambda(lambda one: keras.ops.cumsum(one, 1))(x),
}
for name, body in SHAPED.items():
    row(name, classifier(body, SERIES))
row(
    "SpatialDropout2D, UpSampling2D, Cropping2D, ZeroPadding2D",
    classifier(
        lambda x: layers.SpatialDropout2D(0.2)(
            layers.ZeroPadding2D(1)(layers.Cropping2D(1)(layers.UpSampling2D(2, interpolation="bilinear")(x)))
        ),
        IMAGE,
    ),
)
row(
    "SpatialDropout3D, UpSampling3D, Cropping3D, ZeroPadding3D",
    classifier(
        lambda x: layers.SpatialDropout3D(0.2)(
            layers.ZeroPadding3D(1)(layers.Cropping3D(1)(layers.UpSampling3D(2)(x)))
        ),
        VOLUME,
    ),
)
row("Dense, regularised", classifier(lambda x: layers.Dense(8, activation="gelu", kernel_regularizer="l2")(x), WIDE))

# Embeddings, preprocessing, augmentation.
row("Embedding", classifier(lambda x: embedded(x, mask_zero=False), TOKENS))
row(
    "ReversibleEmbedding",
    classifier(
        lambda x: (lambda e: e(layers.Dense(8)(e(x)), reverse=True))(layers.ReversibleEmbedding(WORDS, 8)), TOKENS
    ),
)
row(
    "Hashing, CategoryEncoding",
    classifier(lambda x: layers.CategoryEncoding(7, output_mode="multi_hot")(layers.Hashing(7)(x)), TOKENS),
)
row(
    "Discretization",
    classifier(
        lambda x: layers.CategoryEncoding(4, output_mode="count")(layers.Discretization([0.2, 0.5, 0.8])(x)), WIDE
    ),
)
row(
    "IntegerLookup",
    classifier(lambda x: layers.Embedding(60, 4)(layers.IntegerLookup(vocabulary=list(range(WORDS)))(x)), TOKENS),
)
row(
    "HashedCrossing",
    classifier(lambda x, y: layers.HashedCrossing(8, output_mode="one_hot")([x, y]), words(1), words(1)),
)
row(
    "Normalization, Rescaling",
    classifier(lambda x: layers.Rescaling(2.0)(layers.Normalization(mean=0.5, variance=0.1)(x)), WIDE),
)
AUGMENTED = {
    "Resizing, CenterCrop": [
        made(layers.Resizing, 5, 5),
        made(layers.Resizing, 4, 6, crop_to_aspect_ratio=True),
        made(layers.CenterCrop, 5, 5),
    ],
    "RandomFlip, RandomCrop": [made(layers.RandomFlip), made(layers.RandomCrop, 8, 8)],
    "RandomRotation, RandomZoom": [made(layers.RandomRotation, 0.1), made(layers.RandomZoom, 0.1)],
    "RandomTranslation, RandomShear": [made(layers.RandomTranslation, 0.1, 0.1), made(layers.RandomShear, 0.1, 0.1)],
    "RandomPerspective": [made(layers.RandomPerspective)],
    "RandomErasing, RandomGaussianBlur": [
        made(layers.RandomErasing),
        made(layers.RandomGaussianBlur, value_range=(0, 1)),
    ],
    "RandomContrast, RandomBrightness, RandomGrayscale, RandomInvert": [
        made(layers.RandomContrast, 0.1),
        made(layers.RandomBrightness, 0.1, (0, 1)),
        made(layers.RandomGrayscale),
        made(layers.RandomInvert, value_range=(0, 1)),
    ],
    "RandomHue, RandomSaturation, RandomSharpness, RandomPosterization": [
        made(layers.RandomHue, 0.1, (0, 1)),
        made(layers.RandomSaturation, 0.1, (0, 1)),
        made(layers.RandomSharpness, 0.1, (0, 1)),
        made(layers.RandomPosterization, 4, (0, 1)),
    ],
    "RandomColorJitter": [made(layers.RandomColorJitter, (0, 1), 0.1, 0.1, 0.1, 0.1)],
    "AutoContrast, Equalization, Solarization": [
        made(layers.AutoContrast, (0, 1)),
        made(layers.Equalization, (0, 1)),
        made(layers.Solarization, value_range=(0, 1)),
    ],
    "AugMix": [made(layers.AugMix, (0, 1))],
    "RandAugment": [made(layers.RandAugment, (0, 1))],
}
for name, bodies in AUGMENTED.items():
    row(name, classifier(each(*bodies), IMAGE))
# Keras' `elastic_transform` loops over the images in Python, and takes an open number of them for 1.
FIRST = dict.fromkeys(
    ("StridedSlice", "Mul", "AddV2", "Transpose", "GatherNd", "Pack"), "Keras distorts the batch's first image alone"
)
row("RandomElasticTransform", classifier(made(layers.RandomElasticTransform), IMAGE), FIRST)
MIXED = {
    "GatherV2": "each image is mixed with another of the batch, by a permutation of its rows",
    "TopKV2": "that permutation sorts one random number of each row",
}
row("MixUp", classifier(made(layers.MixUp), IMAGE), MIXED)
row("CutMix", classifier(made(layers.CutMix), IMAGE), MIXED)
row(
    "MelSpectrogram, STFTSpectrogram",
    classifier(
        lambda x: [
            layers.MelSpectrogram(num_mel_bins=4, fft_length=32, sequence_stride=16)(x),
            layers.STFTSpectrogram(frame_length=32, frame_step=16, fft_length=32)(x[..., None]),
        ],
        floats(128),
    ),
)
