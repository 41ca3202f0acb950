"""On PYTHONPATH of every process below `gpuwatch run`. No module of the package: Python itself imports what is here."""
