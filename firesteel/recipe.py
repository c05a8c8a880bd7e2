"""Every setting of a run: typed, with its one default and its one help text.

A recipe is a YAML file or a named recipe in `firesteel/recipes/`. Overrides are `section.key=value`.
Unknown keys fail and name the nearest known one. Defaults stand in `recipe_sections.py` and nowhere else.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from firesteel.errors import RecipeError
from firesteel.recipe_bench import Bench
from firesteel.recipe_cluster import Cluster, Group, Node  # noqa: F401 - others take them from here
from firesteel.recipe_sections import (  # noqa: F401 - others take them from here
    Calibrate,
    DFlash2,
    Drafter,
    Eagle,
    Endpoints,
    Evaluate,
    ExtraSet,
    Feed,
    Hidden,
    Loss,
    Mla,
    Mooncake,
    Mtp,
    Package,
    Prompts,
    Responders,
    Responses,
    Section,
    Serve,
    Source,
    Target,
    Train,
    Vllm,
)
from firesteel.recipe_watch import Watch

RECIPE_FOLDER = Path(__file__).parent / "recipes"


class Recipe(Section):
    name: str = Field("custom", description="Name of the run; its folder is runs/NAME.")
    seed: int = Field(0, description="Seed of everything that is random.", ge=0)
    runs_dir: str = Field("runs", description="Folder of all runs.")
    target: Target = Field(default_factory=Target, description="The model to speed up.")
    prompts: Prompts = Field(default_factory=Prompts, description="What the target is asked.")
    responses: Responses = Field(default_factory=Responses, description="How the target answers.")
    hidden: Hidden = Field(default_factory=Hidden, description="How the target's hidden states are captured and kept.")
    drafter: Drafter = Field(default_factory=Drafter, description="The drafter's shape.")
    loss: Loss = Field(default_factory=Loss, description="What the drafter minimises.")
    train: Train = Field(default_factory=Train, description="How the drafter is trained.")
    watch: Watch = Field(default_factory=Watch, description="What an unattended run does about trouble (docs/watching.md).")
    calibrate: Calibrate = Field(default_factory=Calibrate, description="How confidences are calibrated.")
    package: Package = Field(default_factory=Package, description="How the checkpoint is exported and proven.")
    evaluate: Evaluate = Field(default_factory=Evaluate, description="What is measured and reported.")
    serve: Serve = Field(default_factory=Serve, description="How target and drafter are served.")
    bench: Bench = Field(default_factory=Bench, description="How servers are load-tested (docs/bench.md).")
    cluster: Cluster = Field(default_factory=Cluster, description="Which machines do what (docs/cluster.md); without it, this one does all.")

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.responses.samples > 1 and self.responses.temperature == 0:
            raise ValueError("responses.samples > 1 needs responses.temperature > 0: greedy answers are all the same")
        if not any((self.train.max_minutes, self.train.max_steps, self.train.epochs)):
            raise ValueError("training needs an end: set train.max_minutes, train.max_steps or train.epochs")
        for setting, urls in (("target.endpoints", self.target.endpoints), ("responses.servers.urls", self.responses.servers.urls)):
            for url in urls:
                if not url.startswith(("http://", "https://")):
                    raise ValueError(f"{setting} has {url!r}, which is not http://HOST:PORT")
        if self.hidden.lease <= self.hidden.feed.timeout:
            raise ValueError("hidden.lease must be longer than hidden.feed.timeout: a sample would be deleted while it is waited for")
        if self.hidden.mooncake.buffer_gb > self.hidden.mooncake.segment_gb:
            raise ValueError("hidden.mooncake.segment_gb must hold what fits into hidden.mooncake.buffer_gb, the largest sample")
        for name in self.evaluate.drafters:
            if name == self.drafter.algorithm and name not in self.evaluate.compare:
                raise ValueError(f"evaluate.drafters has {name}, which is the recipe's own drafter: its settings are drafter's")
            try:
                self.drafter_of(name)
            except ValidationError as e:
                first = e.errors()[0]
                inside, key = f"evaluate.drafters.{name}", ".".join(map(str, first["loc"]))
                if first["type"] == "extra_forbidden":
                    near = _nearest(key, [k for k, _ in known_keys(Drafter)])
                    raise ValueError(f"unknown setting {inside}.{key}" + (f"; did you mean {inside}.{near}?" if near else "")) from None
                raise ValueError(f"{inside}.{key}: {first['msg']}") from None
        for name in self.evaluate.checkpoints:
            if name in ("", "plain", self.drafter.algorithm, *self.evaluate.compare):
                raise ValueError(f"evaluate.checkpoints has {name!r}, which is another arm's name: give the checkpoint one of its own")
        return self

    def drafter_of(self, algorithm: str) -> Drafter:
        """Settings of one of the drafters that the recipe trains: `drafter`, or for a compared one the same but for its own differences.

        A checkpoint to start from belongs to the headline drafter alone; compared ones start as if there were none.
        """
        if algorithm == self.drafter.algorithm:
            return self.drafter
        init = self.drafter.init if self.drafter.init in ("random", "target") else "random"
        return Drafter.model_validate({**self.drafter.model_dump(), "init": init, **self.evaluate.drafters.get(algorithm, {}), "algorithm": algorithm})

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name


def named_recipes() -> list[str]:
    """Names of the recipes that ship with the package."""
    return sorted(p.stem for p in RECIPE_FOLDER.glob("*.yaml"))


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a named recipe or a YAML file, apply `section.key=value` overrides and check everything.

    Raises:
        RecipeError: unknown recipe or key (with the nearest known one), bad value, contradiction.
    """
    path = _find(name_or_path)
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as e:
        raise RecipeError(f"{path} is not valid YAML: {e}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path} must hold a mapping of sections, not a {type(data).__name__}")
    data.setdefault("name", path.stem)
    return recipe_from_dict(replace_settings(data, overrides), origin=str(path))


def replace_settings(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A recipe as a mapping, with `section.key=value` applied in place.

    Raises:
        RecipeError: an override is not of that shape.
    """
    for text in overrides:
        _apply(data, text)
    return data


def recipe_from_dict(data: dict[str, Any], *, origin: str = "recipe") -> Recipe:
    """Validate a plain mapping as a recipe; `origin` names it in errors."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as e:
        raise RecipeError("\n".join(_explain(err, origin) for err in e.errors())) from None


def recipe_to_yaml(recipe: Recipe, *, explain: bool = False) -> str:
    """The whole recipe as YAML; with `explain`, each key carries its help as a comment."""
    dumped = recipe.model_dump(mode="json")
    if not explain:
        return yaml.safe_dump(dumped, sort_keys=False)
    return "\n".join(_explained(Recipe, dumped, 0)) + "\n"


def known_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, str]]:
    """All `section.key` names with their help texts."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from known_keys(inner, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}", field.description or ""
        for item in get_args(inner):  # the settings of a list's entries
            if isinstance(item, type) and issubclass(item, BaseModel):
                yield from known_keys(item, f"{prefix}{name}.")


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise RecipeError(f"recipe file {path} does not exist", mend="firesteel recipe --list shows the named recipes")
    named = RECIPE_FOLDER / f"{name_or_path}.yaml"
    if named.is_file() and os.sep not in name_or_path:
        return named
    near = difflib.get_close_matches(name_or_path, named_recipes(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"named recipes: {', '.join(named_recipes())}; or give a .yaml file"
    raise RecipeError(f"there is no recipe {name_or_path!r}", mend=hint)


def _apply(data: dict[str, Any], text: str) -> None:
    key, eq, value = text.partition("=")
    if not eq or not key:
        raise RecipeError(f"override {text!r} is not section.key=value", mend="for example train.max_minutes=5")
    parts = key.strip().split(".")
    here = data
    for part in parts[:-1]:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise RecipeError(f"override {text!r}: {part!r} is a value, not a section")
    try:
        here[parts[-1]] = yaml.safe_load(value)
    except yaml.YAMLError as e:
        raise RecipeError(f"override {text!r}: the value is not valid YAML: {e}") from None


def _explain(err: Any, origin: str) -> str:
    where = ".".join(str(p) for p in err["loc"])
    if err["type"] == "extra_forbidden":
        near = _nearest(where, [k for k, _ in known_keys()] + list(Recipe.model_fields))
        return f"{origin}: unknown setting {where}" + (f"; did you mean {near}?" if near else "")
    message = str(err["msg"]).removeprefix("Value error, ")
    return f"{origin}: {where or 'recipe'}: {message}" + (f" (got {err['input']!r})" if where else "")


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """The known key most like this one as a whole, or else in its last part; None where none is."""
    lasts = [k.rsplit(".", 1)[-1] for k in known]
    plain = ".".join(part for part in key.split(".") if not part.isdigit())  # without places in lists
    if near := difflib.get_close_matches(plain, known, n=1, cutoff=0.5):
        return near[0]
    near = difflib.get_close_matches(key.rsplit(".", 1)[-1], lasts, n=1)
    return known[lasts.index(near[0])] if near else None


def _explained(model: type[BaseModel], values: dict[str, Any], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for name, field in model.model_fields.items():
        value, inner = values[name], field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield f"{pad}# {field.description}"
            yield f"{pad}{name}:"
            yield from _explained(inner, value, depth + 1)
            continue
        choices = [c for c in get_args(inner) if isinstance(c, str)]
        yield f"{pad}# {field.description}" + (f" One of: {', '.join(choices)}." if choices else "")
        text = yaml.safe_dump({name: value}, sort_keys=False).rstrip()
        yield "\n".join(pad + line for line in text.splitlines())
