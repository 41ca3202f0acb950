"""What runs at every call: hooks of forward, backward and step; replaced methods of groups, GradScaler and RPC.

They only record.
"""
