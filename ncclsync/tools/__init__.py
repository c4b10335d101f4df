"""Serve the command line: `python -m ncclsync`."""
