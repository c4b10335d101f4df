"""Improve the segments of a finished program, op by op and bucket by bucket."""

import dataclasses
from collections.abc import Sequence

from ncclsync.host_passes.chains import find_chains, untie
from ncclsync.host_passes.direct import unpacked
from ncclsync.program.segment import SegmentPlan


def improve(plans: Sequence[SegmentPlan], *, crowded: bool, joins: bool = True) -> list[SegmentPlan]:
    """Return cheaper segments with the same buckets and results.

    Args:
        plans: of the segments of one step, in their order.
        crowded: whether other towers keep all other cores busy.
        joins: whether all towers are in this process, whose ops can then join their tensors unpacked.
    """
    return [_improved(plan, crowded, joins) for plan in plans]


def _improved(plan: SegmentPlan, crowded: bool, joins: bool) -> SegmentPlan:
    if joins:
        incoming, outgoing = (tuple(map(unpacked, buckets)) for buckets in (plan.incoming, plan.outgoing))
        plan = dataclasses.replace(plan, incoming=incoming, outgoing=outgoing)
    if plan.jit_compile:
        return plan
    graph = untie(plan.graph, plan.ops)
    return dataclasses.replace(plan, graph=graph, rewrites=find_chains(graph, plan.ops, plan.needed_ops, crowded))
