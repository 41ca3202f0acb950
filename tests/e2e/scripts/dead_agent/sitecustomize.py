"""A machine on which no node agent lives: each ends as soon as it is started."""

import os
import sys

if any("gpuwatch.launcher.agent.agent" in argument for argument in sys.orig_argv):
    os._exit(1)
