"""Train a Keras model, or a loop of the user's own, on towers.

`loop` has `Towers`, whose `run` runs any step function. `keras_model` gives a model towers, and replaces the functions
by which its `fit`, `evaluate` and `predict` run steps; `random_data` makes data for a model that is traced without any.
`processes` keeps a model in step among several processes; `local` lets each read its own part of the data. `callbacks/`
has ncclsync's callbacks. `files` writes a file whole or not at all; `progress` reports to `python -m ncclsync run`;
`arguments` checks and binds arguments.
"""
