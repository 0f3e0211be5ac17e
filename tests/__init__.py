"""What every process of the tests shares, before it imports anything else of them."""

import os
import sys

# each worker would rewrite all tests anew, and each of hundreds of daemons compile its modules
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
