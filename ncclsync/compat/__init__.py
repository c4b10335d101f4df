"""Wrap every interface that TensorFlow, Keras and other libraries do not promise, each in one place.

One module for each library. `tests/compat` shows which assumption broke.
"""
