"""Hold what variables contain, so that a write to them by any op is seen later; `csrc/tf/held.c` says how."""

from collections.abc import Sequence

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import host_ops

_WRITTEN = "of the step's variables were written by other ops"  # in the op's error


def compare(
    held: native.Held, variables: Sequence[tf.Variable], slots: Sequence[int], writes: Sequence[bool], *, begins: bool
) -> tf.Operation | None:
    """Compare variables of one device with what is held of them; return the op, in a graph.

    Args:
        held: of the variables, by their `slots`.
        variables, slots, writes: [V]; what the step itself `writes` is let go where it begins, and held anew where it
            ends.
        begins: whether the op fails if somebody else has written a variable; else `held.take_disturbed` tells.
    """
    if tf.executing_eagerly() and not begins:
        with tf.device(variables[0].device):  # a variable of which slices were read would give its readers copies
            for one in variables:
                tf.raw_ops.DisableCopyOnRead(resource=tf_compat.handle_of(one))
    return hold(held, tf_compat.read_variables(variables), slots, writes, begins=begins, device=variables[0].device)


def hold(
    held: native.Held,
    values: Sequence[tf.Tensor],
    slots: Sequence[int],
    writes: Sequence[bool],
    *,
    begins: bool,
    device: str,
) -> tf.Operation | None:
    """Do what `compare` does, given what the variables contain: tensors that share memory with them."""
    attributes = {"held": held.address, "begins": int(begins), "slots": list(slots)}
    attributes |= {"writes": [int(one) for one in writes], "T": [value.dtype for value in values]}
    return host_ops.create("NcclsyncHold", values, [], attributes, device)


def let_go_of_written(held: native.Held, variables: Sequence[tf.Variable], slots: Sequence[int]) -> None:
    """Let `held` know no value of those of these variables, of one device, that others have written."""
    try:
        compare(held, variables, slots, [False] * len(slots), begins=True)
    except tf.errors.AbortedError as error:  # which says that there is such a variable
        if not is_refusal(error):
            raise


def is_refusal(error: tf.errors.OpError) -> bool:
    """Return whether a step has failed because it found variables that others had written, before it wrote any."""
    return _WRITTEN in error.message
