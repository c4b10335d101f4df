"""Estimate what a step costs: for its warnings, `explain` and `plan`."""
