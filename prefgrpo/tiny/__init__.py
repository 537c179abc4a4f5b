"""The small world the demo runs on: captioned 32x32 scenes, a tiny FluxPipeline, a tiny VLM judge.

`scenes` draws and scores the pictures; `vae`, `base` and `judge` train the models in `assets/`,
which load with stock diffusers and transformers classes. See README.md for commands and numbers.
"""
