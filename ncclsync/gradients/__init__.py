"""Bring gradients from tape to update: reduced once, compressed, sharded or observed, as the user asked.

Hooks wrap methods of Keras' optimizers while a step is traced, and nothing at other times.
"""
