"""
The update that a loss asks of W_qk: one forward and backward pass of a model that is otherwise left alone.

Shape legend: `H` query heads, `S` sequences, `N`, `M` tokens on the query and the key side, `D` width of the hidden
states, `T` tokens of a batch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import AttentionKind, AttentionLayer, LayerChoice, find_attention_layers, select_layers
from ..attention.tapping import TappedLogits, Taps, tap_logits
from ..attention.tensors import is_sharded
from ..attention.untouched import left_as_it_was
from ..model_family import model_type
from ..scoring import described
from .aligning import AlignedLogits, Relation, align_logits, projections_of
from .labels import check_labels
from .outer_sums import LogitsTooLargeError, OuterSum, Room, check_memory
from .updates import LayerUpdate, QKUpdates, TermWeights


__all__ = ["qk_updates", "sum_updates"]

Loss = Callable[[Any, Mapping[str, Any]], Tensor]


def qk_updates(
    model: nn.Module,
    batches: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    *,
    loss: Loss | None = None,
    layers: LayerChoice | None = None,
    attention: AttentionKind = "self",
    heads: bool = True,
    offset: int | None = None,
    memory_gib: float = 8.0,
) -> QKUpdates:
    """
    The implicit update of W_qk that a loss asks for (arXiv:2502.10927): of each head `scale · Xᵀ B X`, X the hidden
    states that W_q and W_k read, B the gradient of the loss with respect to the attention logits; of a layer the sum
    over its heads. It is the gradient of the loss with respect to W_qk, were that a weight of its own; a step of
    gradient descent goes the other way, which changes no score.

    A sum of rank-1 terms `β_ij x_i x_jᵀ`, its rank at most the number of tokens. A token adds to rows as the one that
    a prediction is made at (i) and to columns as its context (j).

    The model runs in evaluation mode, so without dropout, with eager attention and outside autocast, and is left as
    it was: modes, weights, gradients, buffers, hooks and random state. All attention logits of a batch are held at
    once, of every layer of the model: measured were 3.4 (BERT) to 5.0 (LLaMA) times `S · H · N²` numbers a layer,
    where training with eager attention takes 4.1 to 4.2 and training with SDPA or flash attention none of size N².
    Where that is too much, give the sequences in several batches. Each layer's forms take at most `H · (D + 1)²`
    numbers, however many batches come, and sums over batches are exact; the weights of one batch take `2 · H · S · N`.

    What is measured, where more stands between W_q, W_k and the logits than their product:

    - *Biases* do not enter the forms. With `b_q` the gradient of W_k has terms of its own, which
      [`~LayerUpdate.extended_head_forms`] has.
    - *Rotary positions*: the form is that of contents, `scale · Xᵀ B X` over all pairs at any distance. It is the
      gradient of `W_q W_kᵀ` where logits see that alone; at distance `j − i = o` they see `W_q R_o W_kᵀ`, with the
      form that `offset=o` gives. Those of all offsets add up to the whole.
    - *Query and key norms*, latent projections, learned scales: B is the gradient with respect to the logits, X what
      is projected first; what the norm divides a token's query or key by, is left out.
    - *Relative positions*: terms that are added to the logits change nothing; products of queries or keys with learned
      positions are no part of W_qk.

    Args:
        model (`torch.nn.Module`):
            A model whose attention the layout table knows, wrapped or not, with whole weights of any type but fp16,
            in which gradients of logits vanish.
        batches (`Mapping` or `Iterable[Mapping]`):
            Keyword arguments of the model's forward, on its device, with what it needs to give a loss (`labels`). Of
            several batches the updates are summed, each loss as it is.
        loss (`Callable[[outputs, batch], Tensor]`, *optional*):
            The loss of a batch, from the model's outputs. By default `outputs.loss`.
        layers (`Sequence[int]` or `Mapping[str, Sequence[int]]`, *optional*):
            Indices of the layers, for every stack or per stack name; all by default.
        attention (`str`, *optional*, defaults to `"self"`):
            As in [`score_model`].
        heads (`bool`, *optional*, defaults to `True`):
            Whether the form of each head is kept, or the layer's alone (`H = 1` in the memory above).
        offset (`int`, *optional*):
            Only pairs of a token and its context at this distance, `j − i`, of self-attention; in causal attention 0
            or less. All by default.
        memory_gib (`float`, *optional*, defaults to 8.0):
            What the attention logits of a batch (`5 · S · H · N²` numbers a layer) and the forms of all layers may
            take together, in GiB. More is an error, before it is taken. The hidden states and the other activations
            that a backward pass needs, as in training, are not counted.

    Returns:
        [`QKUpdates`]

    Raises:
        ValueError: if the model is sharded, in fp16, cannot be run with a batch or gives no loss; if no layer is found
            or a layer is asked for that the model does not have; if the queries or keys of a layer are not those of
            one token's hidden state each; if nothing is predicted or the loss is not finite; if no two tokens stand at
            `offset`; and if logits and forms take more than `memory_gib`.

    Examples:

    ```python
    >>> import torch, hf_symqk
    >>> from transformers import AutoModelForMaskedLM, BertConfig

    >>> config = BertConfig(
    ...     hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99
    ... )
    >>> model = AutoModelForMaskedLM.from_config(config)
    >>> tokens = torch.arange(4, 20).view(2, 8)
    >>> updates = hf_symqk.qk_updates(model, {"input_ids": tokens, "labels": tokens})
    >>> updates.layers[0].head_forms
    BilinearForm(shape=(4, 64, 64), rank=16, dtype=torch.float32)
    >>> updates.layers[0].scale, updates.layers[0].weights.as_context.shape
    (0.25, torch.Size([4, 2, 8]))
    >>> sorted(updates.scores().summary())
    ['directionality', 'frobenius_norm', 'symmetry']

    ```
    """
    if loss is not None and not callable(loss):
        raise ValueError(f"`loss` must be a function of outputs and batch, got {loss!r}.")
    given = [batches] if isinstance(batches, Mapping) else batches
    return sum_updates(
        model,
        (partial(_forward, batch=batch, loss=loss) for batch in given),
        layers=layers,
        attention=attention,
        heads=heads,
        offset=offset,
        memory_gib=memory_gib,
    )


def sum_updates(
    model: nn.Module,
    forwards: Iterable[Callable[[nn.Module], Tensor]],
    *,
    layers: LayerChoice | None = None,
    attention: AttentionKind = "self",
    heads: bool = True,
    offset: int | None = None,
    memory_gib: float = 8.0,
    memory_option: str = "memory_gib",
) -> QKUpdates:
    """
    [`qk_updates`] of forward passes that the caller makes.

    Args:
        model (`torch.nn.Module`): As in [`qk_updates`].
        forwards (`Iterable[Callable[[torch.nn.Module], torch.Tensor]]`): Each runs the model that it is given and
            returns a loss.
        layers (`Sequence[int]` or `Mapping[str, Sequence[int]]`, *optional*): As in [`qk_updates`].
        attention (`str`, *optional*, defaults to `"self"`): As in [`qk_updates`].
        heads (`bool`, *optional*, defaults to `True`): As in [`qk_updates`].
        offset (`int`, *optional*): As in [`qk_updates`].
        memory_gib (`float`, *optional*, defaults to 8.0): As in [`qk_updates`].
        memory_option (`str`, *optional*, defaults to `"memory_gib"`): What errors call that limit.

    Returns:
        [`QKUpdates`]

    Raises:
        ValueError: as [`qk_updates`] does; a [`LogitsTooLargeError`] where fewer sequences might fit.
    """
    check_memory(memory_gib, memory_option)
    if is_sharded(model):
        raise ValueError(
            f"{type(model).__name__} is sharded; updates of W_qk need a forward pass over whole weights. Measure them "
            "before it is sharded, or on a copy that is whole."
        )
    if any(parameter.dtype is torch.float16 for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has weights in fp16, in which gradients of attention logits vanish; convert it "
            "(`model.float()` or `model.bfloat16()`)."
        )
    chosen = select_layers(find_attention_layers(model), layers=layers, attention=attention)
    if not chosen:
        raise ValueError(f"`layers` = {layers!r} asks for no layer; leave it out for all.")
    if offset is not None:
        _check_offset(offset, chosen)
    room = Room(memory_gib * 2**30, memory_option)
    sums = [_LayerSum(layer, OuterSum(layer.name, room), heads) for layer in chosen]
    losses = [_add_batch(model, forward, sums, offset, room) for forward in forwards]
    if not losses:
        raise ValueError("`batches` holds no batch.")
    unmet = [one.layer.name for one in sums if not one.has_pairs]
    if unmet:
        raise ValueError(
            f"`offset` = {offset}: no sequence is long enough for two tokens of {unmet[0]!r} at that distance."
        )
    updates = tuple(one.update(single=len(losses) == 1) for one in sums)
    return QKUpdates(updates, sum(losses) / len(losses), len(losses), model_type(model))


def _check_offset(offset: Any, layers: Iterable[AttentionLayer]) -> None:
    """Refuses distances at which a layer has no pairs of tokens, or none that mean anything."""
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ValueError(f"`offset` must be a whole number of tokens, got {offset!r}.")
    for layer in layers:
        if layer.kind == "cross":
            raise ValueError(
                f"`offset` = {offset}: {layer.name!r} is cross-attention, whose queries and keys stand in two "
                'sequences, at no distance from each other. Leave it out, or choose `attention="self"`.'
            )
        if layer.causal and offset > 0:
            raise ValueError(
                f"`offset` = {offset}: {layer.name!r} is causal, no token sees one that comes after it. Distances "
                "count from the token that a prediction is made at to its context: 0 or less."
            )


def _forward(runs: nn.Module, batch: Mapping[str, Any], loss: Loss | None) -> Tensor:
    """The loss of a batch, in the graph."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"`batches` must be a mapping of the forward's arguments, or several, got {type(batch).__name__}."
        )
    if loss is None:
        check_labels(batch)
    try:
        outputs = runs(**batch)
    except (LogitsTooLargeError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model's own code raises
        raise ValueError(
            f"{type(runs).__name__} cannot be run with the batch ({', '.join(batch)}): {type(error).__name__}: {error}"
        ) from error
    value = getattr(outputs, "loss", None) if loss is None else loss(outputs, batch)
    if value is None:
        raise ValueError(
            f"{type(runs).__name__} gives no loss for the batch ({', '.join(batch)}). Put `labels` into it, or give "
            "`loss=`, a function of outputs and batch."
        )
    return value


@dataclass
class _LayerSum:
    """What is summed of one layer."""

    layer: AttentionLayer
    sum: OuterSum
    heads: bool
    scale: float | None = None
    relation: Relation = "direct"
    calls: list[TermWeights] = field(default_factory=list)  # of the batch that is being added
    weights: TermWeights | None = None  # of the last batch
    positions: tuple[Tensor, Tensor] | None = None  # of all
    has_pairs: bool = False  # at the distance asked for

    def add(self, aligned: AlignedLogits, gradient: Tensor | None, offset: int | None) -> None:
        """Adds the terms of one softmax; of a layer that the loss does not reach, none."""
        gradient = torch.zeros_like(aligned.tapped.product) if gradient is None else gradient
        precise = torch.promote_types(torch.promote_types(gradient.dtype, aligned.query_input.dtype), torch.float32)
        weights = aligned.arrange(gradient.to(precise)) * aligned.factor
        queries, keys = weights.shape[-2:]
        self.has_pairs = self.has_pairs or offset is None or -queries < offset < keys
        if offset is not None:
            weights = weights.tril(offset).triu(offset)
        self.scale, self.relation = aligned.scale, aligned.relation
        if not self.heads:
            weights = weights.sum(1, keepdim=True)
        magnitudes = weights.abs()
        self.sum.add(aligned.query_input, aligned.key_input, weights)
        self.calls.append(TermWeights(*(magnitudes.sum(dim).transpose(0, 1) for dim in (-1, -2))))

    def finish_batch(self) -> None:
        """Brings together the terms of a batch: of several if the forward calls the module several times."""
        calls, self.calls = self.calls, []
        alike = len({tuple(weights.shape for weights in call) for call in calls}) == 1
        self.weights = TermWeights(*(torch.stack(side).sum(0) for side in zip(*calls, strict=True))) if alike else None
        sides = [self.positions or ()] + [tuple(weights.sum(1) for weights in call) for call in calls]
        prediction, context = (reduce(_add_padded, side) for side in zip(*filter(None, sides), strict=True))
        self.positions = prediction, context

    def update(self, single: bool) -> LayerUpdate:
        """What was summed."""
        layer = self.layer
        assert self.positions is not None, "asked after a batch"
        return LayerUpdate(
            **described(layer),
            scale=self.scale,
            relation=self.relation,
            position_as_prediction=self.positions[0],
            position_as_context=self.positions[1],
            weights=self.weights if single else None,
            _sum=self.sum,
            _has_heads=self.heads,
        )


def _add_padded(one: Tensor, other: Tensor) -> Tensor:
    """Sum of `(H, N)` and `(H, M)`, positions beyond the shorter one's counting 0."""
    length = max(one.shape[-1], other.shape[-1])
    one, other = (F.pad(tensor, (0, length - tensor.shape[-1])) for tensor in (one, other))
    return one + other


def _add_batch(
    model: nn.Module,
    forward: Callable[[nn.Module], Tensor],
    sums: list[_LayerSum],
    offset: int | None,
    room: Room,
) -> float:
    """Adds the updates of one batch; its loss."""
    holders = [holder for one in sums for holder in projections_of(one.layer).values()]
    with left_as_it_was(model), torch.inference_mode(False), torch.enable_grad():
        model.eval()
        # Without what engines and mixed precision wrapped around its forward.
        runs = extract_model_from_parallel(model, keep_fp32_wrapper=False, keep_torch_compile=False)
        with tap_logits(runs, holders, room.admit_logits) as taps:
            value = _checked(forward(runs), runs)
        found = [(one, align_logits(one.layer, tapped, taps)) for one, tapped in _by_layer(sums, taps)]
        terms = [(one, aligned) for one, several in found for aligned in several]
        products = [aligned.tapped.product for _, aligned in terms]
        gradients = torch.autograd.grad(value, products, allow_unused=True)
        with torch.no_grad():
            for (one, aligned), gradient in zip(terms, gradients, strict=True):
                one.add(aligned, gradient, offset)
            for one in sums:
                one.finish_batch()
        room.logits = 0
        return float(value.detach())


def _checked(value: Any, model: nn.Module) -> Tensor:
    """The loss, if it is one."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"The loss must be a tensor of one number, got {found}.")
    if not value.requires_grad:
        raise ValueError("The loss has no gradient: the forward pass ran without one, or the loss is detached.")
    if not value.isfinite():
        plain = ((name, held) for name, held in model.named_parameters() if type(held.data) is Tensor)
        broken = next((name for name, held in plain if held.element_size() > 1 and not held.isfinite().all()), None)
        reason = (
            f"The weight {broken!r} is not finite."
            if broken is not None
            else "No weight that is not finite was found; where no label is left to predict (all -100), a mean is 0/0."
        )
        raise ValueError(f"The loss is {value.item()}, which has no gradient. {reason}")
    return value.reshape(())


def _by_layer(sums: list[_LayerSum], taps: Taps) -> list[tuple[_LayerSum, list[TappedLogits]]]:
    """The logits of each layer: those made while its attention module, or a part of it, ran."""
    owners = {part: number for number, one in enumerate(sums) for part in one.layer.module.modules()}
    tapped: list[list[TappedLogits]] = [[] for _ in sums]
    for logits in taps.logits:
        number = owners.get(logits.logits.module) if logits.logits.module is not None else None
        if number is not None:
            tapped[number].append(logits)
    return list(zip(sums, tapped, strict=True))
