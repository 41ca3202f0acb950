"""The recorder: one memory-mapped file per rank, the only thing that a worker writes for others to read.

It outlives the process that writes it. One writer (the worker), any number of readers (the node agent), no lock: a
reader checks what it copied. Three fields of the head are others': the agent's forecasts, and two of child processes.
See `layout` for the bytes, `writer` and `reader` for the two sides.
"""
