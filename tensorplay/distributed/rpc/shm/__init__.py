"""Payloads between two processes of one host, through memory that both have mapped.

A *slab* is a piece of shared memory that its sender made for one receiver. It consists of *blocks*
of one size, each with a byte that says whether it is leased. A payload that lies in a block does
not travel; the header of its message says where it lies.

    files     makes slabs, and opens those of others
    slabs     the sender's pool of slabs, within a budget
    mapping   the receiver's side: blocks to buffers, and back to the sender
    forks     blocks that children of the receiver have inherited
    peers     which peers share memory with this process, found out by trying
    limits    how much memory there is

A slab is an anonymous file (``memfd_create``), opened by others as ``/proc/<pid>/fd/<fd>``. It has
no name that could be left behind: when the processes that use it are gone, however they ended, so
is the memory. And the size of /dev/shm, tiny in many containers, does not bound it.
"""

from __future__ import annotations

from tensorplay.distributed.rpc.shm.peers import Leases, SharedMemory, hand_over

__all__ = ["Leases", "SharedMemory", "hand_over"]
