"""Builds the small C programs beside the Python packages; the rest is in pyproject.toml."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class BuildWithPrograms(build_py):
    """Static programs: the keeper runs inside views whose libraries it must not depend on."""

    def run(self) -> None:
        subprocess.run(["make", "programs"], check=True, cwd=HERE)
        # setuptools keeps there what earlier builds made of files that are gone since
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class ForOneMachine(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class WheelWithPrograms(bdist_wheel):
    """For any Python 3, but for one machine: the programs are compiled for it.

    They need no C library: so the wheel is right where the old ones are that these tags name
    (PEP 600 for glibc, PEP 656 for musl), and on everything newer.
    """

    def get_tag(self) -> tuple[str, str, str]:
        machine = super().get_tag()[2].removeprefix("linux_")
        return "py3", "none", f"manylinux_2_17_{machine}.musllinux_1_1_{machine}"


setup(
    distclass=ForOneMachine,
    cmdclass={"build_py": BuildWithPrograms, "bdist_wheel": WheelWithPrograms},
)
