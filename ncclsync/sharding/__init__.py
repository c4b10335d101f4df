"""Divide a batch among towers; say what the copies of a variable are, and what of a model depends on the division."""
