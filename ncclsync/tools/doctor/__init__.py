"""Run `python -m ncclsync doctor`: find what stands between a host and training, without a hang."""
