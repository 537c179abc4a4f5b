"""What a run was made from, when it is resumed: what changed is told or refused, what is gone is not needed.

Why these cases: between two parts of a run people edit prompt files and reward code, train the LoRA that it continues
further, download a model again, and move or rename folders. A changed prompt or model makes another run; the rest is
noted, once; and what only moved, or has other names around the same content, is no change.
"""

import os
import shutil
from pathlib import Path

import pytest
import yaml
from PIL import Image
from ranks import start, train, trained
from safetensors.torch import load_file, save_file
from world import case_of, policy, recipe, rows, settings, tiny_world, tree

import prefgrpo
from prefgrpo.config.loading import from_dict
from prefgrpo.data.prompts import Prompt
from prefgrpo.judge.template import shipped_templates
from prefgrpo.run.resume import Input, Kind, fingerprints, stored

JUDGE = Path(prefgrpo.__file__).parent / "tiny" / "assets" / "judge"
CODE = "def brightness(images, prompts, **columns):\n    return [float(image.mean()) {} for image in images]\n"


def table(place, columns="prompt,shape,colour", colour="red"):
    order = columns.split(",")
    values = [{"prompt": f"a thing {k}", "shape": "ball", "colour": colour} for k in range(4)]
    lines = [columns, *(",".join(row[name] for name in order) for row in values)]
    (place / "train.csv").write_text("\n".join(lines) + "\n")


def prolonged(file, steps, *options):
    return train(file, "--resume", "--train.steps", str(steps), *options)


def test_what_changed_is_told_once_and_another_model_or_prompt_is_refused(tmp_path):
    place = tiny_world(tmp_path)
    table(place)
    (place / "mine.py").write_text(CODE.format("/ 255"))
    files = {"data": {"prompts": str(place / "train.csv")}, "rewards": f"{place}/mine.py:brightness"}
    file = recipe(place, "run", train={"steps": 1}, checkpoint={"every": 1, "keep": 1}, eval={"every": 0}, **files)
    trained(file)
    table(place, "colour,prompt,shape")
    code, output = prolonged(file, 2)
    assert code == 0 and "changed since: the" not in output, output
    table(place, colour="blue")
    (place / "mine.py").write_text(CODE.format("/ 256"))
    code, output = prolonged(file, 3)
    assert code == 0 and output.count("changed since: the") == 2, output
    assert "changed since: the column colour of the prompts" in output and "the code of the reward" in output
    shutil.move(place / "flux", place / "moved")  # where it is does not count, and a run may go on with both moved
    shutil.move(place / "train.csv", place / "moved.csv")
    (place / "moved" / "prefgrpo.yaml").unlink()
    moved = ("--model", str(place / "moved"), "--data.prompts", str(place / "moved.csv"))
    code, output = prolonged(file, 4, *moved)
    assert code == 0 and "changed since: the" not in output and "changed since: model" in output, output
    before = tree(place / "runs" / "run")
    weights = next((place / "moved" / "transformer").glob("*.safetensors"))
    tensors = load_file(weights)
    stat = weights.stat()
    save_file({name: tensor + 1e-3 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    code, output = prolonged(file, 5, *moved)
    assert code == 2 and "has other weights or settings than when" in output and "transformer" in output, output
    assert tree(place / "runs" / "run") == before
    save_file(tensors, weights, {"format": "pt"})
    (place / "moved.csv").write_text("prompt,shape,colour\nanother thing,ball,red\n")
    code, output = prolonged(file, 5, *moved)
    assert code == 2 and "has different prompts" in output and tree(place / "runs" / "run") == before, output


def test_every_input_has_a_fingerprint_of_its_content(tmp_path):
    place = tiny_world(tmp_path)
    policy(case_of("flux"), path=place / "flux").save_lora(str(place / "given"))
    template = shipped_templates()["caption_match"]
    (place / "own.yaml").write_text(yaml.safe_dump(template))
    Image.new("RGB", (8, 8), "red").save(place / "one.png")
    entry = {"name": "vlm_pairwise", "options": {"template": str(place / "own.yaml")}}
    config = from_dict(settings(place, "run", rewards=[entry], judge={"endpoints": [], "model": str(JUDGE)}))

    def found(column="red", source="one.png"):
        prompts = [Prompt(0, "a thing", {"b": 1, "colour": column}, (str(place / source),))]
        return fingerprints(config, prompts, {"dev": prompts}, str(place / "given"))

    first = found()
    shutil.copy(place / "one.png", place / "two.png")
    assert found(source="two.png") == first, "its name does not count"
    changes = {
        "the column colour of the prompts": lambda: found("blue"),
        "the template of vlm_pairwise": lambda: (place / "own.yaml").write_text(
            yaml.safe_dump(template | {"user": USER})
        ),
        "the LoRA of train.lora_from (the run goes on from its copy)": lambda: grow(place / "given"),
        "the prompts of train, the prompts of dev": lambda: Image.new("RGB", (8, 8), "blue").save(place / "one.png"),
        "the model's transformer": lambda: grow(place / "flux" / "transformer"),
    }
    before = first
    for names, change in changes.items():
        now = change() if "column" in names else (change(), found())[1]
        assert ", ".join(f"the {one}" for one in now if now[one] != before[one]) == names
        before = found()
    assert Input(Kind.MODEL, "transformer") in before and stored(before)["column"].keys() == {"b", "colour"}


USER = "Caption: {prompt} Image 1: {media_1} Image 2: {media_2} Which one?"


def grow(folder):
    """Scale every tensor of the folder's file."""
    file = next(folder.glob("*.safetensors"))
    save_file({name: 1.5 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


@pytest.mark.full
def test_a_run_goes_on_without_the_files_it_was_started_with(tmp_path):
    """The LoRA that it continues, its prompts, a template and its recipe are gone, and its folder has another name."""
    place = tiny_world(tmp_path)
    policy(case_of("flux"), path=place / "flux").save_lora(str(place / "given"))
    (place / "own.yaml").write_text(yaml.safe_dump(shipped_templates()["caption_match"]))
    options = {
        "rewards": [{"name": "vlm_pairwise", "options": {"template": str(place / "own.yaml")}}],
        "judge": {"endpoints": [], "model": str(JUDGE)},
        "eval": {"every": 0},
        "checkpoint": {"every": 1},
    }
    lora = {"lora_from": str(place / "given"), "kl_coef": 0.1}
    whole = recipe(place, "whole", train=lora | {"steps": 2}, **options)
    trained(whole)
    file = recipe(place, "half", train=lora | {"steps": 1}, **options)
    trained(file)
    for gone in ("given", "own.yaml", "train.txt", "half.yaml"):
        shutil.move(place / gone, place / f"gone-{gone}")
    run = place / "elsewhere" / "renamed"
    shutil.copytree(place / "runs" / "half", run)
    shutil.rmtree(place / "runs" / "half")
    log = place / "log"
    for argv in (["export", str(run)], ["generate", str(run), "--out", str(place / "images"), "--samples", "1"]):
        command = start([*argv], log)
        assert command.wait() == 0, command.output
    command = start(["train", str(run / "config.yaml"), "--resume", "--train.steps", "2"], log)
    assert command.wait() == 0, command.output
    assert "changed since: the" not in command.output, command.output
    assert rows(run) == rows(place / "runs" / "whole") and not (place / "runs" / "half").exists()
