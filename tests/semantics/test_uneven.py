"""Sparse and ragged tensors: each tower computes on its rows' values, however many these are, and gathers none."""

import costs
import numpy as np
import pytest
import tensorflow as tf

import ncclsync

TOWERS, HEIGHT = 3, 6
# Values of each row; of the first batch a tower has none, and of the third there is one in all.
LENGTHS = {"an empty tower": (1, 2, 0, 0, 3), "7 rows": (2, 0, 3, 1, 4, 2, 0), "one value": (0, 0, 1), "2 rows": (2, 1)}
RNG = np.random.default_rng(3)
WEIGHTS = RNG.normal(size=(HEIGHT, 2))


def batch_of(lengths):
    """A batch with a sparse and a ragged tensor of rows of these lengths, and a dense one."""
    rows = len(lengths)
    places = [(row, column) for row, count in enumerate(lengths) for column in sorted(RNG.permutation(HEIGHT)[:count])]
    indices, values = np.reshape(places, [-1, 2]), tf.constant(RNG.normal(size=len(places)))
    return {
        "sparse": tf.SparseTensor(indices, values, [rows, HEIGHT]),
        "ids": tf.SparseTensor(indices, tf.constant(RNG.integers(0, HEIGHT, len(places))), [rows, HEIGHT]),
        "ragged": tf.RaggedTensor.from_row_lengths(values, lengths),
        "tokens": tf.RaggedTensor.from_row_lengths(tf.constant(RNG.integers(0, HEIGHT, len(places))), lengths),
        "other": tf.RaggedTensor.from_row_lengths(tf.constant(RNG.normal(size=len(places))), lengths[::-1]),
        "dense": tf.constant(RNG.normal(size=(rows, 3))),
    }


def embedded(batch, w):
    return batch["tokens"].with_flat_values(tf.gather(w, batch["tokens"].flat_values))


def filled(batch):
    return tf.sparse.fill_empty_rows(batch["ids"], np.int64(2))[0]


def weighted(x, w):
    """Its values, multiplied by what the trained weights have there: so that they have a gradient."""
    return tf.sparse.map_values(lambda v: v * tf.gather(w[:, 0], x.indices[:, 1]), x)


def crossed(batch, w):
    columns = tf.cast(batch["dense"] * 5, tf.int64)
    made = tf.raw_ops.SparseCross(
        indices=[], values=[], shapes=[], dense_inputs=[columns[:, :2], columns[:, 2:]],
        hashed_output=True, num_buckets=6, hash_key=1, out_type=tf.int64, internal_type=tf.int64,
    )  # fmt: skip
    return tf.gather(w, tf.sparse.to_dense(tf.SparseTensor(*made)))


def masked(batch, w):
    """Rows and elements that a mask leaves."""
    x = batch["dense"] @ w[:3]
    return tf.boolean_mask(x, batch["dense"][:, 0] > 0) ** 2, tf.boolean_mask(x, x > 0) ** 3


def waves(x):
    """Complex numbers of each row."""
    return tf.complex(tf.cos(x), tf.sin(x))


def two_units(batch, w):
    """Values of different tensors beside each other, of which there are as many in all, by chance."""
    x, other = tf.gather(w, batch["tokens"].flat_values), batch["other"].flat_values[:, None]
    rows = batch["ragged"].value_rowids()
    return x * other, tf.math.unsorted_segment_sum(other * tf.transpose(w)[:1], rows, batch["ragged"].nrows())


def other_segments(batch, w):
    """Segments that are no rows, and rows that are no segments; what is taken of other rows."""
    x, rows, count = embedded(batch, w).flat_values, batch["tokens"].value_rowids(), batch["tokens"].nrows()
    apart = tf.reshape(batch["dense"] @ w[:3], [-1, 1])  # two for each sample
    summed = tf.math.unsorted_segment_sum(x, rows, 2 * count), tf.math.segment_sum(x, rows)
    return *summed, tf.gather(apart, rows), tf.math.unsorted_segment_sum(x, 0 * rows + 1, 3)


def masked_twice(batch, w):
    """Of one batch after the other."""
    x, mask = batch["dense"] @ w[:3], batch["dense"][:, 0] > 0
    return tf.boolean_mask(tf.concat([x, 2 * x], 0), tf.concat([mask, mask], 0)) ** 2


def made_indices(batch, w):
    """A sparse tensor that the step makes."""
    rows = tf.shape(batch["dense"], tf.int64)[0]
    columns = tf.cast(batch["dense"][:, 0] > 0, tf.int64)
    made = tf.SparseTensor(tf.stack([tf.range(rows), columns], 1), batch["dense"][:, 1], [rows, HEIGHT])
    return tf.sparse.sparse_dense_matmul(made, w), tf.sparse.to_dense(made) @ w


def numbered_rows(batch, deep=False):
    """Indices of elements in each row, that name the row first: two of each."""
    rows, columns = tf.shape(batch["dense"])[0], tf.cast(batch["dense"][:, :2] > 0, tf.int32)
    places = [tf.tile(tf.range(rows)[:, None], [1, 2]), columns]
    return tf.stack([places[0], tf.tile(tf.range(2)[None], [rows, 1]), columns] if deep else places, -1)


def set_by_rows(batch, w):
    """What a copy mechanism, a one-hot target and a cache of keys do: elements of each row are added up, or set."""
    x, places, rows = batch["dense"] @ w[:3], numbered_rows(batch), tf.shape(batch["dense"])[0]
    first = tf.concat([tf.range(rows)[:, None], places[:, 0, 1:]], 1)
    return (
        tf.scatter_nd(places, x, [rows, HEIGHT]),
        tf.scatter_nd(numbered_rows(batch, deep=True), x, [rows, 2, 3]),
        tf.scatter_nd(tf.range(rows)[:, None], x, [rows, 2]),
        tf.scatter_nd(tf.reshape(tf.range(rows) * 2, [-1, 1]), x, [rows * 2, 2]),
        tf.tensor_scatter_nd_update(x, first, x[:, 1] ** 2),
        tf.tensor_scatter_nd_max(batch["dense"], places, x),
        tf.gather_nd(x, places) ** 2,
    )


GRADIENT_OF_SUM, GRADIENT_OF_MEAN = "SparseSegmentSumGradV2", "SparseSegmentMeanGradV2"  # each id once

# Programs, and the types of ops that need all rows.
PROGRAMS = {
    "sparse product": (lambda b, w: tf.sparse.sparse_dense_matmul(b["sparse"], w), ""),
    "sparse product of values": (lambda b, w: tf.sparse.sparse_dense_matmul(weighted(b["sparse"], w), w), ""),
    "sparse product, turned": (lambda b, w: tf.sparse.sparse_dense_matmul(w, b["sparse"], True, True), ""),
    "transposed sparse product": (
        lambda b, w: tf.sparse.sparse_dense_matmul(b["sparse"], b["dense"], adjoint_a=True) * w[:, :1],
        "",
    ),
    "sparse to dense": (lambda b, w: tf.sparse.to_dense(weighted(b["sparse"], w)) @ w, ""),
    "reordered": (lambda b, w: tf.sparse.to_dense(tf.sparse.reorder(b["sparse"])) @ w, ""),
    "sparse softmax": (lambda b, w: tf.sparse.to_dense(tf.sparse.softmax(b["sparse"])) @ w, ""),
    "embedding of sparse ids": (
        lambda b, w: tf.nn.embedding_lookup_sparse(w, filled(b), None, combiner="sum"),
        GRADIENT_OF_SUM,
    ),
    "mean of sparse ids": (
        lambda b, w: tf.nn.embedding_lookup_sparse(w, filled(b), None, combiner="mean"),
        GRADIENT_OF_MEAN,
    ),
    "filled values": (
        lambda b, w: tf.sparse.to_dense(tf.sparse.fill_empty_rows(weighted(b["sparse"], w), w[0, 0])[0]) @ w,
        "",
    ),
    "which rows are empty": (
        lambda b, w: tf.where(tf.sparse.fill_empty_rows(b["sparse"], 0.5)[1], w[0, 0], w[0, 1]),
        "",
    ),
    "columns": (lambda b, w: tf.reduce_sum(tf.gather(w, b["sparse"].indices[:, 1]) ** 2, 1), ""),
    "ragged mean": (lambda b, w: tf.reduce_mean(embedded(b, w), 1), ""),
    "ragged sum": (lambda b, w: tf.reduce_sum(embedded(b, w) ** 2, 1), ""),
    "ragged maximum": (lambda b, w: tf.maximum(tf.reduce_max(embedded(b, w), 1), -9.0), ""),
    "ragged product": (lambda b, w: embedded(b, w).flat_values @ tf.transpose(w), ""),
    "lengths": (lambda b, w: tf.cast(b["ragged"].row_lengths(), tf.float64)[:, None] * w[:1], ""),
    "values by their row": (lambda b, w: tf.gather(b["dense"] @ w[:3], b["ragged"].value_rowids()) ** 2, ""),
    "of all values": (
        lambda b, w: (
            tf.reduce_sum(embedded(b, w).flat_values, 0),
            tf.reduce_max(embedded(b, w).flat_values, 0, keepdims=True),
            tf.transpose(embedded(b, w).flat_values) @ embedded(b, w).flat_values,
        ),
        "",
    ),
    "mean of all values": (lambda b, w: tf.reduce_mean(embedded(b, w).flat_values ** 2, 0), ""),
    "padded": (lambda b, w: tf.gather(w, b["tokens"].to_tensor(2)), ""),
    "padded to a length": (lambda b, w: tf.gather(w, b["tokens"].to_tensor(2, shape=[None, 5])), ""),
    "padded embeddings": (lambda b, w: embedded(b, w).to_tensor(), "GatherV2"),
    "padded embeddings of a length": (
        lambda b, w: embedded(b, w).to_tensor(0.5, shape=[None, 5, 2]),
        "UnsortedSegmentSum",
    ),
    "cumulated": (lambda b, w: tf.cumsum(embedded(b, w).flat_values) ** 2, "Cumsum"),
    "how many": (lambda b, w: w * tf.cast(tf.shape(b["ragged"].flat_values)[0], tf.float64), ""),
    "row splits": (lambda b, w: tf.cast(b["ragged"].row_splits, tf.float64)[:, None] * w[:1], ""),
    "crossed": (crossed, ""),
    "masked": (masked, ""),
    "two units": (two_units, "Mul UnsortedSegmentSum"),
    "other segments": (other_segments, "GatherV2 SegmentSum UnsortedSegmentSum"),
    "masked twice": (masked_twice, "Where GatherV2"),
    "made indices": (made_indices, ""),
    "set by rows": (set_by_rows, ""),
    "sums of complex numbers": (
        lambda b, w: tf.math.real(tf.einsum("bi,ij->j", waves(b["dense"] @ w[:3]), tf.complex(w[:2], w[2:4]))),
        "",
    ),
}


def results_of(call, batch, w):
    """Of a program: its outputs, and the gradient of the sum of their cubes to what is trained."""
    with tf.GradientTape() as tape:
        outputs = tf.nest.flatten(call(batch, w.value()))
        total = sum(tf.reduce_sum(one**3) for one in outputs)
    return [*outputs, tf.convert_to_tensor(tape.gradient(total, w))]


@pytest.mark.slow
def test_uneven_rows():
    """Forward, and backward to what is trained: equal to one device, whichever rows and towers have no values."""
    w = tf.Variable(WEIGHTS)

    def step(batch):
        return {name: results_of(call, batch, w) for name, (call, _) in PROGRAMS.items()}

    batches = {name: batch_of(lengths) for name, lengths in LENGTHS.items()}
    specs = tf.nest.map_structure(opened, next(iter(batches.values())))
    alone = tf.function(step, input_signature=[specs], autograph=False)
    with ncclsync.Towers(TOWERS) as towers:
        for of, batch in batches.items():
            found, expected = towers.run(step, batch), alone(batch)
            for name in PROGRAMS:
                for one, other in zip(found[name], expected[name], strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9, err_msg=f"{of}: {name}")


def opened(leaf):
    """Its spec, for any number of rows and values."""
    shape = [None, *leaf.shape[1:]]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, leaf.dtype)
    sparse = isinstance(leaf, tf.SparseTensor)
    return tf.SparseTensorSpec(shape, leaf.dtype) if sparse else tf.TensorSpec(shape, leaf.dtype)


@pytest.mark.slow(but=12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_not_gathered(name):
    """But for the ops that are listed."""
    call, needing = PROGRAMS[name]
    batch, w = batch_of(LENGTHS["7 rows"]), tf.Variable(WEIGHTS)
    cost = costs.cost_of(costs.runs(lambda: lambda batch: results_of(call, batch, w)[-1], batch))
    assert {op for op, *_ in cost.gathered} == {*needing.split()}, cost


def at(b, column):
    """The place of a column in each row."""
    return tf.stack([tf.range(tf.shape(column)[0]), column], 1)


def overlapped(b):
    """Windows that are wider than the rows' stride, added up."""
    rows = tf.shape(b["label"])[0]
    columns = tf.tile(tf.constant([[1, 3]]), [rows, 1]) * tf.cast(b["label"] < 2, tf.int32)[:, None]
    taken = tf.gather(b["x"], columns, batch_dims=1)
    return tf.math.unsorted_segment_sum(taken, columns + tf.reshape(tf.range(rows) * 2, [-1, 1]), rows * 2)


def numbered_if(b, condition):
    """The number of each row, or 0, as a condition says that has nothing to do with rows."""
    numbers = tf.reshape(tf.range(tf.shape(b["x"])[0]), [-1, 1])
    return tf.cast(tf.where(condition, numbers, 0), tf.float64) * b["x"]


def two_for_each(b):
    """Flags of two rows for each, beside two copies of the rows, which have another order."""
    labels = tf.reshape(tf.stack([b["label"], 2 - b["label"]], 1), [-1])
    flags = tf.scatter_nd(at(b, labels), tf.ones_like(labels, tf.float64), [tf.shape(labels)[0], 4])
    return flags * tf.concat([b["x"], b["x"] ** 2], 0)


def of_one_column(b):
    """Indices of one element in each row, without the axis of these."""
    rows, columns = tf.range(tf.shape(b["label"])[0])[:, None], b["label"][:, None]
    return tf.cast(tf.squeeze(tf.stack([rows, columns], -1), 1), tf.float64) * b["x"][:, :2]


def shifted(b):
    """Numbers of rows, some of them other towers', or of none."""
    return tf.range(tf.shape(b["x"])[0]) + 3 * b["label"]


def lowered(b):
    """Numbers of values' rows, less some."""
    return b["sparse"].indices[:, 0] + (tf.cast(tf.abs(b["sparse"].values) * 4, tf.int64) - 5)


def of_next_row(b):
    """Each row's values in the row after it: the last one has none."""
    ids, rows = b["sparse"].indices[:, 0] + 1, b["sparse"].dense_shape[0]
    return tf.RaggedTensor.from_value_rowids(b["sparse"].values, ids, nrows=rows, validate=False).to_tensor()


def parsed(b):
    """Features of one length, and of as many as a row has, padded to the batch's longest."""
    fixed = tf.io.FixedLenFeature([2], tf.float32, default_value=[1.0, 2.0])
    features = {"a": tf.io.FixedLenSequenceFeature([], tf.float32, allow_missing=True), "b": fixed}
    found = tf.io.parse_example(b["examples"], features)
    return tf.reduce_mean(found["a"], 1) + found["b"][:, 1]


def serialized(count):
    """An example with a feature of so many numbers."""
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=[1.0] * count))
    return tf.train.Example(features=tf.train.Features(feature={"a": feature})).SerializeToString()


# What is computed of a tower's own numbers, and is not the batch's: it must not pass as such.
OF_NUMBERS = {
    "times values": lambda b: tf.boolean_mask(b["x"], b["mask"])[:, None] * tf.cast(tf.where(b["mask"]), tf.float64),
    "gradient": lambda b: gradient_of_scale(b["mask"]),
    "selected": lambda b: tf.gather_nd(b["x"], tf.where(b["keep"][:, None], at(b, b["label"]), at(b, 2 - b["label"]))),
    "moved": lambda b: tf.gather_nd(
        b["x"], at(b, tf.zeros_like(b["label"])) + tf.stack([tf.zeros_like(b["label"]), b["label"]], 1)
    ),
    "as flags": lambda b: tf.cast(tf.cast(b["sparse"].indices, tf.bool), tf.float64),
    "rows of places": lambda b: tf.gather(at(b, b["label"]), tf.where(b["keep"])[:, 0]),
    "by a flag": lambda b: numbered_if(b, FLAG),
    "by flags": lambda b: numbered_if(b, tf.constant([[True, False, True, True]])),
    "overlapped": overlapped,
    "two for each": two_for_each,
    "of one column": of_one_column,
    "in one row": lambda b: tf.gather(b["x"], tf.reshape(tf.range(tf.shape(b["x"])[0]), [1, -1])),
    "of a table": lambda b: tf.gather(tf.range(50.0) ** 2, shifted(b)),
    "into a table": lambda b: tf.math.unsorted_segment_sum(b["x"], shifted(b), 20),
    "lowered and clipped": lambda b: tf.reduce_sum(tf.maximum(lowered(b), 0)),
    "lowered and compared": lambda b: tf.reduce_sum(tf.cast(lowered(b) >= 0, tf.int32)),
    "of the next row": of_next_row,
    "parsed": parsed,
    "clipped": lambda b: tf.maximum(tf.where(b["keep"])[:, 0], tf.zeros_like(tf.cast(b["label"], tf.int64)[:2, None])),
}
FLAG = tf.Variable(False)
SCALE = tf.Variable(-1.0, dtype=tf.float64)


def gradient_of_scale(mask):
    """Of the places of what a mask leaves."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.cast(tf.where(mask), tf.float64) * SCALE - 1.0) ** 2)
    return tape.gradient(loss, SCALE)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("towers", [2, 3])
def test_what_is_computed_of_numbers(towers):
    """Of rows and places: equal to one device."""
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(6, 4)), rng.random((6, 4)) > 0.4
    mask[-1] = False
    batch = {
        "x": tf.constant(x),
        "mask": tf.constant(mask),
        "keep": tf.constant([True, False, True, True, False, True]),
        "label": tf.constant([0, 2, 1, 0, 1, 2]),
        "sparse": tf.sparse.from_dense(tf.where(mask, x, 0.0)),
        "examples": tf.constant([serialized(count) for count in (2, 1, 5, 0, 1, 3)]),
    }

    def step(batch):
        return {name: call(batch) for name, call in OF_NUMBERS.items()}

    expected = tf.function(step, autograph=False)(batch)
    with ncclsync.Towers(towers) as joined:
        found = joined.run(step, batch)
    for name in OF_NUMBERS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, err_msg=name)


# How as many rows come of each row that a mask leaves, other than one; and what is computed of all of them.
SEVERAL = {
    "flat": lambda kept: tf.reshape(kept, [-1, 1]),
    "tiled": lambda kept: tf.tile(kept, [2, 1]),
    "repeated": lambda kept: tf.repeat(kept, 3, axis=0),
    "stacked": lambda kept: tf.reshape(tf.stack([kept, 2 * kept], 1), [-1, 4]),
    "one after the other": lambda kept: tf.concat([kept, -2 * kept], 0),
    "pairs": lambda kept: tf.reshape(kept[:, None] - kept[:, :, None], [-1, 4]),
}
OF_ALL = {
    "mean": tf.reduce_mean,
    "means": lambda rows: tf.reduce_mean(rows, 0),
    "variances": lambda rows: tf.math.reduce_variance(rows, 0),
    "moments": lambda rows: tf.stack(tf.nn.moments(rows, [0])),
    "logarithm of sums": lambda rows: tf.reduce_logsumexp(rows, 0),
    "greatest": lambda rows: tf.reduce_max(rows, 0),
    "products": lambda rows: tf.reduce_prod(tf.tanh(rows) + 1.1, 0),
    "norm": tf.norm,
    "sum by number": lambda rows: tf.reduce_sum(rows) / tf.cast(tf.size(rows), rows.dtype),
}


@pytest.mark.parametrize("towers", [2, 3])
def test_several_rows_of_each_that_a_mask_leaves(towers):
    """A tower's mean weighs as many of them as it has."""
    x = tf.constant(np.random.default_rng(1).normal(size=(7, 4)))

    def step(x):
        kept = tf.boolean_mask(x, x[:, 0] > 0)
        return {(way, of): call(several(kept)) for way, several in SEVERAL.items() for of, call in OF_ALL.items()}

    expected = tf.function(step, autograph=False)(x)
    with ncclsync.Towers(towers) as joined:
        found = joined.run(step, x)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-15, err_msg=str(name))
