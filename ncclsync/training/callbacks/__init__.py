"""Callbacks and helpers for `fit` on towers."""
