"""Write the golden files again: `python -m tests.golden`. Read what git shows of them before it is committed."""

import os
import sys

import pytest

os.environ["GOLDEN_UPDATE"] = "1"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/report/test_golden.py", *sys.argv[1:]]))
