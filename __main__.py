"""`python -m gpuwatch`: the command, for an environment whose scripts are not on the path."""

from .cli.main import main

if __name__ == "__main__":
    main()
