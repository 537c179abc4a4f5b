"""The environment of every test: one thread, no network beyond this machine, Triton's interpreter if there is no GPU.

It is set before torch, triton or the hub client is imported, and child processes inherit it, signals too.
"""

import atexit
import os
import shutil
import signal
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ.pop("PREFGRPO_BACKEND", None)
if "PREFGRPO_TEST_FOLDER" not in os.environ:  # shared by the workers and by all that they start
    os.environ["PREFGRPO_TEST_FOLDER"] = tempfile.mkdtemp(prefix="prefgrpo-tests-")
    atexit.register(shutil.rmtree, os.environ["PREFGRPO_TEST_FOLDER"], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="cache-", dir=os.environ["PREFGRPO_TEST_FOLDER"])
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest
import torch
import yaml

from prefgrpo.judge.published import PUBLISHED, template_file
from prefgrpo.judge.template import shipped_templates

# The same examples in every run, so that failures are reproducible. HYPOTHESIS_PROFILE=default draws new ones.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
torch.set_num_threads(1)

for _signal in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_signal) is signal.SIG_IGN:  # under `nohup … &` and some CI runners; child processes inherit it
        signal.signal(_signal, signal.default_int_handler if _signal == signal.SIGINT else signal.SIG_DFL)

_YES_NO = "Begin with Yes or No. Theme: {prompt}"
_QUESTIONS = {  # stand-ins for those of the publishers, whose texts are not in this repository
    "think": "Write <answer>Image 1 is better</answer> or <answer>Image 2 is better</answer>. Caption: {prompt}",
    "think_video": "Write <answer>Video 1 is better</answer> or <answer>Video 2 is better</answer>. Caption: {prompt}",
    "flex": '"Alignment" (…), "Quality" (…), "Aesthetics" (…): each with cat_winner. Image 1 or 2? Caption: {prompt}',
    "flex_video": '"Alignment" (…), "Dynamics" (…), "Cinematography" (…): cat_winner. Video 1 or 2? Caption: {prompt}',
    "edit_pairwise": "End with: Edited image 1 is better. Or: Edited image 2 is better. Instruction: {prompt}",
    "edit_quality": "Give [naturalness, artefacts].",
    "edit_following": "Give [success, restraint]. Instruction: {prompt}",
    "unifiedreward": "Write lines like Alignment Score (1-5): 3. Caption: {prompt}",
    "unifiedreward_sglang": "End with Final Score: 3. Caption: {prompt}",
    "qwenvl": "End with <Score>3</Score>.",
    "consistency": _YES_NO,
    "consistency_no_duplicates": _YES_NO,
    "consistency_criterion": f"{_YES_NO} Criterion: {{criterion}}",
    "edit_consistency": "Is everything else consistent, Yes or No? Instruction: {prompt}",
    "edit_done": "Is it done, Yes or No? Instruction: {prompt}",
}
for _name, _row in PUBLISHED.items():
    _shown = "".join(f"{{{medium}}}" for medium in _row.media)
    _content = shipped_templates()[_name] | {"user": _shown + _QUESTIONS[_name]}
    template_file(_name).parent.mkdir(parents=True, exist_ok=True)
    template_file(_name).write_text(yaml.safe_dump(_content, sort_keys=False))


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


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """Full fine-tuning in this process joins a process group, which the next test must not meet."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` if torch sees no GPU."""
    for item in items if not torch.cuda.is_available() else ():
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny pipeline and its prompts; a module that needs another one defines its own."""
    from world import tiny_world  # imports diffusers

    return tiny_world(tmp_path_factory.mktemp("place"))


@pytest.fixture
def trainer(place: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes training loops on `world.settings`, named after the test by default; they are closed at the end."""
    from world import settings

    from prefgrpo.config.loading import from_dict
    from prefgrpo.trainer import Trainer

    made = []

    def make(name: str = "", resume: bool = False, callbacks: Any = None, **over: Any) -> Any:
        content = settings(place, name or request.node.name.replace("/", "-"), **over)
        made.append(Trainer(from_dict(content), resume=resume, **(callbacks or {})))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are fused on the CPU, where the ops run their references, and a failed check is an error."""
    from prefgrpo.models import blocks

    monkeypatch.setattr(blocks, "FUSED_ON", ("cpu",))
    warnings.filterwarnings("error", message=".*runs as in diffusers")


@pytest.fixture(scope="session")
def root() -> Path:
    """The root folder of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def few_source_tokens():
    """Source images of Qwen-Image-Edit keep 1/256 of the usual pixels."""
    from world import small_sources

    with small_sources():
        yield
