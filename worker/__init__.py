"""The code that runs inside each rank: preflight, hooks, then the user's script as `__main__`. Imports torch late."""
