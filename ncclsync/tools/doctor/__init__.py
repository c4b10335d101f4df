"""Run `python -m ncclsync doctor`: find what prevents a host from training; it cannot hang."""
