"""What a rank tests before the training starts, in processes of its own that can be ended when they hang.

    worker (no torch) --starts--> coordinator (imports torch once) --forks--> a child; each test has a deadline

`run` is the worker's side, `coordinator` goes through the stages, `meeting` is how the ranks hear of each other.
"""
