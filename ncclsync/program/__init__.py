"""Trace a step once, place its tensors, cut it at its collectives and schedule the segments.

A program names what runs; it knows no device. `towers` lays it out.
"""
