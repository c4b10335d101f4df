"""Compare a model on towers with the same model on one device."""
