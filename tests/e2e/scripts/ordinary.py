"""What ordinary scripts rely on, printed as JSON: rank 0's view of its own process."""

import argparse
import json
import os
import signal
import sys

import sibling
import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(float(index * index))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text")
    parser.add_argument("rest", nargs="*")
    args = parser.parse_args()
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    batches = [batch.tolist() for batch in loader]
    forked = [batch.tolist() for batch in DataLoader(Squares(), batch_size=4, num_workers=1)]
    if os.environ["RANK"] != "0":
        return
    facts = {
        "argv": sys.argv,
        "text": args.text,
        "rest": args.rest,
        "name": __name__,
        "file": __file__,
        "main": sys.modules["__main__"].__file__,
        "path": sys.path[0],
        "package": __package__,
        "sibling": sibling.NAME,
        "batches": batches,
        "forked": forked,
        "excepthook": sys.excepthook is sys.__excepthook__,
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "sigterm": int(signal.getsignal(signal.SIGTERM)),
        "gpuwatch variables": [name for name in os.environ if name.startswith("GPUWATCH")],
        "children's path": os.environ.get("PYTHONPATH"),
    }
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
