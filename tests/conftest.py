"""The environment of every test: one thread, no network beyond this machine, Triton's interpreter if there is no GPU.

It is set before torch, triton or the hub client is imported, and child processes inherit it.
"""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ.pop("PREFGRPO_BACKEND", None)
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest
import torch

# The same examples in every run, so that failures are reproducible. HYPOTHESIS_PROFILE=default draws new ones.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
torch.set_num_threads(1)


def _guarded(connect: Callable[..., Any]) -> Callable[..., Any]:
    def guard(self: socket.socket, address: Any) -> Any:
        local = self.family not in (socket.AF_INET, socket.AF_INET6) or str(address[0]).startswith(
            ("127.", "::1", "localhost", "0.0.0.0")
        )
        if not local:
            raise OSError(f"a test tried to reach {address}: only this machine is allowed")
        return connect(self, address)

    return guard


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` if torch sees no GPU."""
    for item in items if not torch.cuda.is_available() else ():
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny pipeline and its prompts; a module that needs another one defines its own."""
    import tiny_run

    return tiny_run.world(tmp_path_factory.mktemp("place"))


@pytest.fixture
def trainer(place: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes training loops on `tiny_run.settings`, named after the test by default; they are closed at the end."""
    import tiny_run

    from prefgrpo.config.loading import from_dict
    from prefgrpo.trainer import Trainer

    made = []

    def make(name: str = "", resume: bool = False, callbacks: Any = None, **over: Any) -> Any:
        settings = tiny_run.settings(place, name or request.node.name.replace("/", "-"), **over)
        made.append(Trainer(from_dict(settings), resume=resume, **(callbacks or {})))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def root() -> Path:
    """The root folder of the checkout."""
    return Path(__file__).resolve().parent.parent
