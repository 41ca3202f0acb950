"""`python -m gpuwatch`: the command, for an environment whose scripts are not on the path."""

from .cli.main import entry

if __name__ == "__main__":
    entry()
