"""Train an agent by Algorithm Distillation: python, torchrun, accelerate or srun. --help shows the flags."""

import sys

try:
    from lockstep.compat import entry
except ImportError as error:
    from install_hint import explain

    sys.exit(explain(error))

if __name__ == "__main__":
    entry("train.py", sys.argv[1:])
