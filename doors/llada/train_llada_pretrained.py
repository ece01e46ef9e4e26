"""Train a LLaDA: plain python or torchrun. `python train_llada_pretrained.py --help` shows the flags."""

import sys

try:
    from lockstep.compat import entry
except ImportError as error:
    from install_hint import explain

    sys.exit(explain(error))

if __name__ == "__main__":
    entry("train_llada_pretrained.py", sys.argv[1:])
