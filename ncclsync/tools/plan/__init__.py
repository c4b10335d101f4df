"""`python -m ncclsync plan`: steps on N GPUs, from a measured model, links and collectives in closed form."""
