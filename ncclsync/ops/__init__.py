"""Serve collectives, and timestamps, as TensorFlow ops.

A user calls `all_reduce`, `broadcast` and `all_gather` inside a step. The other names are for ncclsync's packages.
"""

from ncclsync.ops.collectives import KEPT_SUM as KEPT_SUM
from ncclsync.ops.collectives import REDUCE_OPS as REDUCE_OPS
from ncclsync.ops.collectives import Collective as Collective
from ncclsync.ops.collectives import CollectiveKind as CollectiveKind
from ncclsync.ops.collectives import Context as Context
from ncclsync.ops.collectives import Mark as Mark
from ncclsync.ops.collectives import Purpose as Purpose
from ncclsync.ops.collectives import Share as Share
from ncclsync.ops.collectives import all_gather as all_gather
from ncclsync.ops.collectives import all_reduce as all_reduce
from ncclsync.ops.collectives import broadcast as broadcast
from ncclsync.ops.collectives import current_context as current_context
from ncclsync.ops.collectives import from_local as from_local
from ncclsync.ops.collectives import parts as parts
from ncclsync.ops.collectives import running_in as running_in
from ncclsync.ops.collectives import stack as stack
from ncclsync.ops.collectives import to_local as to_local
from ncclsync.ops.collectives import to_replicate as to_replicate
from ncclsync.ops.collectives import whole as whole
