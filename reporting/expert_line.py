"""The line on how busy the experts of a mixture are."""

from __future__ import annotations

from collections.abc import Mapping


def expert_line(figures: Mapping[str, float]) -> str:
    """The line after an evaluation's.

    Args:
        figures: of the `eval` event: for the busiest and the idlest expert of all layers, the share of the tokens that
            chose it, its layer and its number; and the share of each expert if all were alike. A token chooses several.
    """
    return (
        f"experts: busiest {_shown(figures, 'busiest')}, idlest {_shown(figures, 'idlest')}, "
        f"{100 * figures['equal_expert_share']:.3g} % each if all were alike"
    )


def _shown(figures: Mapping[str, float], which: str) -> str:
    share, layer, number = (figures[f"{which}_expert{of}"] for of in ("_share", "_layer", ""))
    return f"{100 * share:.2g} % of tokens (layer {layer}, expert {number})"
