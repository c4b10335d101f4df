"""Say of each op type without a rule why it has none: what Keras puts into steps, and what has a gradient.

`table` is what `ncclsync/semantics/README.md` prints.
"""

from collections.abc import Iterable

from op_table import UNREACHABLE
from tensorflow.python.framework import ops as framework_ops  # for the registry of gradients, and no more

from ncclsync.semantics import rules, uneven
from ncclsync.semantics.functions import BRANCHES, CALLS, LOOPS

# Not by rules of their own, but by `placing.py`, `partition.py` and `draws.py`; arithmetic on counts; what sees no row.
PLACED = rules.names("Assert IdentityN OptionalFromValue OptionalNone Print PrintV2 ReadVariableOp VarIsInitializedOp")
PLACED |= rules.names("Const ListDiff NoOp Placeholder RngReadAndSkip StatelessRandomGetKeyCounter VariableShape")
PLACED |= rules.names("AssignAddVariableOp AssignSubVariableOp AssignVariableOp ResourceScatterAdd ResourceScatterSub")
PLACED |= rules.COUNTING | rules.DRAWS | BRANCHES | CALLS | LOOPS

BY_NATURE = {
    "normalises by the batch": "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3",
    "the data say which rows go where": "DynamicPartition InvertPermutation ParallelDynamicStitch",
    "compares all boxes": "NonMaxSuppression NonMaxSuppressionV2 NonMaxSuppressionWithOverlaps",
    "lists what the batch has once": "Unique",
    "its range is that of all elements": "QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 "
    "QuantizeAndDequantizeV4Grad",
    "draws regions for all rows": "FractionalAvgPool FractionalMaxPool",
    "Python gets one device's batch": "EagerPyFunc PyFunc PyFuncStateless",
    "makes one string of all rows": "ParseTensor SerializeTensor",
    "a matrix of rows by rows": "Diag DiagPart",
}
OPEN = {
    "an older form of an op that has a rule, with all rows in its shape": "AccumulateNV2",
    "each row by itself, and no Keras layer or loss makes it": "BlockLSTM BlockLSTMV2 DecodeRaw EditDistance "
    "ExtractGlimpse LinSpace",
    "its labels or results are one sparse tensor, whose indices it counts itself": "CTCBeamSearchDecoder "
    "CTCGreedyDecoder CTCLoss DenseToDenseSetOperation DenseToSparseSetOperation SetSize SparseToSparseSetOperation",
    "makes a sparse or ragged tensor of another one": "RaggedFillEmptyRows RaggedGather RaggedRange "
    "RaggedTensorFromVariant RaggedTensorToSparse RaggedTensorToVariant SparseAdd SparseAddGrad SparseConcat "
    "SparseDenseCwiseAdd SparseDenseCwiseDiv SparseDenseCwiseMul "
    "SparseSlice SparseSparseMaximum "
    "SparseSparseMinimum SparseTensorDenseAdd UnicodeEncode",
    "a matrix of TensorFlow's own layout": "CSRSparseMatrixToDense CSRSparseMatrixToSparseTensor "
    "DenseToCSRSparseMatrix SparseMatrixMatMul SparseMatrixNNZ SparseMatrixSparseMatMul SparseMatrixTranspose "
    "SparseTensorToCSRSparseMatrix",
    "lists other than loops make them": "TensorListConcat TensorListConcatLists TensorListConcatV2 TensorListGather "
    "TensorListPushBackBatch TensorListScatter TensorListScatterIntoExistingList TensorListScatterV2 TensorListSplit",
    "changes some of the rows": "ScatterNdNonAliasingAdd TensorStridedSliceUpdate",
}


def listed(reasons: dict[str, str]) -> set[str]:
    """The op types of a list."""
    return {op for text in reasons.values() for op in text.split()}


def has_rule(op_type: str) -> bool:
    """Whether an op of that type has a rule: else its inputs are made whole."""
    return any(op_type in table for table in (rules.RULES, rules.LINEAR, uneven.NUMBERED))


def unlisted(op_types: Iterable[str]) -> set[str]:
    """Those that have neither a rule nor a reason."""
    return {op for op in op_types if not has_rule(op)} - PLACED - listed(BY_NATURE) - listed(OPEN)


def with_gradient() -> set[str]:
    """The op types that TensorFlow has a gradient for, and that a step can have."""
    names = framework_ops.gradient_registry.list()
    return {op for op in names if not op.startswith("CustomGradient-")} - set(UNREACHABLE)


def table() -> str:
    """What the README has."""
    known = with_gradient()
    by_nature, left = known & listed(BY_NATURE), known & listed(OPEN)
    lines = ["| count | | op types |", "|---|---|---|", f"| {len(known - by_nature - left)} | have a rule | |"]
    for title, count, reasons in (("mix rows by nature", by_nature, BY_NATURE), ("open", left, OPEN)):
        lines.append(f"| {len(count)} | {title} | |")
        lines += [f"| | {reason} | {' '.join(f'`{op}`' for op in ops.split())} |" for reason, ops in reasons.items()]
    return "\n".join(lines)
