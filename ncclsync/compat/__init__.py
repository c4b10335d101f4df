"""Wrap every interface that TensorFlow, Keras and other libraries do not promise, each in one place.

One module for each library, and `names` for how TensorFlow writes names. `tests/compat` shows which assumption broke.
"""
