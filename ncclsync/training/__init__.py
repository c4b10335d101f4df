"""Train a Keras model, or a loop of the user's own, on towers."""
