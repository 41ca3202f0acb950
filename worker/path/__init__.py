"""On PYTHONPATH of every process below `gpuwatch run`. Python itself imports its modules: it is no part of gpuwatch."""
