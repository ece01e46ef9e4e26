"""Pre-train an encoder by masked-LM: plain python or torchrun. `python mlm_pretrain_v3.py --help` shows the flags."""

import sys

try:
    from lockstep.compat import entry
except ImportError as error:
    from install_hint import explain

    sys.exit(explain(error))

if __name__ == "__main__":
    entry("mlm_pretrain_v3.py", sys.argv[1:])
