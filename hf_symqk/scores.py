"""
W_qk scores of a whole model: layers × heads, summaries over layers, tables and files.

Shape legend: `D` model width, `H` query heads, `G` key/value heads, `r = H / G`, `E` head width.
"""

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from .attention import AttentionKind, AttentionLayer, LayerChoice, find_attention_layers, select_layers
from .bilinear import BilinearForm


__all__ = ["LayerScores", "QKScores", "head_forms", "layer_form", "score_model"]

METRICS = ("symmetry", "directionality", "frobenius_norm")
_QUANTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}


@dataclass(frozen=True)
class LayerScores:
    """
    Scores of one attention layer.

    Attributes:
        name (`str`): Dotted path of the attention module.
        stack (`str`), index (`int`): Stack (empty if the model has one) and position of the layer in it.
        kind (`str`): `"self"` or `"cross"`.
        layout (`str`): Entry of the layout table that it matched.
        num_heads (`int`), num_key_value_heads (`int`), head_dim (`int`): Head counts H and G, head width E.
        symmetry (`float`): Symmetry score of the layer form `Σ_h W_q^h W_k^g(h)ᵀ`, in [−1, 1] (1 symmetric).
        directionality (`float`): Directionality score of the layer form, in [−1, 1] (negative: columns dominate).
        frobenius_norm (`float`): Frobenius norm of the layer form.
        head_symmetry, head_directionality, head_frobenius_norm (`tuple[float, ...]`): The same of each head form, H
            values. NaN wherever a weight is not finite, or (symmetry) queries and keys have inputs of different width.
    """

    name: str
    stack: str
    index: int
    kind: str
    layout: str
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    symmetry: float
    directionality: float
    frobenius_norm: float
    head_symmetry: tuple[float, ...]
    head_directionality: tuple[float, ...]
    head_frobenius_norm: tuple[float, ...]


@dataclass(frozen=True)
class QKScores:
    """
    Scores of all chosen layers of a model, as [`score_model`] returns them.

    Attributes:
        layers (`tuple[LayerScores, ...]`): In the model's order.
        gamma (`float`): γ of the directionality score.
        model_type (`str` or `None`): `config.model_type` of the model.
    """

    layers: tuple[LayerScores, ...]
    gamma: float = 2.0
    model_type: str | None = None

    @property
    def stacks(self) -> list[str]:
        """Names of the stacks that the layers belong to, in the model's order."""
        return list(dict.fromkeys(layer.stack for layer in self.layers))

    def summary(self, stack: str | None = None) -> dict[str, dict[str, float]]:
        """
        Median and quartiles over layers, as the paper reports them.

        Args:
            stack (`str`, *optional*): Only the layers of this stack; all layers by default.

        Returns:
            `dict[str, dict[str, float]]`: `"q25"`, `"median"` and `"q75"` of `"symmetry"`, `"directionality"` and
            `"frobenius_norm"`. Layers whose value is NaN are left out; NaN if none remains.

        Raises:
            ValueError: if there is no such stack.
        """
        if stack is not None and stack not in self.stacks:
            raise ValueError(f"No stack named {stack!r}; there are {self.stacks}.")
        layers = [layer for layer in self.layers if stack is None or layer.stack == stack]
        values = {metric: pd.Series([getattr(layer, metric) for layer in layers], dtype=float) for metric in METRICS}
        return {
            metric: {name: float(series.quantile(level)) for name, level in _QUANTILES.items()}
            for metric, series in values.items()
        }

    def to_log(self, prefix: str = "qk") -> dict[str, float]:
        """
        Flat names and values for a logger: `qk/symmetry/median` (and `q25`, `q75`) over all layers and
        `qk/symmetry/layer_00` of each layer; the layers of a model with several stacks are under the stack's name,
        `qk/encoder/symmetry/layer_00`, and each stack has its own median. No name is the folder of another.

        Args:
            prefix (`str`, *optional*, defaults to `"qk"`): First part of each name.

        Returns:
            `dict[str, float]`: Python floats.
        """
        log = {
            f"{prefix}/{metric}/{name}": value for metric, row in self.summary().items() for name, value in row.items()
        }
        for stack in self.stacks:
            root = f"{prefix}/{stack}" if stack else prefix
            for metric, row in self.summary(stack).items() if stack else ():
                log.update({f"{root}/{metric}/{name}": value for name, value in row.items()})
            for layer in self.layers:
                if layer.stack == stack:
                    log.update(
                        {f"{root}/{metric}/layer_{layer.index:02d}": getattr(layer, metric) for metric in METRICS}
                    )
        return log

    def to_pandas(self, heads: bool = False) -> pd.DataFrame:
        """
        Table of the scores.

        Args:
            heads (`bool`, *optional*, defaults to `False`): One row per head instead of one per layer.

        Returns:
            `pandas.DataFrame`: Columns `stack`, `layer`, (`head`,) `symmetry`, `directionality`, `frobenius_norm`,
            `kind`,
            `num_heads`, `num_key_value_heads`, `head_dim`, `layout`, `name`.
        """
        rows = []
        for layer in self.layers:
            about = {name: getattr(layer, name) for name in _ABOUT}
            place = {"stack": layer.stack, "layer": layer.index}
            if heads:
                columns = {metric: getattr(layer, f"head_{metric}") for metric in METRICS}
                rows += [
                    {**place, "head": head, **{metric: column[head] for metric, column in columns.items()}, **about}
                    for head in range(layer.num_heads)
                ]
            else:
                rows.append({**place, **{metric: getattr(layer, metric) for metric in METRICS}, **about})
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, NaN as `None`; the content of [`~QKScores.to_json`]."""
        return _without_nan(asdict(self))

    def to_json(self, path: str | os.PathLike) -> None:
        """
        Writes the scores to a JSON file (NaN is written as `null`, which every JSON reader takes).

        Args:
            path (`str` or `os.PathLike`): File to write; an existing one is replaced.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "QKScores":
        """Inverse of [`~QKScores.to_dict`]."""
        layers = tuple(LayerScores(**_with_nan(layer)) for layer in values["layers"])
        return cls(layers=layers, gamma=values["gamma"], model_type=values["model_type"])

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> "QKScores":
        """
        Reads what [`~QKScores.to_json`] wrote.

        Args:
            path (`str` or `os.PathLike`): File to read.

        Returns:
            [`QKScores`]

        Raises:
            ValueError: if the file does not hold QKScores.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{os.fspath(path)!r} does not hold QKScores ({error}).") from error

    def __str__(self) -> str:
        table = self.to_pandas()[["stack", "layer", *METRICS, "num_heads", "num_key_value_heads"]]
        return table.to_string(index=False, float_format=lambda value: f"{value:.4f}")


_ABOUT = ("kind", "num_heads", "num_key_value_heads", "head_dim", "layout", "name")


def head_forms(w_q: Tensor, w_k: Tensor) -> BilinearForm:
    """
    The forms `W_q^h (W_k^g(h))ᵀ` of all heads, key head `g = h // (H / G)` (design: head form).

    Args:
        w_q (`torch.Tensor` of shape `(H, E, D)`): Query weight, split into heads.
        w_k (`torch.Tensor` of shape `(G, E, D)`): Key weight, split into heads; G divides H.

    Returns:
        [`BilinearForm`] of batch shape `(G, r)`: flattened, the order of the query heads. Views, no copies.
    """
    groups = w_k.shape[0]
    return BilinearForm(w_q.mT.unflatten(0, (groups, -1)), w_k.mT.unsqueeze(1))


def layer_form(w_q: Tensor, w_k: Tensor) -> BilinearForm:
    """
    The form of a layer, `Σ_h W_q^h (W_k^g(h))ᵀ`. With grouped keys the query heads of a group are summed first, which
    gives the same matrix at rank G·E instead of H·E.

    Args:
        w_q (`torch.Tensor` of shape `(H, E, D)`): Query weight, split into heads.
        w_k (`torch.Tensor` of shape `(G, E, D)`): Key weight, split into heads; G divides H.

    Returns:
        [`BilinearForm`] without batch dimensions.
    """
    if w_q.shape[0] != w_k.shape[0]:
        w_q = w_q.unflatten(0, (w_k.shape[0], -1)).sum(1, dtype=torch.promote_types(w_q.dtype, torch.float32))
    return BilinearForm(w_q.flatten(0, 1).mT, w_k.flatten(0, 1).mT)


def score_model(
    model: nn.Module, *, layers: LayerChoice | None = None, attention: AttentionKind = "self", gamma: float = 2.0
) -> QKScores:
    """
    Scores W_qk of every attention layer of a live model, on the model's device. The model is only read: neither its
    weights, gradients and mode nor the random state change.

    Not part of the scores: biases, rotary positions (scores are at offset 0), ALiBi and relative-position terms, and
    the data-dependent part of query and key norms (their learned gains are folded in).

    Args:
        model (`torch.nn.Module`):
            Any model whose attention the layout table knows.
        layers (`Sequence[int]` or `Mapping[str, Sequence[int]]`, *optional*):
            Indices of the layers to score, for every stack or per stack name; all by default.
        attention (`str`, *optional*, defaults to `"self"`):
            `"self"`, `"cross"` or `"all"`.
        gamma (`float`, *optional*, defaults to 2.0):
            γ of the directionality score.

    Returns:
        [`QKScores`]: One entry per layer. A layer with a weight that is not finite scores NaN and is named in a
        warning.

    Raises:
        ValueError: if no attention layer is found, or a layer or kind is asked for that the model does not have.

    Examples:

    ```python
    >>> from transformers import AutoModel, BertConfig
    >>> import hf_symqk

    >>> config = BertConfig(
    ...     hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99
    ... )
    >>> round(scores.summary()["symmetry"]["median"], 4)
    1.0
    >>> len(scores.layers), scores.layers[0].num_heads
    (2, 4)

    ```
    """
    chosen = select_layers(find_attention_layers(model), layers=layers, attention=attention)
    results = tuple(_score_layer(layer, gamma) for layer in chosen)
    undefined = [result.name for result in results if math.isnan(result.frobenius_norm)]
    if undefined:
        warnings.warn(
            f"W_qk scores are NaN in {len(undefined)} of {len(results)} layers, whose query or key weights are not "
            f"finite: {', '.join(undefined)}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return QKScores(results, gamma, getattr(getattr(model, "config", None), "model_type", None))


def _score_layer(layer: AttentionLayer, gamma: float) -> LayerScores:
    with layer.query_key_weights() as (w_q, w_k):
        whole = layer_form(w_q, w_k).scores(gamma)
        heads = head_forms(w_q, w_k).scores(gamma)
    measured: dict[str, Any] = {metric: getattr(whole, metric).item() for metric in METRICS}
    measured.update({f"head_{metric}": tuple(getattr(heads, metric).flatten().tolist()) for metric in METRICS})
    return LayerScores(
        name=layer.name,
        stack=layer.stack,
        index=layer.index,
        kind=layer.kind,
        layout=layer.layout.name,
        num_heads=layer.heads.num_attention_heads,
        num_key_value_heads=layer.heads.num_key_value_heads,
        head_dim=layer.heads.head_dim,
        **measured,
    )


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_nan(layer: Mapping[str, Any]) -> dict[str, Any]:
    restored = dict(layer)
    for field in fields(LayerScores):
        if field.name in METRICS:
            restored[field.name] = math.nan if layer[field.name] is None else layer[field.name]
        elif field.name.startswith("head_") and field.name != "head_dim":
            restored[field.name] = tuple(math.nan if value is None else value for value in layer[field.name])
    return restored
