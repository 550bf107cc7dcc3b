"""From the names in a checkpoint's files to its attention layers."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..attention import AttentionLayer, layouts, survey_modules
from .adapter import PREFIX, Adapter, read_adapter
from .completeness import beyond_the_model, require_complete
from .forms import Form, form_of
from .layers import CheckpointLayer, Part, needs_of
from .names import Place, places, split_key
from .reading import Need, Reader
from .sections import Section, read_config, section_of
from .skeleton import Holder, add_borrowers, attention_modules, is_norm, is_scale, join, query_key_holders
from .sources import open_source
from .weights import StoredTensor, WeightFiles, read_json


__all__ = ["CheckpointSurvey", "find_checkpoint_layers"]

_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True, eq=False)
class CheckpointSurvey:
    """
    What a checkpoint holds, before any weight is read.

    Attributes:
        layers (`list[CheckpointLayer]`): Its attention layers, in the order of [`find_attention_layers`].
        left_out (`list[str]`): A line on each kind of module that looks like attention and matches no layout.
        config (`PreTrainedConfig`): Its config.
        source (`str`): Where it was found.
        num_parameters (`int` or `None`): Parameters of the whole model, `None` where nothing that was read says.
        reader (`Reader`): What reads its tensors.
    """

    layers: list[CheckpointLayer]
    left_out: list[str]
    config: PreTrainedConfig
    source: str
    num_parameters: int | None
    reader: Reader


def find_checkpoint_layers(
    path_or_repo_id: str | os.PathLike,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    dtype: torch.dtype | None = None,
) -> CheckpointSurvey:
    """
    Finds the attention layers of a checkpoint by `config.json` and the names and shapes of its tensors, as
    [`find_attention_layers`] finds those of a live model. See [`score_checkpoint`] for the arguments and errors.

    Returns:
        [`CheckpointSurvey`]
    """
    source, file = open_source(path_or_repo_id, revision=revision, subfolder=subfolder, token=token)
    files = WeightFiles(source, file)
    adapter: tuple[WeightFiles, dict[str, Any]] | None = None
    if _ADAPTER in source.files() and file is None and not files.is_adapter:
        raise ValueError(
            f"{source.name} has {_ADAPTER} but no adapter_model.safetensors or .bin. Give the path of {files.entry} "
            "to score it without the adapter."
        )
    if files.is_adapter:
        adapter = files, (settings := read_json(source, _ADAPTER))
        base = settings.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise ValueError(
                f"{source.name}: {_ADAPTER} does not say which model it adapts (base_model_name_or_path)."
            )
        source, file = open_source(base, revision=settings.get("revision") or None, token=token)
        files = WeightFiles(source, file)
        if files.is_adapter:
            raise ValueError(
                f"{adapter[0].source.name} adapts {base}, which is an adapter itself; merge them (`merge_and_unload`)."
            )
    if _CONFIG not in source.files():
        raise ValueError(
            f"{source.name} has no {_CONFIG}, which says how many heads W_q and W_k are split into. Put it beside the "
            "weights, or give the folder that holds both."
        )
    config = read_config(source, _CONFIG)
    return _survey(files, config, adapter, dtype)


def _survey(
    files: WeightFiles,
    config: PreTrainedConfig,
    adapter: tuple[WeightFiles, dict[str, Any]] | None,
    dtype: torch.dtype | None,
) -> CheckpointSurvey:
    where = files.source.name if adapter is None else f"{adapter[0].source.name} on {files.source.name}"
    reader = Reader(where)
    parameters = {name for layout in layouts() for name in layout.parameters}
    keys = _keys_by_module(places(files.files, config), parameters, where)
    beyond = beyond_the_model(keys, config)
    for path in {path for paths in beyond.values() for path in paths}:
        del keys[path]
    attention = query_key_holders(set(keys))
    add_borrowers(attention, set(keys), config)
    try:
        require_complete(keys, attention, config)
    except ValueError as error:
        raise ValueError(f"{where}: {files.entry} has {error}") from error
    inside = {path for paths in attention.values() for path in paths}
    stored = files.describe(key for path in inside for key, _ in keys[path].values())
    parts = {
        path: _part(path, {leaf: stored[key].rows(*rows) for leaf, (key, rows) in keys[path].items()}, config)
        for path in sorted(inside)
    }
    if adapter is not None:
        adapted = _adapter(*adapter, config).parts(parts, keys)
        parts |= {path: replace(parts[path], adapter=part) for path, part in adapted.items()}
    holders: dict[str, Holder | None] = dict.fromkeys(path for path, held in keys.items() if "" not in held)
    holders |= {path: _holder(part, reader) for path, part in parts.items()}
    survey = survey_modules(attention_modules(holders, attention, config), where)
    widths = {layer.input_width("query") for layer in survey.layers}
    layers = [_layer(layer, parts, config, widths, reader, dtype) for layer in survey.layers]
    _warn_of_norms(layers, config)
    left_out = survey.left_out + [f"  {name}: predicts tokens after the next one" for name in beyond]
    return CheckpointSurvey(layers, left_out, config, where, files.num_parameters, reader)


_Rows = tuple[int, int, int]  # which of how many equal parts of a tensor's rows (see `Place`)


def _keys_by_module(
    found: Mapping[str, list[Place]], parameters: set[str], where: str
) -> dict[str, dict[str, tuple[str, _Rows]]]:
    """Keys in files, by path of the module that the tensor belongs to and its name there."""
    keys: dict[str, dict[str, tuple[str, _Rows]]] = {}
    for key, name, *rows in ((key, *place) for key, targets in found.items() for place in targets):
        path, leaf = split_key(name, parameters)
        held = keys.setdefault(path, {})
        if leaf == "bias":
            continue  # no part of W_qk, and perhaps in a file of its own
        if leaf in held:
            raise ValueError(f"{where}: {held[leaf][0]!r} and {key!r} are both {name!r} in the model.")
        held[leaf] = (key, (rows[0], rows[1], rows[2]))
    return keys


def _warn_of_norms(layers: list[CheckpointLayer], config: PreTrainedConfig) -> None:
    for layer in layers:
        kind = section_of(config, layer.name).model_type
        if kind not in CONFIG_MAPPING and any(part.form is None for part in layer.parts):
            warnings.warn(
                f"Transformers does not know the model type {kind!r} of {layer.name!r}, so whether its query and key "
                "norms multiply by their weight w or by 1 + w cannot be told; w is taken.",
                RuntimeWarning,
                stacklevel=4,
            )
            return


def _adapter(files: WeightFiles, settings: dict[str, Any], config: PreTrainedConfig) -> Adapter:
    # Adapters that are older than Transformers' new names have the old ones, as checkpoints do.
    paths = {key: key.removeprefix(PREFIX) for key in files.files}
    stored = files.describe(files.files)
    found = places(paths.values(), config)
    tensors = {place.name: stored[key].rows(*place[1:]) for key, path in paths.items() for place in found[path]}
    return read_adapter(settings, tensors)


def _part(path: str, stored: Mapping[str, StoredTensor], config: PreTrainedConfig) -> Part:
    quantization: Any = getattr(config, "quantization_config", None) or {}
    quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
    if is_parameter := "" in stored:
        stored = {"weight": stored[""]}
    # A convolution of one token is a linear map; so are parameters with one matrix a head.
    stored = {
        leaf: tensor.as_matrix() if len(tensor.shape) > 2 and (is_parameter or prod(tensor.shape[2:]) == 1) else tensor
        for leaf, tensor in stored.items()
    }
    form = None if is_norm(path) or is_scale(path) else form_of(stored, quantization)
    return Part(path, stored, form, is_parameter)


def _holder(part: Part, reader: Reader) -> Holder:
    if part.form is None:
        weight = part.stored.get("weight")
        return Holder(weight.shape if weight else (0,), weight.dtype if weight else torch.float32, part.is_parameter)
    shape = part.form.shape(_read(part, part.form, reader)) if part.form.problem is None else None
    # A form that cannot be had keeps its place, so that the layer is found and the error can name it.
    return Holder(shape or (0, 0), torch.float32, part.is_parameter)


def _read(part: Part, form: Form, reader: Reader) -> dict[str, torch.Tensor]:
    needs = [Need(part.stored[name]) for name in form.needed_for_shape]
    if not needs:
        return {}
    read = reader.take(needs)
    return {name: read[part.stored[name]] for name in form.needed_for_shape}


def _layer(
    found: AttentionLayer,
    parts: Mapping[str, Part],
    config: PreTrainedConfig,
    widths: set[int],
    reader: Reader,
    dtype: torch.dtype | None,
) -> CheckpointLayer:
    layout = found.layout
    paths = [path for _, path in found.paths()] + [join(found.name, name) for name in layout.parameters]
    for owner, alternatives in found.norms():
        paths += [path for name in alternatives if (path := join(owner, name)) in parts][:1]
    own = tuple(parts[path] for path in dict.fromkeys(paths))
    found = replace(found, verified=found.verified and not _has_own_code(config))
    problem = next((part.form.problem for part in own if part.form and part.form.problem), None)
    section = section_of(config, found.name, {found.input_width("query")})
    if problem is None and section.problem is not None:
        problem = f"{found.name!r}: {section.problem}."
    if problem is None and layout.file_types is not None and section.model_type not in layout.file_types:
        problem = (
            f"{found.name!r}: layout {layout.name!r} of model type {section.model_type!r} needs what only the live "
            "model knows. Load the model and use `score_model`."
        )
    problem = problem or found.problem or _disagreement(found, own[0], section, widths)
    needs: list[Need] = []
    for part in own if problem is None else ():
        inside = [piece for piece, path in found.paths() if path == part.path]
        needs += needs_of(part, inside, found.heads)
    return CheckpointLayer(found, own, tuple(needs), reader, dtype, problem)


def _has_own_code(config: PreTrainedConfig) -> bool:
    """Whether the model runs code of its repository, of which nothing is proven whatever its model type is called."""
    named = config.architectures or ()
    return bool(getattr(config, "auto_map", None)) and not any(name in dir(transformers) for name in named)


def _disagreement(found: AttentionLayer, query: Part, section: Section, widths: set[int]) -> str | None:
    """What the config says otherwise than the shapes."""
    if found.kind != "self" or section.per_layer or isinstance(found.layout.num_heads, int):
        return None
    heads, said = found.heads, section.hidden_sizes
    tensor = next(iter((*query.needed, *query.added)))
    place = f"{found.name!r} ({tensor.key} in {tensor.file})"
    if said and not widths & set(said):
        return f"{_CONFIG} says hidden_size={said[0]}, but by its shape {place} has {found.input_width('query')}."
    groups = section.num_key_value_heads
    # As many key heads as query heads are no doubt meant, whatever the config says of other modules.
    if groups is not None and heads.num_key_value_heads not in (groups, heads.num_attention_heads):
        return (
            f"{_CONFIG} says num_key_value_heads={groups}, but by its shape {place} has {heads.num_key_value_heads}."
        )
    rows = heads.num_attention_heads * heads.head_dim
    product = any(len(part.pieces) > 1 for part in (found.layout.query, found.layout.key))
    if section.head_dim is None and not product and said and found.input_width("query") in said and rows not in said:
        # Heads that do not fill the width are said to be so, or else counted in a way that is not known here.
        return (
            f"{_CONFIG} says {heads.num_attention_heads} heads and hidden_size={said[0]} but no head_dim, and {place} "
            f"has {rows} rows of queries: how many heads they are cannot be told."
        )
    return None
