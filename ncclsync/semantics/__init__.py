"""Make N shards equal one batch: partition the one-device program.

A traced step means the program of one device on the whole batch. `placements` says what a tower's tensor is
of the batch's; `rules` says, op by op, which placements an op takes and gives; `placing` applies a rule to one op.
`program/partition.py` walks a traced step by them, and puts a collective wherever an op needs the batch's value. An op
without a rule gets whole inputs on every tower: unknown means slower, never wrong.
"""
