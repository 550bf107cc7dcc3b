"""W_qk scores of a checkpoint that stays where it is."""

import os
import warnings

import torch

from ..attention import AttentionKind, LayerChoice, describe_unverified, select_layers
from ..model_family import model_family
from ..scores import QKScores
from ..scoring import score_layers, undefined_layers
from .finding import find_checkpoint_layers


__all__ = ["score_checkpoint"]


def score_checkpoint(
    path_or_repo_id: str | os.PathLike,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    layers: LayerChoice | None = None,
    attention: AttentionKind = "self",
    heads: bool = True,
    gamma: float = 2.0,
    null_band: bool = True,
    spectral: bool = False,
    dtype: torch.dtype | None = None,
) -> QKScores:
    """
    Scores W_qk of every attention layer of a checkpoint from its files, reading W_q and W_k only. What
    [`score_model`] gives for the loaded model comes out, exactly (but for the last digits where loading reorders the
    channels of heads for another rotary embedding), but no model is built, no code of the repository is run, and one
    layer's weights are held at a time (the next ones are read ahead within what it takes in fp32, or 64 MiB).

    Files are taken from a folder, else from the local Hub cache, else from the Hub, of which only the ranges that hold
    W_q and W_k are fetched. `pytorch_model.bin` cannot be read in part: it is downloaded as a whole.
    `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` count as in `huggingface_hub`.

    Args:
        path_or_repo_id (`str` or `os.PathLike`):
            Folder with `config.json` and weights (safetensors or `pytorch_model.bin`, single or sharded), one file of
            weights or index beside its `config.json`, a PEFT adapter (scored together with its base), or a model on
            the Hub.
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub; its main branch by default.
        subfolder (`str`, *optional*):
            Folder inside the folder or repository.
        token (`str` or `bool`, *optional*):
            Token for gated and private repositories; by default the one that you are logged in with.
        layers (`Sequence[int]` or `Mapping[str, Sequence[int]]`, *optional*):
            Indices of the layers to score, for every stack or per stack name; all by default. Others are not read.
        attention (`str`, *optional*, defaults to `"self"`):
            `"self"`, `"cross"` or `"all"`; or self-attention of one side or direction alone: `"encoder"`, `"decoder"`,
            `"bidirectional"` or `"causal"`.
        heads (`bool`, *optional*, defaults to `True`):
            Whether each head is scored too.
        gamma (`float`, *optional*, defaults to 2.0):
            γ of the directionality score.
        null_band (`bool`, *optional*, defaults to `True`):
            Whether the range that independent Gaussian weights score in is given with each layer.
        spectral (`bool`, *optional*, defaults to `False`):
            Whether eigenvalues and singular values are scored too (see [`score_model`]).
        dtype (`torch.dtype`, *optional*):
            What weights are converted to before they are scored; by default they are scored as they are stored (sums
            are accumulated in fp32 or fp64 in any case).

    Returns:
        [`QKScores`]

    Raises:
        ValueError: if there are no weights that can be read, no attention layer is found, a layer or kind is asked for
            that is not there, a file is broken or incomplete, `config.json` disagrees with shapes, or weights are
            packed in a form that cannot be dequantised here; the message names file and tensor.
        OSError: if something cannot be found, fetched or read; `huggingface_hub`'s own errors where the Hub refuses.

    Examples:

    ```python
    >>> import tempfile
    >>> import hf_symqk
    >>> from transformers import AutoModel, BertConfig

    >>> config = BertConfig(
    ...     hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99
    ... )
    >>> model = AutoModel.from_config(config, qk_init="symmetric")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     scores = hf_symqk.score_checkpoint(folder)
    >>> scores == hf_symqk.score_model(model)
    True

    ```
    """
    survey = find_checkpoint_layers(path_or_repo_id, revision=revision, subfolder=subfolder, token=token, dtype=dtype)
    chosen = select_layers(survey.layers, layers=layers, attention=attention)
    with survey.reader.reading([layer.needs for layer in chosen]):
        scored = score_layers(chosen, gamma=gamma, heads=heads, null_band=null_band, spectral=spectral)
    scores = QKScores(
        scored,
        gamma,
        survey.config.model_type,
        family=model_family(survey.config),
        source=survey.source,
        num_parameters=survey.num_parameters,
        skipped=tuple(line.strip() for line in survey.left_out),
    )
    for text in filter(None, (undefined_layers(scores), describe_unverified(chosen))):
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return scores
