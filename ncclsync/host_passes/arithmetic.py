"""Write element-wise ops as one expression, as `csrc/cpu/arithmetic.h` has it."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat.names import TensorName

# The op that runs an expression, an expression's limits, and its operations by TensorFlow's names.
FUSED = "NcclsyncArithmetic"
MOST_REGISTERS = native.MOST_REGISTERS
MOST_PERIOD = native.MOST_PERIOD
# Without "Maximum" and "Minimum": TensorFlow's choice between 0.0 and -0.0 depends on their place in the array.
ARITHMETIC = {
    "Add": native.ARITHMETIC["ADD"],
    "AddV2": native.ARITHMETIC["ADD"],
    "Sub": native.ARITHMETIC["SUBTRACT"],
    "Mul": native.ARITHMETIC["MULTIPLY"],
    "RealDiv": native.ARITHMETIC["DIVIDE"],
    "SquaredDifference": native.ARITHMETIC["SQUARED_DIFFERENCE"],
    "ReluGrad": native.ARITHMETIC["RELU_GRADIENT"],
    "Square": native.ARITHMETIC["SQUARE"],
    "Sqrt": native.ARITHMETIC["SQRT"],
    "Neg": native.ARITHMETIC["NEGATE"],
    "Relu": native.ARITHMETIC["RELU"],
}

# The types of ops that a `Writer` can compute.
COMPUTED = {*ARITHMETIC, "AddN", "BroadcastTo"}

WHOLE = 0  # instead of a repeat: of an input that has as many elements as the result


class Writer:
    """Write an expression, `ncs_expression` in C, for each element; inputs and results go by name.

    Attributes:
        inputs: their names, in the order of their first use.
    """

    def __init__(self) -> None:
        self.inputs: dict[TensorName, None] = {}
        self._steps: list[tuple[int, Any, Any]] = []
        self._computed: dict[TensorName, Any] = {}  # by name: an input, or the number of a step

    def value(self, name: TensorName) -> Any:
        """Return the value of that name; a name that has not been computed is an input."""
        if name not in self._computed:
            self.inputs[name] = None
        return self._computed.get(name, name)

    def keep(self, name: TensorName, value: Any) -> None:
        """Give a value a name."""
        self._computed[name] = value

    def compute(self, operation: str, values: Sequence[Any]) -> Any:
        """Add a step that computes like an op of that type; return its result."""
        if operation == "BroadcastTo":
            return values[0]
        if operation == "AddN":  # TensorFlow adds from left to right
            total = values[0]
            for value in values[1:]:
                total = self.compute("AddV2", (total, value))
            return total
        self._steps.append((ARITHMETIC[operation], values[0], values[-1]))
        return len(self._steps) - 1

    def code(
        self,
        inputs: Sequence[TensorName],
        results: Sequence[TensorName],
        sums: Sequence[tuple[TensorName, int, bool]] = (),
    ) -> tuple[int, ...] | None:
        """Return the expression, with the inputs in the given order; None if it cannot be run.

        Args:
            inputs: all names of inputs.
            results: names of the outputs.
            sums: (name of the addends, period, whether the mean is wanted).

        Returns:
            Steps of (operation, register, register), the outputs' registers, then sums of (register, period, whether it
            is a mean).
        """
        too_many = max(len(self._steps) + len(inputs), len(results)) + len(sums) > MOST_REGISTERS
        if not (self._steps or sums) or too_many:
            return None
        registers: dict[Any, int] = {name: i for i, name in enumerate([*inputs, *range(len(self._steps))])}
        code = [number for step, a, b in self._steps for number in (step, registers[a], registers[b])]
        code += [registers[self._computed[result]] for result in results]
        for name, period, is_mean in sums:
            code += [registers[self.value(name)], period, int(is_mean)]
        return tuple(code)


def repeat_of(operand: tf.TensorShape, result: tf.TensorShape) -> int | None:
    """Return how many neighbouring elements of a result take the same element of an operand.

    Args:
        operand: of a shape that broadcasts to the result's.
        result: of known dimensions, except for the first one.

    Returns:
        None if that number and the operand's size do not determine which element they take.
    """
    if operand.rank is None or operand.rank > result.rank:
        return None
    dims = [1] * (result.rank - operand.rank) + operand.as_list()
    if None in dims[1:]:
        return None
    sizes = [(dim, full) for dim, full in zip(dims, result.as_list(), strict=True) if full != 1]
    while sizes and sizes[0][0] == 1:
        sizes.pop(0)
    repeat = 1
    while sizes and sizes[-1][0] == 1:
        repeat *= sizes.pop()[1]
    return repeat if all(dim != 1 for dim, _ in sizes) else None
