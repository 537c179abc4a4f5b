"""Imported once by the server from which test processes are forked: what every run imports and loads first."""

import gc
import io
import tempfile
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path

import torch

from prefgrpo.models import family
from prefgrpo.report import page
from prefgrpo.tiny import pipelines

for name in ("commands.cli", "judge.local", "report", "trainer"):
    import_module(f"prefgrpo.{name}")
for name in ("diffusers.guiders", "onnxruntime", "peft", "pytest"):
    import_module(name)
with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
    family("flux").load(str(pipelines.make("flux", Path(folder))), torch.float32, torch.device("cpu"))
page._template()
gc.collect()
gc.freeze()  # a run collects garbage, which would copy the memory that it shares with the server
