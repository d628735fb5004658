# SPDX-License-Identifier: LGPL-3.0-or-later
"""Loops of mpi4py that do not say where their iterations end: `halo.py KIND STEPS`.

line: exchanges with both neighbours on a line of ranks, of which those at its ends have one.
objects: the same by pickled objects. all: and all agree on a time step. Prints the steps.
"""

import sys
import time

from mpi4py import MPI

world = MPI.COMM_WORLD
rank, ranks = world.rank, world.size
kind, steps = sys.argv[1], int(sys.argv[2])
left = rank - 1 if rank > 0 else MPI.PROC_NULL
right = rank + 1 if rank < ranks - 1 else MPI.PROC_NULL
ours, theirs, least = bytearray(80), bytearray(80), bytearray(8)

world.bcast({"steps": steps})
for step in range(steps):
    if kind == "objects":
        world.sendrecv({"step": step}, dest=right, source=left)
        world.sendrecv({"step": step}, dest=left, source=right)
    else:
        world.Sendrecv(ours, dest=right, recvbuf=theirs, source=left)
        world.Sendrecv(ours, dest=left, recvbuf=theirs, source=right)
    if kind == "all":
        world.Allreduce([ours, 1, MPI.DOUBLE], [least, 1, MPI.DOUBLE], MPI.MIN)
    until = time.monotonic() + 2e-3
    while time.monotonic() < until:
        pass
if rank == 0:
    print(steps)
