"""
Layers that read the keys of another layer (Gemma 3n, Gemma 4, Mistral Large 4): which one, told from the config, and
the two modules joined into what holds W_q and W_k.
"""

import re
from typing import Any, NamedTuple

from torch import nn

from .heads import value_of
from .kinds import kind_of, spoken_by
from .layer import AttentionLayer
from .projections import has_projection, piece_widths
from .verified import is_verified


__all__ = ["Borrower", "borrowed_from"]

_LAST_NUMBER = re.compile(r"(.*?)(\d+)(\.\D*)$")
_PROJECTS_KEYS = re.compile(r"attn|attention", re.IGNORECASE)


def borrowed_from(name: str, config: Any) -> str | None:
    """
    Whose keys an attention layer reads.

    Args:
        name (`str`): Dotted path of the attention module.
        config (`Any`): What speaks for it.

    Returns:
        `str` or `None`: Path of the layer that makes them; empty if none of this model does (assistants read those of
        the model that they assist); `None` if the layer makes its own.
    """
    config = spoken_by(config)
    if not hasattr(type(config), "kv_sharing_modes"):
        return None
    found = _LAST_NUMBER.fullmatch(name)
    if found is None or not _PROJECTS_KEYS.search(found[3].rpartition(".")[2]):
        return None
    modes, number = value_of(config, "kv_sharing_modes"), int(found[2])
    if modes is None or number >= len(modes) or not str(modes[number]).startswith("reuse"):
        return None
    sources = value_of(config, "kv_source_layers")
    if sources is None:
        kinds = config.layer_types
        stored = [n for n in range(number) if modes[n] == "store" and kinds[n] == kinds[number]]
        sources = {number: stored[-1]} if stored else {}
    return f"{found[1]}{sources[number]}{found[3]}" if number in sources or isinstance(sources, list) else ""


class Borrower(NamedTuple):
    """An attention module without keys of its own, and the name of the layer that lends them."""

    name: str
    module: nn.Module
    config: Any
    lender: str

    def layer(self, lender: AttentionLayer | None) -> AttentionLayer | None:
        """
        The layer that the two make.

        Args:
            lender ([`AttentionLayer`] or `None`): The layer that lends its keys.

        Returns:
            [`AttentionLayer`] or `None`: `None` if there is no lender, or the module has no queries of its layout.
        """
        if lender is None:
            return None
        layout = lender.layout
        joined = _Joined(self.module, lender)
        if not has_projection(joined, layout.query) or not has_projection(joined, layout.key):
            return None
        rows = {piece: piece_widths(joined, piece)[0] for piece in layout.pieces}
        problem = lender.problem
        if problem is None and not all(piece.rows.fits(number, lender.heads) for piece, number in rows.items()):
            problem = f"{self.name!r} reads the keys of {lender.name!r}, whose heads do not fit its queries."
        role, causal = kind_of(self.name, "self", self.config)
        spoken_for = value_of(self.config, "model_type")
        return AttentionLayer(
            self.name,
            self.module,
            layout,
            lender.heads,
            "self",
            problem=problem,
            role=role,
            causal=causal,
            key_source=lender.name,
            joined=joined,
            model_type=spoken_for,
            verified=is_verified(layout, self.module, spoken_for, "self"),
            config=self.config,
        )


class _Joined(nn.Module):
    """The modules and parameters of a borrower, with what it borrows from the lender in their places."""

    def __init__(self, borrower: nn.Module, lender: AttentionLayer) -> None:
        super().__init__()
        layout = lender.layout
        lent = {piece.module.partition(".")[0] for piece in layout.lendable} | {*layout.lent_norms}
        # Whatever a module or a file has of its own under these names, no forward reads it.
        self._modules.update({key: value for key, value in borrower._modules.items() if key not in lent})
        self._modules.update({key: value for key, value in lender.holding._modules.items() if key in lent})
        self._parameters.update(borrower._parameters)
