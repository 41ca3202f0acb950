"""Living in a stranger's process: descriptors, imports, output and threads of our own that a script cannot break."""
