"""Offer callbacks and helpers for `fit` on towers."""
