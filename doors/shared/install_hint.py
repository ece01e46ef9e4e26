"""What to type when the interpreter lacks lockstep. Runs on any Python 3 with nothing installed."""

import sys
from pathlib import Path
from shlex import quote


def explain(error):
    here = Path(__file__).resolve().parent
    root = here.parent.parent
    in_checkout = (root / "requirements.lock").exists()
    venv = quote(str((root if in_checkout else here) / ".venv"))
    what = f"-r {quote(str(root / 'requirements.lock'))} -e {quote(str(root))}" if in_checkout else "lockstep-train"
    return f"""{sys.executable} cannot load lockstep: {error}
Install it (Python 3.11 or newer), then use the interpreter that has it:
  python3 -m venv {venv} && {venv}/bin/python -m pip install {what}
  source {venv}/bin/activate"""


if __name__ == "__main__":
    sys.exit(explain("no interpreter on PATH has it"))
