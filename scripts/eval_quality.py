"""Scores a folder of images with the flags and JSON format of Pref-GRPO's tools/image_reward_eval.py.

    {"mean_scores": {reward: mean over the images}, "records": [{"path", "caption", "scores": {reward: value}}]}

A file belongs to the prompt whose index precedes its first '_'; files without an index are skipped and counted. Records
are in file order (the original's are in process order). An image that a reward cannot score has null as its score and
is excluded from the mean.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefgrpo.commands.score import score_files, summary
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.rewards import RewardEntry
from prefgrpo.config.schema import Config, JudgeConfig
from prefgrpo.data.answer import Answer
from prefgrpo.data.file_names import Generated
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.judge.http import JudgeError
from prefgrpo.parallel import world as parallel
from prefgrpo.rewards import RewardSpecError, parse_reward_spec
from prefgrpo.rewards.base import RewardError
from prefgrpo.run.rewards import Rewards

ALL = "clip,hpsv2,hpsv3,pickscore,unifiedreward_alignment,unifiedreward_style,unifiedreward_coherence"  # the original's


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags of the original script."""
    parser = argparse.ArgumentParser(prog="eval_quality", description="Score a folder of images.")
    add = parser.add_argument
    add("--image_dir", required=True, type=Path, help="folder with generated images")
    add("--prompt_csv", required=True, type=Path, help="table of prompts")
    add("--reward_spec", default=ALL, help="rewards, comma-separated or as JSON")
    add("--caption_col", default="prompt_en", help="column with the prompts")
    add("--index_col", default="index", help="column with the indices that file names start with")
    add("--recursive", action="store_true", help="also search subfolders of image_dir")
    add("--image_exts", default=".png,.jpg,.jpeg,.webp", help="file extensions of images")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="device that rewards run on")
    add("--api_url", default=os.getenv("REWARD_API_URL"), help="server URL for rewards that query a served model")
    add("--output_json", type=Path, help="write all scores to this file")
    add("--chunk_size", type=int, default=32, help="number of images to read and score at a time")
    return parser.parse_args(argv)


def normalise_index(text: str) -> str:
    """An index in normal form: 7, 7.0 and 007 are the same."""
    try:
        number = float(text.strip())
    except ValueError:
        return text.strip()
    return str(int(number)) if number.is_integer() else text.strip()


def read_captions(file: Path, index_col: str, caption_col: str) -> dict[str, str]:
    """Index → prompt. Raises DataError."""
    try:
        rows = csv.DictReader(io.StringIO(file.read_text(encoding="utf-8-sig"), newline=""))
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: expected a table in UTF-8: {error}") from error
    if absent := [name for name in (index_col, caption_col) if name not in (rows.fieldnames or ())]:
        raise DataError(f"{file}: expected a column {absent[0]!r}, got {rows.fieldnames}")
    by_index = {normalise_index(row[index_col] or ""): (row[caption_col] or "").strip() for row in rows}
    return {key: text for key, text in by_index.items() if key and text}


def match_images(args: argparse.Namespace) -> tuple[list[Generated], int]:
    """(images with their prompts, sorted by path; number of images without a prompt). Raises DataError."""
    texts = read_captions(args.prompt_csv, args.index_col, args.caption_col)
    extensions = {e.strip().lower() for e in args.image_exts.split(",") if e.strip()}
    paths = args.image_dir.rglob("*") if args.recursive else args.image_dir.glob("*")
    images = sorted((p for p in paths if p.is_file() and p.suffix.lower() in extensions), key=str)
    prompt_ids = {key: k for k, key in enumerate(texts)}
    keys = [normalise_index(path.stem.split("_", 1)[0]) for path in images]
    files = [Generated(Prompt(prompt_ids[k], texts[k]), p) for p, k in zip(images, keys, strict=True) if k in texts]
    if not files:
        raise DataError(f"{args.image_dir}: none of {len(images)} images is named after an index of {args.prompt_csv}")
    return files, len(images) - len(files)


def payload(files: Sequence[Generated], scores: Sequence[Mapping[str, Answer]]) -> dict[str, Any]:
    """The JSON's content."""
    found = summary(Path(), dict.fromkeys(scores[0], 1.0), files, scores)["rewards"]
    records = [
        {"path": str(g.file), "caption": g.prompt.text, "scores": {name: s.value for name, s in row.items()}}
        for g, row in zip(files, scores, strict=True)
    ]
    return {"mean_scores": {name: row["mean"] for name, row in found.items()}, "records": records}


def main() -> int:
    """Score, print the means, write the JSON; returns the exit code."""
    args = parse_args()
    try:
        entries = [RewardEntry(name) for name in parse_reward_spec(args.reward_spec)]
        if args.output_json and args.output_json.is_dir():
            raise ConfigError([f"--output_json: expected a file, {args.output_json} is a folder"])
        files, skipped = match_images(args)
        served = JudgeConfig(endpoints=(args.api_url,)) if args.api_url else JudgeConfig()
        config = Config(judge=served)
        if args.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        world = parallel.join()
        rewards = Rewards(config, world, ["image"])
        scores = score_files(rewards.build("--reward_spec", entries, []), files, args.chunk_size, config, world)
        rewards.close()
        parallel.leave()
    except (ConfigError, DataError, JudgeError, OSError, RewardError, RewardSpecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not world.main:
        return 0
    result = payload(files, scores)
    if skipped:
        print(f"skipped {skipped} images whose names do not start with the index of a prompt in {args.prompt_csv}")
    print("Mean reward scores:")
    for name, value in sorted(result["mean_scores"].items()):
        missing = sum(row[name].value is None for row in scores)
        print(f"  {name}: " + ("none" if value is None else f"{value:.6f}") + (f" ({missing} missing)" * bool(missing)))
    if args.output_json:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(result, indent=2), encoding="utf-8")
    return int(any(value is None for value in result["mean_scores"].values()))


if __name__ == "__main__":
    sys.exit(main())
