"""Builds the small C programs beside the Python packages; the rest is in pyproject.toml."""

from __future__ import annotations

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPrograms(build_py):
    """Static programs: the keeper runs inside views whose libraries it must not depend on."""

    def run(self) -> None:
        subprocess.run(["make", "programs"], check=True, cwd=Path(__file__).parent)
        super().run()


setup(cmdclass={"build_py": BuildWithPrograms})
