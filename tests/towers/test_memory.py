"""What towers cost in memory: one replica each, and nothing once they are gone."""

import gc
import subprocess
import sys
import types
import weakref

import keras
import pytest
import tensorflow as tf
from parity import assert_towers_agree, data, mlp, on_towers

from ncclsync import Health, Towers
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.towers.failures import Failures

X, Y = data(24)


def fit(model):
    model.fit(X, Y, batch_size=10, verbose=0)


def copies(model, variable):
    """Every tower's own copy of a Keras variable; tower 0's is the variable itself."""
    return model.towers.replicas.of(tf_compat.backend_variable(variable))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"health": Health(on_nonfinite="skip")}, {"health": Health(check_every=1)}])
def test_deleted_models_leave_nothing(options):
    """Without `close`, a deleted model's variables, their copies and the communicator die with it."""

    def use():
        model = on_towers(mlp, 3, **options)
        fit(model)
        variables = [v for weight in model.weights for v in copies(model, weight)]
        slots = [v for slot in model.optimizer.variables for v in copies(model, slot)]
        owners = [model, model.towers, model.towers.communicator]
        return [weakref.ref(each) for each in variables + slots + owners]

    references = use()
    gc.collect()
    left = [reference() for reference in references if reference() is not None]
    assert not left, f"{len(left)} of {len(references)} are left: {left[:3]}"


def test_a_deleted_variable_is_forgotten():
    """At once, with its copies and what was to be sent, though nobody looks for cycles."""
    gc.disable()
    try:
        with Towers(2) as towers:
            variable = tf.Variable([1.0])
            copy = weakref.ref(towers.replicas.of(variable)[1])
            variable.assign([2.0])
            del variable
            assert copy() is None
            assert (towers.replicas._held, towers.replicas._pending.keys) == ({}, set())
            towers.replicas.sync()
    finally:
        gc.enable()


def test_one_value_is_saved_of_each_variable():
    """To undo a step, whatever its program is: of an iterator, or of a batch, with weights."""
    model = on_towers(mlp, 3, health=Health(on_nonfinite="skip"))
    fit(model)
    model.train_on_batch(X[:5], Y[:5])
    model.train_on_batch(X[:5], Y[:5], sample_weight=X[:5, 0])
    functions = model.train_function.__self__.step._functions.values()
    saved = [one for function in functions for one in function.rollback._saved]
    assert len({id(function.program) for function in functions}) == 3
    written, values = ({id(one[i]) for one in saved} for i in (0, 1))
    assert len(written) == len(values) >= 3 * len(model.trainable_variables)
    assert len(saved) > 2 * len(values)


def test_a_deleted_variable_rests_on_no_step():
    """Whoever has its id next is read without a wait."""
    communicator = types.SimpleNamespace(
        groups=lambda: (2, 1), wait=lambda: pytest.fail("waited"), find_failure=lambda: None
    )
    failures = Failures(lambda user: communicator)
    failures.add(frozenset({1, 2}), ())
    failures.replaced(1)
    failures.before_read(1)
    with pytest.raises(pytest.fail.Exception, match="waited"):
        failures.before_read(2)


@pytest.mark.slow
def test_compile_again_drops_the_old_optimizers_copies():
    """The towers hold what the model uses, not what it used before."""
    model = on_towers(mlp, 3)
    fit(model)
    old = [weakref.ref(v) for slot in model.optimizer.variables for v in copies(model, slot)]
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model)
    gc.collect()
    assert not [reference() for reference in old if reference() is not None]
    assert_towers_agree(model)


MEMORY = """
import threading, time
import keras, numpy as np, psutil
from ncclsync import Health, nccl_parallel

MB = 1e6
process = psutil.Process()

class Peak(threading.Thread):
    # The largest resident size while the block runs, sampled.
    def __enter__(self):
        self.peak, self.seconds, self.stop = 0, time.perf_counter(), False
        self.start()
        return self
    def run(self):
        while not self.stop:
            self.peak = max(self.peak, process.memory_info().rss)
            time.sleep(0.001)
    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self.seconds
        self.stop = True
        self.join()
        self.after = process.memory_info().rss

def build(rows, columns):
    return keras.Sequential([keras.Input((1,), dtype="int32"),
                             keras.layers.Embedding(rows, columns, embeddings_initializer="zeros")])

x = np.zeros((8, 1), "int32")
nccl_parallel(build, towers=4)(10, 10).predict(x, verbose=0)  # the libraries' own memory
size, before = 4e8, process.memory_info().rss
with Peak() as first:
    model = nccl_parallel(build, towers=4)(1_000_000, 100)
    model.predict(x, verbose=0)
with Peak() as again:
    model.towers.broadcast()
grown = [(p - before) / size for p in (first.after, first.peak, again.after, again.peak)]
print("grown", *(f"{replicas:.3f}" for replicas in grown))
source = np.ones((1_000_000, 100), "float32")
start = time.perf_counter()
copies = [source.copy() for _ in range(3)]
fresh = time.perf_counter() - start
start = time.perf_counter()
for copy in copies:
    np.copyto(copy, source)
warm = time.perf_counter() - start
print(f"100 million parameters, 4 CPU towers: build and first predict {first.seconds:.2f} s, broadcast"
      f" {again.seconds:.2f} s; 3 numpy copies {fresh:.2f} s into new memory, {warm:.2f} s into old")
"""


@pytest.mark.slow
def test_memory_of_100_million_parameters():
    """Each tower has one copy of the weights, and nothing else, not even for a moment."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    (grown,) = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("grown"))
    # After the first step, its peak, after a broadcast, its peak.
    assert [float(replicas) for replicas in grown] == pytest.approx([4.0] * 4, abs=0.3)
