"""Integers that number rows, in any arithmetic and any use: random programs, reproducible by their seed.

`python tests/semantics/test_row_numbers.py 0 200` runs the programs of these seeds.
"""

import sys

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close
from thorough import some

import ncclsync

TOWERS, MOST = 3, 60  # numbers that a large table takes
SEEDS = some(range(12), range(100))
PER_STEP = 4  # seeds of one step

# Of integers of as many elements each, a constant and the batch.
ARITHMETIC = {
    "sum": lambda a, b, c, x: a + b,
    "difference": lambda a, b, c, x: a - b,
    "product": lambda a, b, c, x: a * b,
    "moved": lambda a, b, c, x: a + (b * 2 + c),
    "back": lambda a, b, c, x: a + (c - 2 * b),
    "shifted": lambda a, b, c, x: a + c,
    "scaled": lambda a, b, c, x: a * c,
    "turned": lambda a, b, c, x: c - a,
    "part": lambda a, b, c, x: a // max(c, 2),
    "rest": lambda a, b, c, x: a % max(c, 2),
    "clipped": lambda a, b, c, x: tf.maximum(a, c),
    "larger": lambda a, b, c, x: tf.maximum(a, b),
    "smaller": lambda a, b, c, x: tf.minimum(a, b + c),
    "chosen": lambda a, b, c, x: tf.where(b > c, a, b),
    "compared": lambda a, b, c, x: a + tf.cast(a >= b, tf.int64),
    "reversed": lambda a, b, c, x: tf.reverse(a, [0]),
    "cumulated": lambda a, b, c, x: tf.cumsum(a),
    "sorted": lambda a, b, c, x: tf.sort(a),
    "reshaped": lambda a, b, c, x: tf.reshape(tf.tile(a[:, None], [1, 1]), [-1]),
    "as a float": lambda a, b, c, x: tf.cast(tf.cast(a, tf.float64), tf.int64),
    "of others": lambda a, b, c, x: tf.gather(x["label"], a % rows_of(x)),
}
# Of such integers, values of as many elements, a constant and the batch; and the range that they must be in.
USES = {
    "values": (lambda a, v, c, x: tf.cast(a, v.dtype) * v, None),
    "sum": (lambda a, v, c, x: tf.reduce_sum(a), None),
    "flags": (lambda a, v, c, x: tf.one_hot(a, 5, dtype=v.dtype) * v[:, None], None),
    "mask": (lambda a, v, c, x: tf.boolean_mask(v, a > c), None),
    "not below": (lambda a, v, c, x: tf.reduce_sum(tf.cast(a - c >= 0, tf.int32)), None),
    "excess": (lambda a, v, c, x: tf.reduce_sum(tf.maximum(a + c, 0)), None),
    "of any rows": (lambda a, v, c, x: tf.gather(x["x"], a % rows_of(x)), None),
    "different": (lambda a, v, c, x: tf.size(tf.unique(a)[0]), None),
    "of rows": (lambda a, v, c, x: tf.gather(x["x"], a), 1),
    "of elements": (lambda a, v, c, x: tf.gather_nd(x["x"], tf.stack([a, a % 3], 1)), 1),
    "into rows": (lambda a, v, c, x: tf.math.unsorted_segment_sum(v, a, rows_of(x)), 1),
    "onto rows": (lambda a, v, c, x: tf.tensor_scatter_nd_add(x["x"][:, 0], a[:, None], v), 1),
    "into a vector": (lambda a, v, c, x: tf.scatter_nd(a[:, None], v, rows_of(x)[None]), 1),
    "into three for each": (lambda a, v, c, x: tf.math.unsorted_segment_max(v, a, 3 * rows_of(x)), 3),
    "of a table": (lambda a, v, c, x: tf.gather(tf.range(float(MOST)) ** 2, a), 0),
    "into a table": (lambda a, v, c, x: tf.math.unsorted_segment_sum(v, a, MOST), 0),
}


def rows_of(x):
    return tf.shape(x["x"], out_type=tf.int64)[0]


def given(x):
    """By kind, of as many elements each: values, and integers, of which the first ones number rows."""
    rows, value = tf.range(rows_of(x)), x["x"][:, 0]
    places, high = tf.where(x["keep"]), x["dense"] > 0.3
    return {
        "rows": (value, [rows, x["label"]]),
        "kept": (tf.boolean_mask(value, x["keep"]), [places[:, 0], tf.boolean_mask(x["label"], x["keep"])]),
        "high": (tf.boolean_mask(x["dense"], high), [*tf.unstack(tf.where(high), axis=1)]),
        "sparse": (x["sparse"].values, [*tf.unstack(x["sparse"].indices, axis=1)]),
        "flat": (
            tf.reshape(x["x"], [-1]),
            [tf.reshape(tf.tile(rows[:, None], [1, 3]), [-1]), tf.range(3 * rows_of(x)), tf.repeat(x["label"], 3)],
        ),
        "repeated": (tf.repeat(value, x["label"]), [tf.repeat(rows, x["label"]), tf.repeat(x["label"], x["label"])]),
    }


def batch_of(seed):
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([3, 5, 7, 8]))
    dense = np.where(rng.random((rows, 4)) > 0.5, rng.normal(size=(rows, 4)), 0.0)
    dense[0, 0], keep = 1.0, rng.random(rows) > 0.4
    keep[-1] = True
    return {
        "x": tf.constant(rng.normal(size=(rows, 3))),
        "label": tf.constant(rng.integers(0, 3, rows)),
        "keep": tf.constant(keep),
        "dense": tf.constant(dense),
        "sparse": tf.sparse.from_dense(dense),
    }


def program_of(seed, batch):
    """A program that is valid for the batch: its kind, lines of arithmetic, and uses."""
    rng = np.random.default_rng(seed)
    kind = str(rng.choice([*given(batch)], p=[0.4, 0.15, 0.1, 0.15, 0.1, 0.1]))
    lines, uses = [], []
    for _ in range(rng.integers(1, 5)):
        count = len(given(batch)[kind][1]) + len(lines)
        first = 0 if rng.random() < 0.5 else int(rng.integers(count))
        lines.append((str(rng.choice([*ARITHMETIC])), first, int(rng.integers(count)), int(rng.integers(-2, 5))))
    _, numbers = run_lines(kind, lines, batch)
    for _ in range(30):
        at, name, constant = int(rng.integers(1, len(numbers))), str(rng.choice([*USES])), int(rng.integers(-3, 4))
        most, found = USES[name][1], numbers[at].numpy()
        most = MOST if most == 0 else most and most * int(rows_of(batch))
        if len(uses) < 4 and found.size and (most is None or (found.min() >= 0 and found.max() < most)):
            uses.append((name, at, constant))
    return kind, lines, uses


def run_lines(kind, lines, batch):
    values, numbers = given(batch)[kind]
    for name, first, second, constant in lines:
        numbers.append(ARITHMETIC[name](numbers[first], numbers[second], constant, batch))
    return values, numbers


def run(kind, lines, uses, batch):
    values, numbers = run_lines(kind, lines, batch)
    return {f"{use} {i}": USES[use][0](numbers[i], values, constant, batch) for use, i, constant in uses}


def compare(seeds, towers):
    """Run the programs of some seeds as one step, of a batch each, on one device and on towers."""
    batches = {str(seed): batch_of(seed) for seed in seeds}
    programs = {seed: program_of(int(seed), batch) for seed, batch in batches.items()}
    for seed, batch in batches.items():

        def step(batch, program=programs[seed]):
            return run(*program, batch)

        alone = tf.function(step, autograph=False)(batch)
        try:
            assert_close(towers.run(step, batch), alone, 1e-10, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {programs[seed]}") from error


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("first", [*SEEDS][::PER_STEP])
def test_programs(first):
    with ncclsync.Towers(TOWERS) as towers:
        compare(range(first, first + PER_STEP), towers)


if __name__ == "__main__":
    with ncclsync.Towers(TOWERS) as joined:
        for number in range(*map(int, sys.argv[1:3])):
            try:
                compare([number], joined)
            except AssertionError as error:
                print(error, "\n ", f"{error.__cause__}"[-300:], flush=True)
