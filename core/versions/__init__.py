"""Which releases of torch have what gpuwatch uses of it, and what a run tells of that."""
