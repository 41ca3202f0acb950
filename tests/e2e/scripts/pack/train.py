"""Run with -m pack.train."""

import json
import os
import sys
from pathlib import Path

from . import helper

if __name__ == "__main__" and os.environ["RANK"] == "0":
    print(
        json.dumps(
            {
                "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
                "name": __name__,
                "package": __package__,
                "spec": __spec__.name,
                "path": sys.path[0],
                "helper": helper.NAME,
            }
        ),
        flush=True,
    )
