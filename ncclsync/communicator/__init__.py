"""Join N ranks, by NCCL, by C, or by ZeroMQ and C.

``CpuCommunicator`` works on host memory by the C library's own all-reduce, ``TcpCommunicator`` on that of several
processes, ``NcclCommunicator`` on GPUs by NCCL; all take the same calls. A collective has happened when it returns, or
it raises. How a buffer is read is in ``buffers``. Nothing here imports TensorFlow.
"""

from ncclsync.communicator.base import AllGather as AllGather
from ncclsync.communicator.base import AllReduce as AllReduce
from ncclsync.communicator.base import AnyCollective as AnyCollective
from ncclsync.communicator.base import Broadcast as Broadcast
from ncclsync.communicator.base import Communicator as Communicator
from ncclsync.communicator.base import ReduceScatter as ReduceScatter
from ncclsync.communicator.buffers import empty_aligned as empty_aligned
from ncclsync.communicator.cpu import CpuCommunicator as CpuCommunicator
from ncclsync.communicator.nccl import NcclCommunicator as NcclCommunicator
from ncclsync.communicator.tcp import TcpCommunicator as TcpCommunicator
