"""What a rank tests before the training starts, in separate processes that can be killed when they hang.

    worker (no torch) --starts--> coordinator (imports torch once) --forks--> a child; each test has a deadline

`preflight_run` is the worker's side, `coordinator` runs the stages, and `meeting` exchanges reports between the ranks.
"""
