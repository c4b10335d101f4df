"""`python -m ncclsync doctor`: what stands between a host and training, found out without a hang."""
