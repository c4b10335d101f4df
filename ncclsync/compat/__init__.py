"""Wrap every interface that TensorFlow, Keras and other libraries do not promise, each in one place.

`names` has how TensorFlow writes names. `tests/compat` tests most functions by name, so that an upgrade that breaks an
assumption fails under the assumption's name.
"""
