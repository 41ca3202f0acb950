"""A script behaves as under torchrun: same bits, same names, same output."""

import json

from conftest import SCRIPTS
