"""What --notify hands to a command."""

import sys

print(sys.stdin.read())
