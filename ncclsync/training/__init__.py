"""Train a Keras model, or a loop of the user's own, on towers.

`loop` has `Towers`, whose `run` runs any step function. `keras_model` gives a model towers, and replaces the functions
by which its `fit`, `evaluate` and `predict` make steps; `random_data` makes inputs for a model that is traced without
data. `processes` keeps a model in step where several processes train it. `callbacks/` has ncclsync's callbacks.
`files` writes a file whole or not at all; `progress` reports to `python -m ncclsync run` how far training has come.
"""
