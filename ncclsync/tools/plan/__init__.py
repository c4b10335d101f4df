"""Run `python -m ncclsync plan`: predict steps on N GPUs, from a measured model, links and closed forms."""
