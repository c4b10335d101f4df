"""Rows that cost more than they need to, since an op of theirs has no rule."""

OPEN = frozenset({"LSTM stateful", "program: merged_graphs"})
