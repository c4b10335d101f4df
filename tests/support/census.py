"""Say of each op type without a rule why it has none: what Keras puts into steps, and all that a step can have.

`table` is what `ncclsync/semantics/README.md` prints.
"""

import re
from collections.abc import Iterable

import tensorflow as tf
from op_table import UNREACHABLE
from tensorflow.python.framework import kernels, op_def_registry
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
    "compares all boxes": "NonMaxSuppression NonMaxSuppressionV2 NonMaxSuppressionV3 NonMaxSuppressionV4 "
    "NonMaxSuppressionV5 NonMaxSuppressionWithOverlaps",
    "lists what the batch has once": "Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2",
    "chooses among all rows": "KMC2ChainInitialization KmeansPlusPlusInitialization",
    "shuffles rows": "StatelessShuffle",
    "as long as the batch's longest": "ParseSequenceExample ParseSequenceExampleV2",
    "Python gets one device's batch": "EagerPyFunc PyFunc PyFuncStateless",
    "makes one string of all rows": "ParseTensor SerializeSparse SerializeTensor StringFormat UnsortedSegmentJoin",
    "of one picture, sound, example or file": "DecodeAndCropJpeg DecodeBmp DecodeGif DecodeImage DecodeJpeg DecodeJxl "
    "DecodePng DecodeWav DecodeWebP DeserializeSparse EncodeJpeg EncodeJpegVariableQuality EncodePng EncodeWav "
    "ExtractJpegShape MatchingFiles ParseSingleExample ParseSingleSequenceExample ReadFile "
    "StatelessSampleDistortedBoundingBox",
    "takes no rows": "DataFormatVecPermute ShardedFilename ShardedFilespec SobolSample StatelessRandomGetKeyCounterAlg "
    "ToBool",
    "a matrix of rows by rows": "Diag DiagPart",
}
OPEN = {
    "an older form of an op that has a rule, with all rows in its shape": "AccumulateNV2",
    "as wide as its rows, which a tower need not have": "DecodeRaw",
    "each row by itself, and no Keras layer or loss makes it": "EditDistance LinSpace",
    "GPUs alone have it": "FFTND IFFTND IRFFTND RFFTND",
    "its kernel writes over its inputs": "LSTMBlockCellGrad",
    "TensorFlow's own passes alone write it": "CheckPinned For FusedPadConv2D FusedResizeAndPadConv2D MapDefun "
    "ParallelConcat SymbolicGradient",
    "its labels or results are one sparse tensor, whose indices it counts itself": "CTCBeamSearchDecoder "
    "CTCGreedyDecoder CTCLoss DenseToSparseSetOperation SparseToSparseSetOperation",
    "counts the sampled classes that rows have": "ComputeAccidentalHits",
    "makes a sparse or ragged tensor of another one, or of rows": "DenseCountSparseOutput DeserializeManySparse "
    "RaggedCountSparseOutput RaggedCross RaggedFillEmptyRows RaggedFillEmptyRowsGrad RaggedGather RaggedRange "
    "RaggedTensorFromVariant RaggedTensorToSparse RaggedTensorToVariant SerializeManySparse SparseAdd SparseAddGrad "
    "SparseBincount SparseConcat SparseCountSparseOutput SparseDenseCwiseAdd "
    "SparseDenseCwiseDiv SparseDenseCwiseMul SparseReduceMaxSparse SparseReduceSumSparse SparseReshape "
    "SparseSegmentMeanGradV2 SparseSegmentSqrtNGradV2 SparseSegmentSumGradV2 SparseSlice SparseSliceGrad SparseSplit "
    "SparseSparseMaximum SparseSparseMinimum SparseTensorDenseAdd",
    "a matrix of TensorFlow's own layout": "CSRSparseMatrixToDense CSRSparseMatrixToSparseTensor "
    "DenseToCSRSparseMatrix SparseMatrixMatMul SparseMatrixNNZ SparseMatrixSparseMatMul SparseMatrixTranspose "
    "SparseTensorToCSRSparseMatrix",
    "lists other than loops make them": "TensorListConcat TensorListConcatLists TensorListConcatV2 TensorListGather "
    "TensorListPushBackBatch TensorListScatter TensorListScatterIntoExistingList TensorListScatterV2 TensorListSplit",
    "changes some of the rows": "InplaceAdd InplaceSub InplaceUpdate ScatterNdNonAliasingAdd TensorStridedSliceUpdate",
}
# What TensorFlow's converters, debuggers and servers alone write.
OF_TOOLS = re.compile(
    "(Batch|BatchFunction|Copy|CopyHost|Unbatch|UnbatchGrad)$|CudnnRNN(Params|Canon)|Debug|Quanti|Requ|Unif"
)


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


def without_gradient() -> set[str]:
    """The other op types that a step can have: of tensors alone, without a state, and with a kernel."""
    found = set()
    for name in set(dir(tf.raw_ops)) - set(UNREACHABLE) - with_gradient():
        known = op_def_registry.get(name)
        if known is None or known.is_stateful or known.deprecation.version or not known.input_arg:
            continue
        handles = any(
            arg.is_ref or arg.type in (tf.variant, tf.resource) for arg in (*known.input_arg, *known.output_arg)
        )
        # XLA enters its own once it has compiled anything in the process.
        devices = {one.device_type for one in kernels.get_registered_kernels_for_op(name).kernel}
        made = known.output_arg and devices & {"CPU", "GPU"}
        if made and not handles and (has_rule(name) or not OF_TOOLS.match(name)):
            found.add(name)
    return found


def table() -> str:
    """What the README has."""
    known = with_gradient() | without_gradient()
    by_nature, left = known & listed(BY_NATURE), known & listed(OPEN)
    lines = ["| count | | op types |", "|---|---|---|", f"| {len(known - by_nature - left)} | have a rule | |"]
    for title, count, reasons in (("mix rows by nature", by_nature, BY_NATURE), ("open", left, OPEN)):
        lines.append(f"| {len(count)} | {title} | |")
        lines += [f"| | {reason} | {' '.join(f'`{op}`' for op in ops.split())} |" for reason, ops in reasons.items()]
    return "\n".join(lines)
