"""Let a trained agent loose in tasks it has not seen. `python evaluate.py --help` shows the flags."""

import sys

try:
    from lockstep.compat import entry
except ImportError as error:
    from install_hint import explain

    sys.exit(explain(error))

if __name__ == "__main__":
    entry("evaluate.py", sys.argv[1:])
