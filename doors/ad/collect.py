"""Collect the histories of source learners that train.py learns from. `python collect.py --help` shows the flags."""

import sys

try:
    from lockstep.compat import entry
except ImportError as error:
    from install_hint import explain

    sys.exit(explain(error))

if __name__ == "__main__":
    entry("collect.py", sys.argv[1:])
