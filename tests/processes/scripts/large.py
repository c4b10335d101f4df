"""Send a message of more than 2^31 bytes from the last of several processes to the others."""

import numpy as np

from ncclsync.communicator import TcpCommunicator
from ncclsync.communicator.joining import peers_of
from ncclsync.communicator.processes import find_process
from tests.support.large import aliased

peers = peers_of(find_process(), 60)
communicator = TcpCommunicator(peers, 1)
is_last = peers.rank == peers.size - 1
whole = aliased((1 << 31) + 12_345)
pattern = np.random.default_rng(0).integers(0, 256, 1 << 24).astype(np.uint8)
whole[: 1 << 24] = pattern if is_last else 0
communicator.broadcast([whole], peers.size - 1)
assert (whole[: 1 << 24] == pattern).all() and whole[-1] == pattern[12_344]
print(f"[{peers.rank}] has {whole.size} bytes", flush=True)
