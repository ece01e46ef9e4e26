"""Prepare the dataset of a configuration without training. `python3 prepare_dataset.py --help` shows the flags."""

import sys

try:
    from lockstep.compat import entry
except ImportError as error:
    from install_hint import explain

    sys.exit(explain(error))

if __name__ == "__main__":
    entry("prepare_dataset.py", sys.argv[1:])
