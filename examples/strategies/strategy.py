"""What every strategy offers, and the few lines that several of them share."""

import abc
import dataclasses

import tensorflow as tf

from strategies.task import make_loss

SERVER = "CPU:0"  # where strategies with a parameter device keep the variables; tower i is CPU:<i + 1>


def make_cpus(towers):
    """Divide the CPU into a logical one for each tower and one more; before TensorFlow is first used."""
    cpus = [tf.config.LogicalDeviceConfiguration()] * (towers + 1)
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)


def tower_devices(towers):
    """Return the towers' devices, `SERVER` is none of them."""
    return [f"CPU:{tower + 1}" for tower in range(towers)]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a step may have to move, in bytes.

    Attributes:
        parameters: all trainable variables once; a set of gradients is as large.
        statistics: all other variables of the model once.
        outputs: what the model returns for a batch.
    """

    parameters: int
    statistics: int
    outputs: int


class TrainingStrategy(abc.ABC):
    """A model on towers.

    Attributes:
        SYSTEM: whose way it is.
        THROUGH: the device or the path that the bytes of `bytes_moved` go through.
        FORMULA: `bytes_moved` in words: N towers, P, S and O bytes of parameters, statistics and outputs.
        WHY: the cause, for each condition of `conditions.CONDITIONS` under which the weights are not those of
            one device. A test holds this against what is measured.
        model: a plain Keras model that holds the trained weights.
    """

    SYSTEM: str
    THROUGH: str
    FORMULA: str
    WHY: dict[str, str]
    model: object

    @abc.abstractmethod
    def __init__(self, build, towers):
        """Place a model on towers.

        Args:
            build: makes the model, not compiled, the same each time; can be pickled.
            towers: how many.
        """

    @staticmethod
    @abc.abstractmethod
    def bytes_moved(sizes, towers):
        """Return the bytes that a step moves between devices or processes, the batch itself not counted."""

    def train(self, x, y, batch_size):
        """Train on consecutive batches of all rows, in this order; the last one may be smaller."""
        for begin in range(0, len(x), batch_size):
            self.step(x[begin : begin + batch_size], y[begin : begin + batch_size])

    def step(self, x, y):
        """Train on one batch; for strategies that leave `train` as it is."""
        raise NotImplementedError

    def save(self, path):
        """Save as a user of the system does, to a `.keras` file."""
        self.model.save(path)

    def processes(self):
        """Return the ids of the processes that it runs beside this one."""
        return []

    def close(self):
        """End its processes, free its towers; idempotent. By itself nothing is to be done."""
        return


def batch_signature(model):
    """Return the `input_signature` of a step: a batch of any number of samples."""
    return [tf.TensorSpec(model.input_shape, tf.float32), tf.TensorSpec([None], tf.int64)]


def equal_shards(tensor, towers):
    """Cut a batch into shards of the same size; what is left over is in none of them."""
    rows = tf.shape(tensor)[0] // towers
    return [tensor[tower * rows : (tower + 1) * rows] for tower in range(towers)]


def shards_with_rest(tensor, towers):
    """Cut a batch into shards of the same size, the last of which gets what is left over."""
    rows = tf.shape(tensor)[0] // towers
    return [*equal_shards(tensor, towers)[:-1], tensor[(towers - 1) * rows :]]


def shard_gradients(model, x, y):
    """Return the gradients of a shard's mean loss, in the order of `model.trainable_variables`."""
    variables = [variable.value for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = make_loss()(y, model(x, training=True))
    return tape.gradient(loss, variables)


def flatten(tensors):
    """Return all elements of some tensors as one, [elements]."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def unflatten(flat, variables):
    """Cut what `flatten` has made of tensors like these variables."""
    shapes = [tuple(variable.shape) for variable in variables]
    sizes = [int(tf.TensorShape(shape).num_elements()) for shape in shapes]
    return [tf.reshape(part, shape) for part, shape in zip(tf.split(flat, sizes), shapes, strict=True)]
