"""Run `python -m ncclsync run`: start a script again that has died, on the GPUs that are left."""
