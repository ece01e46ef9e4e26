"""Train a LLaMA in one process. `python3 pretrain_main.py --help` shows the flags."""

import sys

try:
    from lockstep.compat import entry
except ImportError as error:
    from install_hint import explain

    sys.exit(explain(error))

if __name__ == "__main__":
    entry("pretrain_main.py", sys.argv[1:])
