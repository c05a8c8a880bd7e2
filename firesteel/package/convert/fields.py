"""Fields: a foreign config.json, read without guessing.

A value comes from the file, from the format's own rule or from the user (`name=value`), and where two of these speak they must agree.
What nobody asked for is refused at the end, since it might change the network.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from firesteel.errors import CheckpointError, RecipeError

_INTS = "a list of whole numbers"
OVERRIDES: dict[str, tuple[type, str]] = {
    "algorithm": (str, "the drafter's algorithm, where the layout serves several"),
    "sample_from_anchor": (bool, "true: slot k predicts the token k + 1 after the anchor"),
    "layer_ids": (list, "captured layers as Firesteel counts them: id i is the state before layer i, 0 the embeddings"),
    "target_layers": (int, "layers of the target"),
    "block_size": (int, "slots of a block; for a chain its steps"),
    "mask_token_id": (int, "token of unknown slots"),
    "causal": (bool, "slots of a block see only earlier slots"),
    "head_dim": (int, "width of a head"),
    "rope_theta": (float, "base of RoPE"),
    "norm_before_residual": (bool, "EAGLE: the normalised feature goes on in the residual stream"),
    "norm_before_fc": (bool, "EAGLE: one norm over all captured states"),
    "fc_norm": (bool, "EAGLE: a norm for each captured state"),
    "norm_output": (bool, "EAGLE: the next step gets the state after the last norm"),
    "ignore": (list, "fields of config.json that are known to change nothing"),
}
# What Transformers and trainers write beside the network's shape.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_window_layers",
        "num_anchors",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
        "transformers_version",
        "use_cache",
    }
)
ABSENT = object()


def read_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """`name=value` of the command line, values as YAML.

    Raises:
        RecipeError: not of this form, an unknown name, or a value of another type.
    """
    given: dict[str, Any] = {}
    for text in texts:
        name, eq, raw = text.partition("=")
        if not eq or name not in OVERRIDES:
            near = difflib.get_close_matches(name, OVERRIDES, n=1)
            raise RecipeError(
                f"{text!r} is no field=value that convert knows", mend=f"did you mean {near[0]}=...?" if near else f"known: {', '.join(OVERRIDES)}"
            )
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError:
            value = raw
        given[name] = _typed(value, OVERRIDES[name][0], text, RecipeError)
    return given


@dataclass
class Fields:
    """A config.json with what the user added.

    Attributes:
        where: the file; begins each error.
        given: overrides by name.
        notes: rules that were applied because file and user were silent.
    """

    data: dict[str, Any]
    where: str
    given: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    _asked: set[str] = field(default_factory=set)
    _taken: set[str] = field(default_factory=lambda: {"ignore"})

    def declared(self, kind: type, *places: str) -> Any:
        """The value at one or several dotted places, which must agree; None where the file is silent.

        Raises:
            CheckpointError: two places contradict each other, or a value has another type.
        """
        found = {}
        for place in places:
            here: Any = self.data
            for part in place.split("."):
                here = here.get(part) if isinstance(here, dict) else None
            self._asked.add(place)
            if here is not None:
                found[place] = _typed(here, kind, f"{self.where}: {place}", CheckpointError)
        values = list(found.items())
        for name, value in values[1:]:
            if value != values[0][1]:
                raise CheckpointError(f"{self.where}: {values[0][0]} is {values[0][1]!r}, {name} is {value!r}", mend="correct the one that is wrong")
        return values[0][1] if values else None

    def one(self, name: str, *places: str, rule: Any = ABSENT, because: str = "") -> Any:
        """The value called `name`.

        Args:
            places: where the file may have it.
            rule: what the format means where it is absent; without a rule somebody must say it.
            because: noted when the rule is applied.

        Raises:
            CheckpointError: nobody says it, or file and user contradict each other.
        """
        kind = OVERRIDES[name][0]
        value = self.declared(kind, *places)
        if (given := self.override(name)) is not None:
            if value is not None and value != given:
                raise CheckpointError(f"{self.where}: {places[0]} is {value!r}, but {name}={given!r} was given", mend=f"leave out {name}, or correct the file")
            return given
        if value is not None:
            return value
        if rule is ABSENT:
            raise CheckpointError(f"{self.where} does not say {name} ({OVERRIDES[name][1]})", mend=f"say it as the drafter was trained: {name}=VALUE")
        if because:
            self.notes.append(because)
        return rule

    def must(self, name: str, *places: str, rule: Any, because: str) -> Any:
        """`rule`, which the layout knows no alternative to.

        Raises:
            CheckpointError: file or user say otherwise.
        """
        found = self.one(name, *places, rule=rule)
        if found != rule:
            raise CheckpointError(f"{self.where}: {name} is {found!r}, but {because} ({name}={rule!r})", mend="the file is of another layout than it declares")
        return rule

    def override(self, name: str) -> Any:
        """What the user gave, or None."""
        self._taken.add(name)
        return self.given.get(name)

    def use(self, *names: str) -> None:
        """These top-level fields are read by somebody else."""
        self._asked.update(names)

    def finish(self) -> None:
        """Refuse what nobody asked for.

        Raises:
            CheckpointError: a field of the file that the layout does not have.
            RecipeError: an override that the layout has no use for.
        """
        unused = sorted(self.given.keys() - self._taken)
        if unused:
            raise RecipeError(f"{unused[0]}={self.given[unused[0]]!r} was given, but this checkpoint leaves no such choice", mend=f"leave out {unused[0]}")
        known = self._asked | HARMLESS | set(map(str, self.given.get("ignore", ())))
        groups = {place.split(".")[0] for place in self._asked if "." in place}
        for name, value in self.data.items():
            inner = {f"{name}.{k}": v for k, v in value.items()} if name in groups and isinstance(value, dict) else {name: value}
            for place, v in inner.items():
                if place not in known and v is not None:
                    raise CheckpointError(
                        f"{self.where}: {place} is {v!r}, a field that Firesteel does not know here",
                        mend=f"if it does not change the network: ignore=[{place}]",
                    )


def _typed(value: Any, kind: type, what: str, error: type[CheckpointError] | type[RecipeError]) -> Any:
    """The value as `kind` (lists of numbers become tuples); strict: 1 is not true, and "3" is no number."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is list and isinstance(value, list | tuple) and all(isinstance(v, int | str) and not isinstance(v, bool) for v in value):
        return tuple(value)
    if type(value) is kind and kind is not list:
        return value
    raise error(f"{what} is {value!r}, not {_INTS if kind is list else kind.__name__}")
