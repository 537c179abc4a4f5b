"""Build of prefgrpo/_C by CMake; everything else about the package is in pyproject.toml.

PREFGRPO_CUDA=0 builds without CUDA, PREFGRPO_CUDA_ARCHS chooses architectures. No torch is needed to build. Without a
C++ compiler the install succeeds without the module, as Triton and torch serve the ops; one that fails is an error.
The module uses CPython's stable ABI: a wheel serves every Python from 3.10.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Configures and builds CMakeLists.txt, then puts the module where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        """Build `ext` (there is one, prefgrpo._C)."""
        compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
        if not any(shutil.which(name.split()[0]) for name in compilers):
            print(
                f"prefgrpo: building without the compiled kernels: no C++17 compiler ({', '.join(compilers)}); the ops "
                "run in Triton on a GPU and in torch on a CPU. Install one (apt-get install g++) and reinstall",
                file=sys.stderr,
            )
            ext.optional = True  # setuptools then does not miss the file
            return
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        build = Path(self.build_temp).resolve() / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "-G",
            "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            "-DCMAKE_BUILD_TYPE=Release",
            str(ROOT),
        ]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        with (build / "log.txt").open("w") as log:
            for command in (configure, ["cmake", "--build", str(build), "-j", jobs]):
                done = subprocess.run(command, cwd=build, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                log.write(done.stdout)
                for line in done.stdout.splitlines():
                    if "prefgrpo:" in line:
                        print(line.removeprefix("-- "), file=sys.stderr)
                if done.returncode:
                    print(done.stdout, file=sys.stderr)
                    raise SystemExit(f"building prefgrpo._C failed: {' '.join(command)}")
        for other in set(target.parent.glob("_C.*.so")) - {target}:  # of one Python alone: it would be preferred
            other.unlink()


def mend_link() -> None:
    """Make prefgrpo/kernels a folder again where the link to kernels/ came as a small file (a ZIP, Windows)."""
    link = ROOT / "prefgrpo" / "kernels"
    if link.is_file():
        link.unlink()
        shutil.copytree(ROOT / "kernels", link, ignore=shutil.ignore_patterns("__pycache__", "*.md"))


mend_link()
setup(
    ext_modules=[Extension("prefgrpo._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": CMakeBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
