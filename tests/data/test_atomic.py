"""Atomic writes on a disk that is full.

Why these cases: configurations, reports, generated files and images of the starting policy are replaced in place of
older ones, and a run must be able to go on from either.
"""

import resource
import signal

import numpy as np
import pytest

from prefgrpo.data import atomic

LIMIT = 4096
"""Bytes of the largest file that fits."""


@pytest.fixture
def full_disk():
    """A larger file is cut off at LIMIT bytes, and its write raises OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def write_text(path, size):
    atomic.write_atomic(path, "ä" * (size // 2))


def write_bytes(path, size):
    atomic.write_atomic(path, b"a" * size)


def write_images(path, size):
    atomic.save_images(path, image=np.zeros(size, np.uint8))


@pytest.mark.parametrize("write", [write_text, write_bytes, write_images])
def test_a_file_that_does_not_fit_leaves_the_old_one(write, tmp_path, full_disk):
    file = tmp_path / "file"
    write(file, 100)
    old = file.read_bytes()
    with pytest.raises(OSError):
        write(file, 2 * LIMIT)
    assert file.read_bytes() == old


def test_a_folder_that_does_not_fit_leaves_the_old_one(tmp_path, full_disk):
    folder = tmp_path / "folder"
    atomic.write_folder(folder, lambda inside: write_text(inside / "old", 100))
    with pytest.raises(OSError):
        atomic.write_folder(folder, lambda inside: write_text(inside / "new", 2 * LIMIT))
    assert [file.name for file in folder.iterdir()] == ["old"]
