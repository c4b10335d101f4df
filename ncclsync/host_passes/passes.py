"""Improve a finished program, segment by segment and bucket by bucket."""

import dataclasses
import functools

from ncclsync.host_passes.chains import chain_nodes, find_chains
from ncclsync.host_passes.direct import unpacked
from ncclsync.host_passes.reads import reads_together
from ncclsync.host_passes.same_shapes import Shapes, simplify
from ncclsync.program.program import Program, Segment
from ncclsync.program.segment import Rewrite, SegmentPlan, needed_ops


def improve(program: Program, *, crowded: bool, joins: bool = True) -> Program:
    """Return a cheaper program with the same segments, buckets and results.

    Args:
        program: its segments must not be compiled yet.
        crowded: whether other towers keep all other cores busy.
        joins: whether all towers are in this process, whose ops can then join their tensors unpacked.
    """
    segments = tuple(_improved(segment, crowded, joins) for segment in program.segments)
    return dataclasses.replace(program, segments=segments)


def _improved(segment: Segment, crowded: bool, joins: bool) -> Segment:
    plan: SegmentPlan = segment.plan
    return dataclasses.replace(
        segment,
        incoming=tuple(map(unpacked, segment.incoming)) if joins else segment.incoming,
        outgoing=tuple(map(unpacked, segment.outgoing)) if joins else segment.outgoing,
        plan=plan if plan.jit_compile else _rewritten(plan, needed_ops(segment), crowded),
    )


def _rewritten(plan: SegmentPlan, needed: set[str], crowded: bool) -> SegmentPlan:
    shapes = Shapes(plan.graph, plan.ops)
    graph, ops = simplify(plan.graph, shapes, plan.ops, needed)
    rewrites = [*reads_together(graph, ops)]
    for chain in find_chains(graph, shapes, ops, needed):
        nodes = functools.partial(chain_nodes, graph, chain, ops, crowded)
        rewrites.append(Rewrite(frozenset(chain.members), chain.inputs, nodes))
    return dataclasses.replace(plan, graph=graph, ops=ops, rewrites=tuple(rewrites))
