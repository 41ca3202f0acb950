"""Where the numbers of two runs, two ranks or two batches first differ (`gpuwatch diff`)."""
