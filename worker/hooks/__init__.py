"""What runs at every call: hooks of forward, backward and step; replaced methods of groups, GradScaler and RPC.

They only record, but for `--guard-optimizer`, which takes gradients that are not finite from a step.
"""
