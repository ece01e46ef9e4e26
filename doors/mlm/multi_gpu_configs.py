"""Named training configurations: python multi_gpu_configs.py list | info NAME | generate NAME"""

import sys

try:
    from lockstep.compat import configurations
    from lockstep.named_configs import CONFIGS, TrainingConfig
except ImportError as error:
    from install_hint import explain

    sys.exit(explain(error))

__all__ = ["CONFIGS", "TrainingConfig"]

# Yours, anywhere in this file: CONFIGS["my_custom_config"] = TrainingConfig(name="My Custom Training", ...)

if __name__ == "__main__":
    configurations(__file__, sys.argv[1:])
