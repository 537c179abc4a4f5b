"""Builds prefgrpo/_C with CMakeLists.txt; everything else about the package is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class CMakeBuild(build_ext):  # noqa: D101
    def build_extension(self, ext: Extension) -> None:  # noqa: D102
        if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++").split()[0], "g++", "clang++")):
            note = "no C++20 compiler; the ops run in Triton on a GPU and in torch on a CPU (install g++, reinstall)"
            print(f"prefgrpo: building without the compiled kernels: {note}", file=sys.stderr)
            ext.optional = True  # setuptools then does not miss the file
            return
        import pybind11  # a build requirement

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve()
        command = ["cmake", "-G", "Ninja", "-S", str(Path(__file__).resolve().parent), "-B", str(build)]
        command += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        subprocess.run([*command, f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}"], check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)


setup(ext_modules=[Extension("prefgrpo._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
