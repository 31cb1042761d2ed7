"""From a YAML file to a RunConfig: shorthands, paths, overrides, validation, and errors with their place.

Defaults < YAML < `key.path=value`. Relative paths in the file are relative to the file, those in overrides to the
working directory.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from lockstep.config.algorithm import KINDS, SHORT_KINDS, expand_algorithm
from lockstep.config.data import PARTS, is_local
from lockstep.config.launch import FORMS, LAUNCH_KINDS, expand_launch
from lockstep.config.other_tools import OTHER_TOOLS_KEYS, explain_other_tools
from lockstep.config.parallel import Degrees, expand_parallel
from lockstep.config.renames import RENAMED_KEYS, rename_keys
from lockstep.config.schema import ConfigError
from lockstep.config.sections import RunConfig
from lockstep.config.yaml_text import FILE_BOUNDS, Bounds, load_value, read_yaml

# The sections that are one of some kinds: those, and the short names that stand for one.
_KINDS_OF: dict[str, tuple[Mapping[str, type[BaseModel]], Collection[str]]] = {
    "algorithm": (KINDS, SHORT_KINDS),
    "launch": (LAUNCH_KINDS, ()),
}
_MAX_SHOWN = 80  # characters of a key or a value that an error repeats
_MAX_PROBLEMS = 20


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override, resolve paths, validate. Raises ConfigError with file:line where there is one."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    return parse_config(text, source=str(path), directory=path.resolve().parent, overrides=overrides)


def parse_config(
    text: str,
    *,
    source: str = "<config>",
    directory: Path | None = None,
    overrides: Sequence[str] = (),
    bounds: Bounds = FILE_BOUNDS,
) -> RunConfig:
    tree, lines = read_yaml(text, source, bounds)
    places = {key: f"{source}:{line}" for key, line in lines.items()}
    if tree is None:
        raise ConfigError(f"{source} is empty: it needs at least model and data.train")
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected sections (model:, data:, ...), found {type(tree).__name__}")
    return resolve_config(tree, source=source, places=places, directory=directory, overrides=overrides)


def resolve_config(
    tree: dict[str, Any],
    *,
    source: str = "<config>",
    places: Mapping[str, str] | None = None,
    directory: Path | None = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Shorthands, paths, overrides, validation. `places` says where each key was written."""
    tree = copy.deepcopy(tree)
    places = dict(places or {})
    for key in [key for key, value in tree.items() if value is None and key != "lora"]:
        raise ConfigError(f"{_place_of(source, places, key)}: {key} is empty: give it a value, or leave it out")
    _expand_short_forms(tree)
    _resolve_paths(tree, directory or Path.cwd())
    changes: dict[str, Any] = {}
    for override in overrides:
        _apply_override(changes, override)
    _expand_short_forms(changes)
    _resolve_paths(changes, Path.cwd())
    _use_current_names(tree, source, places)
    for override in overrides:
        parts = override.partition("=")[0].split(".")
        for depth in range(len(parts), 0, -1):
            places.setdefault(".".join(parts[:depth]), f"override {override!r}")
        places[".".join(parts)] = f"override {override!r}"
    _use_current_names(changes, source, places)
    _leave_kind(tree, changes)
    _leave_auto(tree, changes)
    merge_settings(tree, changes)
    return validate_config(tree, source=source, places=places)


def validate_config(
    tree: Mapping[str, object], *, source: str = "<config>", places: Mapping[str, str] | None = None
) -> RunConfig:
    places = places or {}
    tree = dict(tree)
    if "launch" in tree:
        tree["launch"] = expand_launch(tree["launch"])
    if "algorithm" in tree:
        try:
            tree["algorithm"] = expand_algorithm(tree["algorithm"])
        except ValueError as error:
            raise ConfigError(f"{_place_of(source, places, 'algorithm.loss')}: {error}") from error
    _refuse_unknown_keys(tree, RunConfig, "", source, places)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, source, places)) from error


def check_config(config: RunConfig, *, launch_kinds: Collection[str] = tuple(LAUNCH_KINDS)) -> RunConfig:
    """The one check before a run is started or planned, for the command, Python, the service and its APIs alike.

    A RunConfig is sound in itself; this adds what depends on where it runs: `launch_kinds` are those that the caller
    can start. Returns the configuration.
    """
    launch = config.launch
    if launch.kind == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError("launch.kind ray needs Ray: pip install 'lockstep[ray]'")
    if launch.kind == "slurm" and config.cluster and importlib.util.find_spec("ray") is None:
        raise ConfigError("the pools of cluster need Ray on the nodes of the job: pip install 'lockstep[ray]'")
    if launch.kind == "kubernetes" and importlib.util.find_spec("kubernetes") is None:
        raise ConfigError("launch.kind kubernetes needs its client: pip install 'lockstep[kubernetes]'")
    if launch.kind not in launch_kinds:
        kinds = " or ".join(launch_kinds)
        raise ConfigError(f"launch.kind is {launch.kind}, and runs are started here with kind {kinds}: set that")
    config.parallel.degrees(launch.procs)
    return config


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key, sections included; not those inside the entries of a list."""
    keys: dict[str, None] = {}
    for name, info in section.model_fields.items():
        keys[prefix + name] = None
        for child in sections_of(info.annotation):
            keys |= dict.fromkeys(known_keys(child, f"{prefix}{name}."))
    return list(keys)


def sections_of(annotation: object) -> list[type[BaseModel]]:
    """The section that a field holds, also where it may be left out; several where it is one of some kinds."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    if get_origin(annotation) in (tuple, dict):
        return []
    return [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]


def _section_of(dotted: str, annotation: object, value: object, place: str) -> type[BaseModel] | None:
    """The one whose settings these are: of several kinds the one that is named."""
    found = sections_of(annotation)
    if len(found) < 2 or not isinstance(value, Mapping):
        return found[0] if found else None
    kinds, short = _KINDS_OF[dotted]
    kind = value["kind"]  # parse_config has put it there
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{place}: unknown {dotted}.kind {kind!r}; choose one of {', '.join([*kinds, *short])}")
    return kinds[kind]


def _entry_of(annotation: Any) -> type[BaseModel] | None:
    """The section that each entry of a list is."""
    return next(iter(sections_of(annotation.__args__[0])), None) if get_origin(annotation) is tuple else None


def _refuse_unknown_keys(
    tree: Mapping[str, object], section: type[BaseModel], prefix: str, source: str, places: Mapping[str, str]
) -> None:
    known = section.model_fields
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        info = known.get(str(key))
        if info is None:
            others = [] if prefix else [other for other in tree if other not in known]
            raise ConfigError(
                f"{_place_of(source, places, dotted)}: unknown key {_shorten(dotted)!r}; "
                f"{_suggest(dotted, section, prefix, others)}"
            )
        place = _place_of(source, places, f"{dotted}.kind")
        child, entry = _section_of(dotted, info.annotation, value, place), _entry_of(info.annotation)
        if child is not None and isinstance(value, Mapping):
            _refuse_unknown_keys(value, child, dotted + ".", source, places)
        if entry is not None:
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Mapping):
                    _refuse_unknown_keys(item, entry, dotted + ".", source, places)


def _suggest(dotted: str, section: type[BaseModel], prefix: str, others: Sequence[str]) -> str:
    """`others`: every unknown key beside it, itself included, where these may be another tool's."""
    leaf = dotted.rsplit(".", 1)[-1]
    foreign = explain_other_tools(others)
    if leaf in OTHER_TOOLS_KEYS:
        return foreign or f"it is {OTHER_TOOLS_KEYS[leaf]} here"
    return "; ".join(filter(None, (_suggest_near(leaf, section, prefix), foreign)))


def _suggest_near(leaf: str, section: type[BaseModel], prefix: str) -> str:
    if len(leaf) > _MAX_SHOWN:  # the search for the nearest name takes the square of it
        return "no key is as long"
    siblings = list(section.model_fields)
    kinds = next((kinds for kinds, _ in _KINDS_OF.values() if section in kinds.values()), None)
    if kinds is not None:
        own = next(kind for kind, known in kinds.items() if known is section)
        others = [kind for kind, known in kinds.items() if leaf in known.model_fields]
        if others:
            return f"it is a setting of kind {' and '.join(others)}, and this is {own}: set {prefix}kind, or remove it"
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    elsewhere = [k for k in known_keys() if k.rsplit(".", 1)[-1] == leaf]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"{prefix.rstrip('.') or 'the top level'} knows {', '.join(siblings)}"


def _explain(error: ValidationError, source: str, places: Mapping[str, str]) -> str:
    """One sentence per problem; union members that did not match are folded into one."""
    seen: dict[str, str] = {}
    known = set(known_keys())
    for problem in error.errors(include_url=False)[:_MAX_PROBLEMS]:
        parts = [str(p) for p in problem["loc"]]
        if len(parts) > 1 and parts[0] in _KINDS_OF and parts[1] in _KINDS_OF[parts[0]][0]:
            del parts[1]  # which of the kinds it was read as
        missing = ".".join(parts)
        while parts and ".".join(parts) not in known:
            parts.pop()
        dotted = ".".join(parts)
        if problem["type"] == "missing":
            seen.setdefault(missing, f"{_place_of(source, places, dotted)}: {missing} is missing")
            continue
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "string_pattern_mismatch":
            message = FORMS.get(problem["ctx"]["pattern"], message)
        given = problem.get("input")
        given = _shorten(given) if isinstance(given, str) else given
        shown = f" (given: {given!r})" if isinstance(given, (str, int, float, bool)) else ""
        text = f"{dotted or 'configuration'}: {message}{shown}"
        named = message.split(" ", 1)[0].rstrip(":")
        if named in known:  # the sentence itself says which key it is about
            dotted, text = named, message
        if dotted in seen:
            seen[dotted] = seen[dotted].replace(shown, "") + f", or: {message}{shown}"
        else:
            seen[dotted] = f"{_place_of(source, places, dotted)}: {text}"
    if error.error_count() > _MAX_PROBLEMS:
        seen["more"] = f"and {error.error_count() - _MAX_PROBLEMS} problems more"
    return "; ".join(seen.values())


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _expand_short_forms(tree: dict[str, object]) -> None:
    """`model: NAME` is short for `model: {path: NAME}`, `lora: true` for `lora: {}`, `algorithm: dpo` for its kind,
    `parallel: auto` for a layout that is yet to be chosen."""
    if "parallel" in tree:
        tree["parallel"] = expand_parallel(tree["parallel"])
    if isinstance(tree.get("algorithm"), str):
        tree["algorithm"] = {"kind": tree["algorithm"]}
    if isinstance(tree.get("model"), str):
        tree["model"] = {"path": tree["model"]}
    if tree.get("lora") is True:
        tree["lora"] = {}
    elif tree.get("lora") is False:
        tree["lora"] = None


def _use_current_names(tree: dict[str, object], source: str, places: dict[str, str]) -> None:
    """Before files and overrides are merged: one may have the old name of a key and the other the new one."""
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, dict):
        return
    try:
        tree["algorithm"] = rename_keys(algorithm, lambda key: _place_of(source, places, key))
    except ValueError as error:
        raise ConfigError(f"{_place_of(source, places, str(error).split()[0])}: {error}") from error
    for old in RENAMED_KEYS.keys() & algorithm.keys():
        places[f"algorithm.{RENAMED_KEYS[old]}"] = _place_of(source, places, f"algorithm.{old}")


def _leave_kind(tree: dict[str, object], changes: Mapping[str, object]) -> None:
    """`launch.kind=local` in an override: what the file says for its own kind alone is not meant for that one."""
    launch, change = tree.get("launch"), changes.get("launch")
    if not isinstance(launch, dict) or not isinstance(change, dict):
        return
    before, after = (LAUNCH_KINDS.get(str(kind)) for kind in (launch.get("kind", "local"), change.get("kind")))
    if before is not None and after is not None and before is not after:
        for key in before.model_fields.keys() - after.model_fields.keys():
            launch.pop(key, None)


def _leave_auto(tree: Mapping[str, object], changes: Mapping[str, object]) -> None:
    """`parallel.tensor=2` in an override: who gives a degree no longer has the layout chosen."""
    parallel, change = tree.get("parallel"), changes.get("parallel")
    if not (isinstance(parallel, dict) and isinstance(change, dict)):
        return
    if parallel.get("auto") and "auto" not in change and change.keys() & set(Degrees._fields):
        change["auto"] = False


def _resolve_paths(tree: dict[str, object], directory: Path) -> None:
    """Make file paths absolute."""
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        model["path"] = _resolve_model(model["path"], directory)
    algorithm = tree.get("algorithm")
    if isinstance(algorithm, dict) and isinstance(algorithm.get("reference_model"), str):
        algorithm["reference_model"] = _resolve_model(algorithm["reference_model"], directory)
    data = tree.get("data")
    if isinstance(data, dict):
        for part in PARTS:
            if part in data:
                data[part] = _resolve_sources(data[part], directory)
        template = data.get("chat_template")
        if isinstance(template, str) and template not in ("auto", "none"):
            data["chat_template"] = _absolute(template, directory)
        if isinstance(data.get("cache_dir"), str):
            data["cache_dir"] = _absolute(data["cache_dir"], directory)
    parallel = tree.get("parallel")
    if isinstance(parallel, dict) and isinstance(parallel.get("deepspeed_config"), str):
        parallel["deepspeed_config"] = _absolute(parallel["deepspeed_config"], directory)


def _resolve_model(path: str, directory: Path) -> str:
    """A path that names nothing on disk is a Hub id."""
    local = directory / Path(path).expanduser()
    is_path = local.exists() or path.startswith((".", "/", "~")) or path.endswith(".gguf")
    return str(local.resolve()) if is_path else path


def _resolve_sources(value: object, directory: Path) -> object:
    if isinstance(value, str):
        return _absolute(value, directory) if is_local(value, directory) else value
    if isinstance(value, list):
        return [_resolve_sources(source, directory) for source in value]
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        return {**value, "path": _resolve_sources(value["path"], directory)}
    return value


def _absolute(path: str, directory: Path) -> str:
    return str((directory / Path(path).expanduser()).resolve())


# --- YAML trees -------------------------------------------------------------------------------------------------------


def _place_of(source: str, places: Mapping[str, str], dotted: str) -> str:
    parts = dotted.split(".")
    while parts:
        place = places.get(".".join(parts))
        if place is not None:
            return place
        parts.pop()
    return source


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, raw = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form key.path=value")
    try:
        value = load_value(raw)
    except ConfigError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {parent} was already given a plain value")
    tree[leaf] = value


def merge_settings(tree: dict[str, Any], changes: Mapping[str, object]) -> None:
    """Section by section; `changes` wins, and is copied."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            merge_settings(tree[key], value)
        else:
            tree[key] = copy.deepcopy(value)
