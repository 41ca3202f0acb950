"""The compiled part: reductions over host memory, and the writer of ordinary frames. Optional: Python does without."""
