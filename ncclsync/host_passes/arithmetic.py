"""Write element-wise ops as one expression, as `csrc/cpu/arithmetic.h` has it, and the node that runs it."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.ops.host_ops import set_attribute

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


@dataclasses.dataclass(frozen=True)
class Expression:
    """Hold the computation for each element: `ncs_expression` in C."""

    # For each input, how many neighbouring elements of the result take the same element of it; or `WHOLE`
    repeats: tuple[int, ...]
    outputs: int  # their number
    sums: int  # their number
    # Steps of (operation, register, register), the outputs' registers, then sums of (register, period, whether it is a
    # mean)
    code: tuple[int, ...]

    def node(
        self, name: str, dtype: tf.DType, values: Sequence[str], controls: Iterable[str], alone: bool = False
    ) -> Any:
        """Return a node of this name that runs the expression on values of a dtype.

        `controls` are further dependencies, written as a node's inputs; `alone`: it runs on the calling thread only.
        """
        node = tf.compat.v1.NodeDef(name=name, op=FUSED, input=[*values, *controls])
        attributes = {"T": dtype, "repeats": self.repeats, "outputs": self.outputs, "sums": self.sums}
        attributes |= {"code": self.code, "alone": int(alone)}
        attributes |= {"n_values": len(values), "n_results": self.outputs + self.sums}
        for attribute, value in attributes.items():
            set_attribute(node, attribute, value)
        return node


class Writer:
    """Write an expression; inputs and results go by name."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, Any, Any]] = []
        self._inputs: dict[str, None] = {}  # in the order of their first use
        self._computed: dict[str, Any] = {}  # by name: an input, or the number of a step

    def value(self, name: str) -> Any:
        """Return the value of that name; a name that has not been computed is an input."""
        if name not in self._computed:
            self._inputs[name] = None
        return self._computed.get(name, name)

    def keep(self, name: str, value: Any) -> None:
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

    @property
    def inputs(self) -> list[str]:
        """Return the names of the inputs."""
        return list(self._inputs)

    @property
    def registers(self) -> int:
        """Return how many registers it needs; more than `MOST_REGISTERS` cannot be run."""
        return len(self._steps) + len(self._inputs)

    def expression(
        self,
        inputs: Sequence[str],
        repeats: Sequence[int | None],
        results: Sequence[str],
        sums: Sequence[tuple[str, int, bool]] = (),
    ) -> Expression | None:
        """Return the expression, with the inputs in the given order; None if it cannot be run.

        Args:
            inputs: all names of inputs.
            repeats: of each input; None for an input whose repeat no number describes.
            results: names of the outputs.
            sums: (name of the addends, period, whether the mean is wanted).
        """
        known = tuple(repeat for repeat in repeats if repeat is not None)
        too_many = max(self.registers, len(results)) + len(sums) > MOST_REGISTERS
        if not (self._steps or sums) or too_many or len(known) < len(repeats):
            return None
        registers: dict[Any, int] = {name: i for i, name in enumerate([*inputs, *range(len(self._steps))])}
        code = [number for step, a, b in self._steps for number in (step, registers[a], registers[b])]
        code += [registers[self._computed[result]] for result in results]
        for name, period, is_mean in sums:
            code += [registers[self.value(name)], period, int(is_mean)]
        return Expression(known, len(results), len(sums), tuple(code))


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
