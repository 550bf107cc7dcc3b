"""Reads the arguments of a recipe from a file, from the command line, or from both."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from arguments import RecipeError
from transformers import HfArgumentParser


__all__ = [
    "ParsedArguments",
    "check_file_keys",
    "given_arguments",
    "parse_arguments",
    "parse_own_arguments",
    "read_argument_file",
    "split_file",
]

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
# Names the files that a file of arguments builds on.
EXTENDS = "extends"
# Mappings of which a later file changes entries; any other value it replaces as a whole.
JOINED = ("config_overrides",)
# What the command line names replaces what a file says of the same thing in other words.
REPLACES = {
    "train_file": ["validation_file", "dataset_name", "dataset_config_name"],
    "dataset_name": ["train_file", "validation_file", "dataset_config_name"],
    "model_type": ["config_name", "config_overrides"],
    "config_name": ["model_type", "config_overrides"],
    "num_train_epochs": ["max_steps"],
}


@dataclasses.dataclass
class ParsedArguments:
    """
    What [`parse_arguments`] read.

    Attributes:
        filled (`tuple`): The dataclasses, in the order asked for.
        used_defaults (`dict`): The recipe's defaults that were used.
        given (`set[str]`): Names of the arguments that the file or the command line gave.
    """

    filled: tuple[Any, ...]
    used_defaults: dict[str, Any]
    given: set[str]

    def changed(self) -> dict[str, Any]:
        """
        Arguments that differ from the defaults of their dataclasses, whoever set them.

        Returns:
            `dict`: name to a JSON value; tokens are replaced by their names.
        """
        changed: dict[str, Any] = {}
        for values in self.filled:
            shown = values.to_dict() if hasattr(values, "to_dict") else dataclasses.asdict(values)
            for field in dataclasses.fields(values):
                default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
                named = field.name in self.given or field.name in self.used_defaults
                if named and field.name in shown and shown[field.name] != default:
                    changed[field.name] = shown[field.name]
        return changed


def parse_arguments(
    dataclass_types: Sequence[type],
    defaults: Mapping[str, Any],
    argv: Sequence[str],
    *,
    unless_given: Mapping[str, Iterable[str]] | None = None,
) -> ParsedArguments:
    """
    Reads the arguments of a recipe from one YAML or JSON file, from the command line, or from both (the command line
    wins: `--train_file` also over a `dataset_name` of the file, `--model_type` also over its `config_overrides`).

    A file may build on others: `extends: [parts/base.yaml, parts/data.yaml]`, paths beside it. A later one wins over
    an earlier one and the file itself over all of them; the entries of their `config_overrides` are joined.

    Args:
        dataclass_types (sequence of `type`):
            Dataclasses to fill, in the order in which they are returned.
        defaults (mapping):
            The recipe's own defaults, for flags that neither the file nor the command line gives.
        argv (sequence of `str`):
            Words of the command line, without the program. The first may be the path of a file.
        unless_given (mapping of `str` to names, *optional*):
            `{"max_steps": ["num_train_epochs"]}` drops the recipe's default of `max_steps` where the user gave
            `num_train_epochs`, so that a default never overrules a wish.

    Returns:
        `ParsedArguments`: the filled dataclasses, the recipe's defaults that were used, and what was given.

    Raises:
        RecipeError: for a file that is missing, unreadable or holds unknown keys, for an argument that no dataclass
            knows, and for a value that a dataclass rejects.
    """
    from_file, words = split_file(argv)
    check_file_keys(from_file, dataclass_types)
    parser = _parser(dataclass_types)
    on_command_line = set(given_arguments(dataclass_types, words)[0])
    replaced = {other for name in on_command_line for other in REPLACES.get(name, ())}
    from_file = {name: value for name, value in from_file.items() if name not in replaced}
    given = set(from_file) | on_command_line
    used = {name: value for name, value in defaults.items() if name not in given}
    for name, others in (unless_given or {}).items():
        if given & set(others):
            used.pop(name, None)

    # Strings among the defaults go through the type of their flag like words of the command line do: a YAML `1e-3`,
    # which YAML reads as a string, is a number here.
    parser.set_defaults(**used, **from_file)
    try:
        filled = parser.parse_args_into_dataclasses(args=words, look_for_args_file=False)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return ParsedArguments(tuple(filled), used, given)


def _parser(dataclass_types: Sequence[Any], add_help: bool = True) -> HfArgumentParser:
    # argparse would let flags be shortened; a command that is kept in scripts must not change its meaning when a
    # longer flag with the same beginning appears.
    return HfArgumentParser(list(dataclass_types), allow_abbrev=False, add_help=add_help)


def parse_own_arguments(dataclass_type: Any, argv: Sequence[str]) -> tuple[Any, list[str]]:
    """
    Reads the arguments of a program that hands the others on to a recipe.

    Args:
        dataclass_type (`type`):
            Dataclass to fill.
        argv (sequence of `str`):
            Words of the command line, without the program.

    Returns:
        `tuple`: the filled dataclass, and the words that it does not know, in their order.

    Raises:
        RecipeError: for a value that the dataclass rejects.
    """
    filled, rest = _parser([dataclass_type]).parse_args_into_dataclasses(
        args=list(argv), look_for_args_file=False, return_remaining_strings=True
    )
    return filled, list(rest)


def split_file(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """
    Reads the file of arguments that a command line may begin with.

    Args:
        argv (sequence of `str`):
            Words of the command line, without the program.

    Returns:
        `tuple`: what the file says, by name, and the other words.

    Raises:
        RecipeError: see [`read_argument_file`].
    """
    words = list(argv)
    if words and words[0].lower().endswith(CONFIG_SUFFIXES) and not words[0].startswith("-"):
        return read_argument_file(Path(words.pop(0))), words
    return {}, words


def read_argument_file(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """
    Reads a file of arguments, joined with the files that it extends.

    Args:
        path (`Path`):
            A YAML or JSON file.
        extended_by (`tuple[Path, ...]`, *optional*):
            The files that led here, each extending the next.

    Returns:
        `dict`: name to value.

    Raises:
        RecipeError: if it is missing, unreadable, no mapping, or extends itself.
    """
    path = path.resolve() if extended_by else path
    if not path.is_file():
        by = f", which {str(extended_by[-1])!r} extends," if extended_by else ""
        raise RecipeError(f"argument file {str(path)!r}{by} does not exist (working folder: {os.getcwd()!r}).")
    if path.resolve() in [other.resolve() for other in extended_by]:
        raise RecipeError(
            f"argument file {str(path)!r} extends itself: {' -> '.join(map(str, [*extended_by, path]))}."
        )
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"argument file {str(path)!r} cannot be read: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise RecipeError(f"argument file {str(path)!r} holds a {type(content).__name__}, not a mapping of arguments.")
    bases = content.pop(EXTENDS, [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise RecipeError(f"argument file {str(path)!r}: {EXTENDS} must be a path or a list of paths, not {bases!r}.")
    joined: dict[str, Any] = {}
    for part in [*(read_argument_file(path.parent / base, (*extended_by, path)) for base in bases), content]:
        for name, value in part.items():
            both = name in JOINED and isinstance(joined.get(name), dict) and isinstance(value, dict)
            joined[name] = {**joined[name], **value} if both else value
    return joined


def check_file_keys(content: Mapping[str, Any], dataclass_types: Sequence[type]) -> None:
    """
    Checks what a file of arguments holds.

    Args:
        content (mapping):
            As [`read_argument_file`] returned it.
        dataclass_types (sequence of `type`):
            Dataclasses to fill.

    Raises:
        RecipeError: for names that no dataclass knows, and words that YAML reads as booleans.
    """
    hints: dict[str, Any] = {}
    for dataclass_type in dataclass_types:
        types = typing.get_type_hints(dataclass_type)
        hints.update({field.name: types[field.name] for field in dataclasses.fields(dataclass_type) if field.init})
    unknown = sorted(str(key) for key in content if key not in hints)
    if unknown:
        raise RecipeError(f"the argument file holds unknown keys: {', '.join(unknown)}.")
    for name, value in content.items():
        # YAML 1.1 reads the bare words no, off, yes and on as booleans: `eval_strategy: no` arrives as False.
        accepted = typing.get_args(hints[name]) or (hints[name],)
        if isinstance(value, bool) and bool not in accepted:
            raise RecipeError(
                f"{name}: {value} in the argument file is a boolean, which {name} does not take. YAML reads the words "
                f"no, off, yes and on so: put the word in quotes."
            )


def given_arguments(dataclass_types: Sequence[type], words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """
    Reads what a command line gives, without any defaults.

    Args:
        dataclass_types (sequence of `type`):
            Dataclasses that say what there is.
        words (sequence of `str`):
            The command line, without a file of arguments.

    Returns:
        `tuple`: the values by name, and the words that no dataclass knows.
    """
    # Without --help, which is to show the defaults that this parser suppresses.
    parser = _parser(dataclass_types, add_help=False)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        action.required = False
    namespace, unknown = parser.parse_known_args(list(words))
    return vars(namespace), unknown
