"""Training on two logical GPUs of one card: rows of the parity tables, as on one device.

Beside the stand-in the towers stand on CPUs, whose memory is what it reduces; NCCL's calls are the same.
"""

import importlib
import importlib.util
import pathlib
import sys

import isolated
import pytest
from device_memory import is_standin

LIMIT_S = 540.0  # TensorFlow takes half a minute to begin on a GPU, and XLA compiles each model for it
MEMORY_MIB = 4096
WITHOUT = "TensorFlow cannot be used:"

# One for each way in which towers meet: buckets of gradients, gathered slices, moments of the whole batch,
# clipping, random numbers of the whole batch, several dtypes, fewer samples than towers.
ROWS = (
    ("optimizers", "CASES", "Adam"),
    ("gradients", "CASES", "sparse-Adam-repeated"),
    ("peers", "CASES", "keras#21167_first_batch_odd"),
    ("optimizers", "CASES", "global_clipnorm"),
    ("optimizers", "CASES", "accumulation-3"),
    ("gradients", "CASES", "mixed_float16"),
    ("gradients", "CASES", "float64-Adam"),
    ("losses", "CASES", "by_name"),
    ("normalisation", "SYNCHRONISED", "images"),
    ("randomness", "CASES", "dropout"),
)
ROWS_BESIDE_THE_STANDIN = 2  # the tables' own tests have all of them on CPU towers


def two_towers():
    """Set TensorFlow up, and return what makes nccl_parallel put two towers on one GPU; None if it cannot."""
    import tensorflow as tf

    if is_standin():
        from ncclsync.communicator import NcclCommunicator
        from ncclsync.communicator.buffers import CUDA, HOST

        NcclCommunicator.memory = {**CUDA, **HOST}
        return {"towers": 2, "backend": "nccl"}
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        print(WITHOUT, f"it sees no GPU; it is built with CUDA: {tf.test.is_built_with_cuda()}")
        return None
    tf.config.set_visible_devices(gpus[0], "GPU")
    logical = tf.config.LogicalDeviceConfiguration(memory_limit=MEMORY_MIB)
    tf.config.set_logical_device_configuration(gpus[0], [logical, logical])
    tf.config.experimental.enable_tensor_float_32_execution(False)  # of 10 bits; the tables ask for more
    return {"devices": ["GPU:0", "GPU:1"], "backend": "nccl"}


def train():
    """Run the rows on one device and on two towers; tell of each one that differs."""
    where = two_towers()
    if where is None:
        return
    import parity

    sys.path.append(str(pathlib.Path(parity.__file__).parents[1] / "parity"))  # where the tables are
    from ncclsync import nccl_parallel
    from ncclsync.communicator import NcclCommunicator

    rows = ROWS[:ROWS_BESIDE_THE_STANDIN] if is_standin() else ROWS
    widening = 1 if is_standin() else 10  # a GPU's kernels sum in another order for another shape
    different = {}
    for module, table, name in rows:
        print(f"{module}: {name}", flush=True)
        case = getattr(importlib.import_module(f"test_parity_{module}"), table)[name]
        model = nccl_parallel(**where, **case.options)(case.build)()
        with model.towers as towers:
            assert isinstance(towers.communicator, NcclCommunicator)
            assert towers.communicator.size == 2
            try:
                parity.assert_close(case.run(model), case.run(case.build()), widening * case.tolerance)
                parity.assert_towers_agree(model)
            except AssertionError as error:
                different[f"{module}: {name}"] = error
    assert not different, "\n".join(f"{row}: {error}" for row, error in different.items())
    print(f"{len(rows)} rows are equal")


def test_parity_on_two_logical_gpus():
    """What a user reads is one device's; the towers agree to the bit."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("training needs TensorFlow with CUDA beside the GPU. Received: it is not installed")
    printed = isolated.run(train, limit_s=LIMIT_S)
    without = [line for line in printed.splitlines() if line.startswith(WITHOUT)]
    if without:
        pytest.skip(f"training needs TensorFlow with CUDA beside the GPU. Received: {without[0]}")
    assert "rows are equal" in printed
