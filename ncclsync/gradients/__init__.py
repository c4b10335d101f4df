"""Bring gradients from tape to update: reduced once, compressed, sharded or observed, as the user asked.

Hooks wrap methods of Keras' optimizers only while a step is traced.
"""
