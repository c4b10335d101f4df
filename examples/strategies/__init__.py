"""Ten ways to train one Keras model on several devices of a host, each in a file of its own.

`strategy.TrainingStrategy` is what all have in common; compare_strategies.py runs them side by side. Each
file tells the system that it follows, where that is published, its idea, and what it got wrong; the code is
written afresh on Keras 3 and TensorFlow 2. TensorFlow is not imported here: the parameter servers do
without.
"""

NAMES = (
    "one_device",
    "shared_layers",
    "cpu_parameter_server",
    "round_robin",
    "wrapped_optimizer",
    "serial_model",
    "ring_processes",
    "replicated_towers",
    "mirrored",
    "ncclsync_towers",
)


def load(name):
    """Import a strategy's file; return its class `Strategy`.

    Raises:
        ValueError: `name` is not one of `NAMES`.
    """
    import importlib

    if name not in NAMES:
        raise ValueError(f"Expected one of {', '.join(NAMES)}. Received: {name!r}")
    return importlib.import_module(f"strategies.{name}").Strategy
