"""Send gradients as bfloat16, in half the bytes, and add each rounding error to the next gradient."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ncclsync import ops
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import Context
from ncclsync.sharding.roles import Role, declare_role


class ErrorFeedback:
    """Add up gradients in bfloat16; every tower adds its rounding error to its next gradient.

    Rounding then delays a part of a gradient instead of losing it, and training converges as without compression. Each
    tower keeps a float32 variable per gradient, which is not saved with the model: a resumed run has lost at most one
    step's rounding. Sources: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al.,
    "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tf.Variable, tf.Variable]] = {}  # by id of a variable: the variable, and its error

    def add_up(self, gradients: Sequence[Any], variables: Sequence[Any], context: Context) -> list[Any]:
        """Add up the towers' parts of the batch's gradients.

        Args:
            gradients: float32 tensors are compressed; all others, sparse gradients and None among them, are left to
                the caller.
            variables: of the gradients.

        Returns:
            The sums, float32; None for a gradient that is left.
        """
        # IndexedSlices are no tf.Tensor.
        chosen = [i for i, g in enumerate(gradients) if isinstance(g, tf.Tensor) and g.dtype == tf.float32]
        parts = dict(zip(chosen, ops.parts([gradients[i] for i in chosen]), strict=True))
        sent = []
        for i in chosen:
            kept = self._kept_of(tf_compat.backend_variable(variables[i]))
            owed = context.share.of_samples(parts[i]) + kept
            rounded = tf.cast(owed, tf.bfloat16)
            # An infinity or a NaN is sent as such; keeping it would make every later step infinite or NaN.
            rest = owed - tf.cast(rounded, tf.float32)
            kept.assign(tf.where(tf.math.is_finite(rest), rest, tf.zeros_like(rest)))
            sent.append(rounded)
        added = dict(zip(chosen, context.exchange(sent, ops.KEPT_SUM), strict=True)) if sent else {}
        return [tf.cast(added[i], tf.float32) if i in added else None for i in range(len(gradients))]

    def _kept_of(self, variable: tf.Variable) -> tf.Variable:
        if id(variable) not in self._kept:
            with tf_compat.made_apart(), tf.device(variable.device):
                kept = tf.Variable(tf.zeros(variable.shape, tf.float32), trainable=False)
            declare_role(kept, Role.PARTIAL)
            self._kept[id(variable)] = variable, kept
        return self._kept[id(variable)][1]
