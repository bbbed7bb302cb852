"""Printed commands start with `tunediff` in all tests, whether or not its environment is activated."""

import os
import sys
from pathlib import Path

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
