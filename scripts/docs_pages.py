"""mkdocs hook that generates the site's pages outside docs/ at build time; none of them is stored in the repository.

README, CONTRIBUTING and CHANGELOG are copied unchanged. Every other file of the repository that a page links to becomes
a page under source/, so that links on the site have the same targets as in the repository. The reference is generated
from the code: configuration fields with their help texts, the --help of commands, options of rewards and objectives,
and docstrings of the Trainer and the ops (by mkdocstrings).
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""File of the repository → page of the site."""
LANGUAGES = {".yaml": "yaml", ".py": "python", ".sh": "bash"}
LINK = re.compile(r"^```.*?^```|`[^`\n]*`|(\]\()([^)\s]+)(\))", re.S | re.M)
"""Matches code, which stays unchanged, or the target of a link in its brackets."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {page: rewrite_links(read(file), file) for file, page in PAGES.items()}
    pages |= {page_of(file): as_page(file) for file in linked_files()}
    pages |= {f"reference/{name}.md": make() for name, make in REFERENCE.items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links out of docs/ to the pages generated for those files."""
    is_stored = page.file.generated_by is None
    return rewrite_links(markdown, f"docs/{page.file.src_uri}") if is_stored else markdown


# ---- files of the repository ----------------------------------------------------------------------------------------


def read(file: str) -> str:
    """The text of a file of the repository."""
    return (ROOT / file).read_text(encoding="utf-8")


def links(text: str) -> list[str]:
    """Targets of a page's links and images outside code, except for URLs of other hosts."""
    return [match[2] for match in LINK.finditer(text) if match[2] and not re.match(r"[a-z]+:", match[2])]


def destination(link: str, source: str) -> tuple[str, str]:
    """(path in the repository, anchor) that a link in the file `source` leads to."""
    path, _, anchor = link.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source, anchor


def page_of(file: str) -> str:
    """The page or image of the site that shows a file of the repository."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return PAGES.get(file) or f"source/{file.removesuffix('.md')}.md"


def rewrite_links(text: str, source: str) -> str:
    """The text of the repository's file `source` with its links rewritten for the site."""

    def replace(match: re.Match[str]) -> str:
        if not match[2] or re.match(r"[a-z]+:|#", match[2]):
            return match[0]
        file, anchor = destination(match[2], source)
        if not (ROOT / file).exists():
            return match[0]  # mkdocs reports it
        path = posixpath.relpath(page_of(file), posixpath.dirname(page_of(source)) or ".")
        return f"{match[1]}{path}{'#' * bool(anchor)}{anchor}{match[3]}"

    return LINK.sub(replace, text)


def linked_files() -> Iterator[str]:
    """Files and folders outside docs/ that its pages link to, directly or indirectly."""
    queue = [*PAGES, *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
    seen = set(queue)
    while queue:
        source = queue.pop()
        if (ROOT / source).is_dir():
            found = recipes(source)
        else:
            found = [destination(link, source)[0] for link in links(read(source))] if source.endswith(".md") else []
        for file in found:
            if file not in seen and not file.startswith("docs/") and (ROOT / file).exists():
                seen.add(file)
                queue.append(file)
                yield file


def recipes(folder: str) -> list[str]:
    """The recipes under a folder."""
    return [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / folder).rglob("*.yaml"))]


def as_page(file: str) -> str:
    """A file as a page: Markdown unchanged, other text as a code block; for a folder, links to its recipes."""
    if (ROOT / file).is_dir():
        names = [posixpath.relpath(name, posixpath.dirname(file) or ".") for name in recipes(file)]
        return rewrite_links("\n".join([f"# {file}", "", *(f"- [{name}]({name})" for name in names), ""]), file)
    if file.endswith(".md"):
        return rewrite_links(read(file), file)
    return f"# {file}\n\n````{LANGUAGES.get(Path(file).suffix, 'text')}\n{read(file)}````\n"


# ---- the reference --------------------------------------------------------------------------------------------------


def configuration() -> str:
    """Every field of the configuration, by section."""
    from dataclasses import is_dataclass

    from prefgrpo.config.schema import Config

    default = vars(Config())
    sections = {name: section for name, section in default.items() if is_dataclass(section)}
    about = "Fields of a recipe, of the command line (`--train.lr 1e-5`) and of `prefgrpo.Trainer`, by section."
    text = f"# Configuration\n\n{about}\n\n## The run\n\n{fields(Config, exclude=sections)}"
    for name, section in sections.items():
        text += f"## {name}\n\n{inspect.getdoc(section)}\n\n{fields(type(section), f'{name}.')}"
    return text


def fields(kind: Any, prefix: str = "", exclude: Any = ()) -> str:
    """The fields of a pydantic dataclass as a definition list."""
    from pydantic import TypeAdapter

    lines = list[str]()
    for name, schema in TypeAdapter(kind).json_schema().get("properties", {}).items():
        if name not in exclude:
            key = prefix + name
            default = schema.get("default", "required")
            lines += [f"[`{key}`](#{key}){{ #{key} }} {plain(accepted_values(schema))}, default `{value(default)}`"]
            lines += [f":   {plain(description(kind, name))}", ""]
    return "\n".join([*lines, ""])


def description(kind: Any, name: str) -> str:
    """The description of a field, also if a base class defines it (pydantic does not inherit descriptions)."""
    owners = [base.__pydantic_fields__.get(name) for base in kind.__mro__ if "__pydantic_fields__" in vars(base)]
    return next((field.description for field in owners if field and field.description), "")


def accepted_values(schema: dict[str, Any]) -> str:
    """The values that a field accepts, in words."""
    if "anyOf" in schema:
        return " or ".join(accepted_values(branch) for branch in schema["anyOf"])
    if names := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(map(str, names))
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]}" for key, sign in limits.items() if key in schema]
    kind = schema.get("type")
    if kind == "array":
        return "list of " + accepted_values(schema.get("items", {"type": "string"}))
    return " ".join([NAMES.get(kind, kind or "any value"), " and ".join(bounds)]).strip()


NAMES = {
    "integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "object": "mapping",
    "null": "none",
}  # fmt: skip


def value(default: Any) -> str:
    """A default in the notation of a recipe."""
    import yaml

    return "none" if default is None else yaml.safe_dump(default, default_flow_style=True).split("\n")[0] or '""'


def plain(text: str) -> str:
    """The paragraphs of a docstring, escaped for Markdown and HTML."""
    marked = re.sub(r"(`[^`]*`)|[*_\[\]|<]", lambda mark: mark[1] or f"&#{ord(mark[0])};", text)
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in marked.split("\n\n"))


def objectives() -> str:
    """The options of every objective."""
    from prefgrpo.objectives import OBJECTIVES, objective_class

    text = "# Objectives\n\nOptions, set in `train.objective_options`; [which one to choose](../objectives.md).\n\n"
    for name in OBJECTIVES:
        kind = objective_class(name)
        text += f"## {name}\n\n{plain(inspect.getdoc(kind) or '')}\n\n{fields(kind, f'{name}.')}"
    return text


def rewards() -> str:
    """What every reward is, and its options, as its class documents them."""
    from prefgrpo.rewards import REWARDS, load_class

    about = "Options, set in the entries of `rewards` and `eval.rewards`; [inputs and scales](../rewards.md)."
    text = f"# Rewards\n\n{about}\n\n"
    for name in sorted(REWARDS):
        kind = load_class(name)
        bases = kind.__mro__[:-1]
        parameters = inspect.signature(kind).parameters
        docs = [inspect.cleandoc(kind.__doc__ or "")]
        for part in [*(base.__init__ for base in bases if "__init__" in vars(base)), *bases[1:]]:
            doc = inspect.cleandoc(part.__doc__ or "")
            known = "\n".join(docs)
            if any(re.search(rf"\b{name}: ", doc) and not re.search(rf"\b{name}: ", known) for name in parameters):
                docs.append(doc)  # it describes an option that no text so far describes
        options = [option(p) for p in parameters.values()]
        text += "\n".join([f"## {name}", "", *(f"{plain(part)}\n" for part in docs), *options, "", ""])
    return text


def option(parameter: inspect.Parameter) -> str:
    """An argument of a reward's class as a line of code; required ones (its judge) are set by the run."""
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"    {parameter.name}: {parameter.annotation}{default}"


EXIT_CODES = """| exit code | meaning |
|---|---|
| 0 | success |
| 1 | `judge check`: fewer than 7 pairs are right; `score`: a reward scored no file; `doctor`: an op backend is wrong |
| 2 | a mistake in the command, its configuration or its inputs; the message says what to correct |
| 3 | `train` or `demo` stopped with a checkpoint: continue with `--resume` (torchrun itself then exits with 1) |
"""


def commands() -> str:
    """Exit codes, and the --help text of every command."""
    from prefgrpo.commands.cli import COMMANDS, main

    text = f"# Commands\n\n`prefgrpo COMMAND --help` prints the same.\n\n{EXIT_CODES}\n"
    for name, (_, about) in COMMANDS.items():
        text += f"## prefgrpo {name}\n\n{about[0].upper()}{about[1:]}.\n\n"
        with redirect_stdout(StringIO()) as out, patch.dict(os.environ, COLUMNS="94"), suppress(SystemExit):
            main([*name.split(), "--help"])
        text += f"```text\n{out.getvalue().strip()}\n```\n\n"
    return text


def docstrings(title: str, about: str, *names: str) -> Callable[[], str]:
    """A page of docstrings."""
    return lambda: "\n\n".join([f"# {title}", about, *(f"::: {name}" for name in names), ""])


def ops() -> str:
    """The public ops, and the functions that make schedules for them."""
    names = sorted(import_module("prefgrpo.ops").__all__, key=lambda name: not name.islower())
    public = [f"prefgrpo.ops.{name}" for name in names]
    of_steps = ("schedule.make_schedule", "schedule.shifted_sigmas", "rules.sde_row", "rows.sde_rows")
    rules = [f"prefgrpo.sde.{name}" for name in of_steps]
    return docstrings("Ops", "`from prefgrpo import ops`; [how they are used](../ops.md).", *public, *rules)()


REFERENCE: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "commands": commands,
    "trainer": docstrings(
        "Trainer",
        "`from prefgrpo import Trainer, PairwiseJudge`; [with examples](../python.md).",
        *(f"prefgrpo.{name}" for name in ("Trainer", "PairwiseJudge", "Result", "ConfigError", "TrainingStopped")),
        "prefgrpo.data.answer.Answer",
        *(f"prefgrpo.rewards.base.{name}" for name in ("Sample", "Reward", "Tally")),
        "prefgrpo.rewards.pairs.Compares",
    ),
    "ops": ops,
    "rewards": rewards,
    "objectives": objectives,
}
"""Page → function that generates it."""
