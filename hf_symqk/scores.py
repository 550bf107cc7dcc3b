"""W_qk scores of a whole model: layers × heads, summaries over layers, tables and files."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd


__all__ = ["METRICS", "SPECTRAL_METRICS", "LayerScores", "QKScores"]

METRICS = ("symmetry", "directionality", "frobenius_norm")
# Measured only where asked for.
SPECTRAL_METRICS = (
    "positivity",
    "normalized_trace",
    "stable_rank",
    "effective_rank",
    "symmetric_energy",
    "skew_energy",
)
_QUANTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}


@dataclass(frozen=True)
class LayerScores:
    """
    Scores of one attention layer.

    Attributes:
        name (`str`): Dotted path of the attention module.
        stack (`str`), index (`int`): Stack (empty if the model has one) and position of the layer in it.
        kind (`str`): `"self"` or `"cross"`.
        role (`str` or `None`): `"encoder"` or `"decoder"`, its side of the model; `None` where neither path nor config
            says.
        causal (`bool` or `None`): Whether no token sees a later one. `None` for cross-attention, whose two streams
            have no common order, where neither path nor config says, and where the inputs decide (prefix language
            models).
        key_source (`str`): Name of the layer whose keys this one reads (W_k is then that layer's); empty if it makes
            its own.
        layout (`str`): Entry of the layout table that it matched; `"probed (interface)"`, `"probed (sdpa)"` or
            `"probed (matmul)"` where none did and W_q and W_k were caught there in the forward pass (see
            [`score_model`]); they then hold what the forward multiplies queries or keys by.
        num_heads (`int`), num_key_value_heads (`int`), head_dim (`int`): Head counts H and G, head width E.
        symmetry (`float`): Symmetry score of the layer form `Σ_h W_q^h W_k^g(h)ᵀ`, in [−1, 1] (1 symmetric).
        directionality (`float`): Directionality score of the layer form, in [−1, 1] (negative: columns dominate).
        frobenius_norm (`float`): Frobenius norm of the layer form.
        head_symmetry, head_directionality, head_frobenius_norm (`tuple[float, ...]`): The same of each head form, H
            values; empty if heads were not scored. NaN wherever a weight is not finite, or (symmetry) queries and keys
            have inputs of different width.
        symmetry_null, directionality_null (`tuple[float, float]`): Range in which 95 % of layers with independent
            Gaussian W_q, W_k of the same shape (and, for directionality, the same row norms of W_q and W_k) score;
            empty if it was not asked for, or there is no score.
        verified (`bool`): Whether a forward pass has proven that W_q and W_k are read rightly: that of Transformers'
            own model of this type, or of the model itself where it was probed. `False` also where nobody says, as in
            files older than this field.
        positivity, normalized_trace, stable_rank, effective_rank, symmetric_energy, skew_energy (`float` or `None`):
            Spectral scores of the layer form (see [`BilinearForm.spectral_scores`]); `None` where they were not asked
            for.
        head_positivity, … (`tuple[float, ...]`): The same of each head form.
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
    head_symmetry: tuple[float, ...] = ()
    head_directionality: tuple[float, ...] = ()
    head_frobenius_norm: tuple[float, ...] = ()
    symmetry_null: tuple[float, ...] = ()
    directionality_null: tuple[float, ...] = ()
    role: str | None = None
    causal: bool | None = None
    key_source: str = ""
    verified: bool = False
    positivity: float | None = None
    normalized_trace: float | None = None
    stable_rank: float | None = None
    effective_rank: float | None = None
    symmetric_energy: float | None = None
    skew_energy: float | None = None
    head_positivity: tuple[float, ...] = ()
    head_normalized_trace: tuple[float, ...] = ()
    head_stable_rank: tuple[float, ...] = ()
    head_effective_rank: tuple[float, ...] = ()
    head_symmetric_energy: tuple[float, ...] = ()
    head_skew_energy: tuple[float, ...] = ()


@dataclass(frozen=True)
class QKScores:
    """
    Scores of all chosen layers of a model, as [`score_model`] and [`score_checkpoint`] return them.

    Attributes:
        layers (`tuple[LayerScores, ...]`): Encoder before decoder, then by path and number.
        gamma (`float`): γ of the directionality score.
        model_type (`str` or `None`): `config.model_type` of the model.
        family (`str` or `None`): `"encoder"`, `"decoder"` or `"encoder-decoder"`; `None` where no config says.
        source (`str` or `None`): Folder, file or repository that was read; `None` for a live model.
        num_parameters (`int` or `None`): Parameters of the whole model. Of a checkpoint, entries of the floating point
            tensors in its files, so that buffers and scales that are saved with it count; else what its index or the
            Hub says, `None` where nothing that was read says it.
        skipped (`tuple[str, ...]`): A line for each kind of module that looks like attention and was left out, saying
            why. The last four say where scores come from and do not take part in comparisons.
    """

    layers: tuple[LayerScores, ...]
    gamma: float = 2.0
    model_type: str | None = None
    family: str | None = field(default=None, compare=False)
    source: str | None = field(default=None, compare=False)
    num_parameters: int | None = field(default=None, compare=False)
    skipped: tuple[str, ...] = field(default=(), compare=False)

    @property
    def stacks(self) -> list[str]:
        """Names of the stacks that the layers belong to, in the model's order."""
        return list(dict.fromkeys(layer.stack for layer in self.layers))

    @property
    def undefined(self) -> list[str]:
        """Names of the layers that score NaN, because a weight is not finite or could not be read."""
        return [layer.name for layer in self.layers if math.isnan(layer.frobenius_norm)]

    @property
    def unverified(self) -> list[str]:
        """Names of the layers whose W_q and W_k no forward pass has proven to be read rightly."""
        return [layer.name for layer in self.layers if not layer.verified]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what was measured: symmetry, directionality and norm, and the spectral scores if asked for."""
        spectral = any(layer.positivity is not None for layer in self.layers)
        return (*METRICS, *SPECTRAL_METRICS) if spectral else METRICS

    def summary(self, stack: str | None = None) -> dict[str, dict[str, float]]:
        """
        Median and quartiles over layers, as the paper reports them.

        Args:
            stack (`str`, *optional*): Only the layers of this stack; all layers by default.

        Returns:
            `dict[str, dict[str, float]]`: `"q25"`, `"median"` and `"q75"` of `"symmetry"`, `"directionality"`,
            `"frobenius_norm"` and whatever else was measured. Layers whose value is NaN are left out; NaN if none
            remains.

        Raises:
            ValueError: if there is no such stack.
        """
        if stack is not None and stack not in self.stacks:
            raise ValueError(f"No stack named {stack!r}; there are {self.stacks}.")
        layers = [layer for layer in self.layers if stack is None or layer.stack == stack]
        return {metric: _quantiles([getattr(layer, metric) for layer in layers]) for metric in self.metrics}

    def to_log(self, prefix: str = "qk", heads: bool = False) -> dict[str, float]:
        """
        Flat names and values for a logger: `qk/symmetry/median` (and `q25`, `q75`) over all layers and
        `qk/symmetry/layer_00` of each layer; the layers of a model with several stacks are under the stack's name,
        `qk/encoder/symmetry/layer_00`, and each stack has its own median. No name is the folder of another, which
        file-based trackers could not store.

        Args:
            prefix (`str`, *optional*, defaults to `"qk"`): First part of each name.
            heads (`bool`, *optional*, defaults to `False`): Adds each head, `qk/symmetry/layer_00_head_03`.

        Returns:
            `dict[str, float]`: Python floats.
        """
        log: dict[str, float] = {}

        def add(root: str, summary: dict[str, dict[str, float]]) -> None:
            for metric, row in summary.items():
                log.update({f"{root}/{metric}/{name}": value for name, value in row.items()})

        add(prefix, self.summary())
        for stack in self.stacks:
            if stack:
                add(f"{prefix}/{stack}", self.summary(stack))
        for layer in self.layers:
            root = f"{prefix}/{layer.stack}" if layer.stack else prefix
            for metric in self.metrics:
                name = f"{root}/{metric}/layer_{layer.index:02d}"
                log[name] = getattr(layer, metric)
                if heads:
                    values = getattr(layer, f"head_{metric}")
                    log.update({f"{name}_head_{head:02d}": value for head, value in enumerate(values)})
        return log

    def to_pandas(self, heads: bool = False) -> pd.DataFrame:
        """
        Table of the scores.

        Args:
            heads (`bool`, *optional*, defaults to `False`): One row per head instead of one per layer.

        Returns:
            `pandas.DataFrame`: Columns `stack`, `layer`, (`head`,) `symmetry`, `directionality`, `frobenius_norm` (and
            the spectral scores, where they were measured), `kind`, `role`, `causal`, `num_heads`,
            `num_key_value_heads`, `head_dim`, `layout`, `verified`, `name`, `key_source`; no rows per head if heads
            were not scored.
        """
        return pd.DataFrame(self.rows(heads))

    def rows(self, heads: bool = False) -> list[dict[str, Any]]:
        """
        The table of [`~QKScores.to_pandas`] without pandas, which takes longer to make it than a small model to score.

        Args:
            heads (`bool`, *optional*, defaults to `False`): One row per head instead of one per layer.

        Returns:
            `list[dict[str, Any]]`: Column to value, of each row.
        """
        rows = []
        for layer in self.layers:
            about = {name: getattr(layer, name) for name in _ABOUT}
            place = {"stack": layer.stack, "layer": layer.index}
            if heads:
                columns = [getattr(layer, f"head_{metric}") for metric in self.metrics]
                rows += [
                    {**place, "head": head, **dict(zip(self.metrics, values, strict=True)), **about}
                    for head, values in enumerate(zip(*columns, strict=True))
                ]
            else:
                rows.append({**place, **{metric: getattr(layer, metric) for metric in self.metrics}, **about})
        return rows

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
        about = {name: value for name, value in values.items() if name not in ("layers", "skipped")}
        # In a file NaN and "not measured" look alike; ranks exist for every form that was measured and is finite.
        spectral = any(layer.get("stable_rank") is not None for layer in values["layers"])
        metrics = (*METRICS, *SPECTRAL_METRICS) if spectral else METRICS
        layers = tuple(LayerScores(**_with_nan(layer, metrics)) for layer in values["layers"])
        return cls(layers=layers, skipped=tuple(values.get("skipped", ())), **about)

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
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{os.fspath(path)!r} does not hold QKScores ({error}).") from error

    def __str__(self) -> str:
        table = self.to_pandas()[["stack", "layer", *self.metrics, "num_heads", "num_key_value_heads"]]
        if self.unverified:
            table[""] = ["" if layer.verified else "unverified" for layer in self.layers]
        return table.to_string(index=False, float_format=lambda value: f"{value:.4f}")


_ABOUT = (
    *("kind", "role", "causal", "num_heads", "num_key_value_heads", "head_dim", "layout", "verified", "name"),
    "key_source",
)


def _quantiles(values: Sequence[float | None]) -> dict[str, float]:
    numbers = np.array(values, dtype=float)
    numbers = numbers[~np.isnan(numbers)]
    found = np.quantile(numbers, list(_QUANTILES.values())) if len(numbers) else np.full(len(_QUANTILES), np.nan)
    return dict(zip(_QUANTILES, found.tolist(), strict=True))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_nan(layer: Mapping[str, Any], metrics: Sequence[str]) -> dict[str, Any]:
    restored = dict(layer)
    for entry in fields(LayerScores):
        if entry.name in metrics:
            restored[entry.name] = math.nan if layer[entry.name] is None else layer[entry.name]
        elif entry.default == ():
            values = layer.get(entry.name, ())
            restored[entry.name] = tuple(math.nan if value is None else value for value in values)
    return restored
