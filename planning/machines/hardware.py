"""The machines of a plan: "4xV100-32GB" and its settings, as one value."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from planning.machines.cards import Card, card_of_size, explain_unknown_card, find_card
from planning.machines.group_speeds import Speeds
from utils.errors import ConfigError

_TEXT = re.compile(r"(?:(?P<number>\d{1,4})\s*[xX*]\s*)?(?P<name>[A-Za-z0-9][\w .-]*)")
_OTHER_CARD = (
    "describe another card, without its speed, by its size, like 1x24GB, or by --device_memory_gib and NUMBERxGPU"
)


@dataclass(frozen=True)
class Hardware:
    """Equal nodes of equal cards."""

    card: Card
    cards_per_node: int = 1
    nodes: int = 1
    network_gbps: float | None = None  # gigabits per second of one node's link to the others, sending
    price_per_hour: float | None = None  # of one node
    measured: Speeds | None = None  # of collectives between ranks of such nodes, by tools.doctor

    @property
    def world_size(self) -> int:
        return self.cards_per_node * self.nodes

    def of_one_card(self) -> Hardware:
        return replace(self, cards_per_node=1, nodes=1)

    @property
    def name(self) -> str:
        """ "4xV100-32GB", "2 nodes of 8xH100-80GB"."""
        node = f"{self.cards_per_node}x{self.card.name}"
        return node if self.nodes == 1 else f"{self.nodes} nodes of {node}"


def parse_hardware(
    text: str | None,
    *,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    nodes: int = 1,
    network_gbps: float | None = None,
    price_per_hour: float | None = None,
    measured: Speeds | None = None,
) -> Hardware:
    """The hardware that the flags of a plan describe.

    Args:
        text: cards of one node, "4xV100-32GB", "H200" or "1x24GB"; None: one card of which only the memory is known.
        device_memory_gib: memory of a card in GiB, instead of the named card's.
        host_memory_gib: memory of one node.

    Raises:
        ConfigError: if the card is not known, or nothing describes it.
    """
    if text is None and device_memory_gib is None:
        raise ConfigError(f"--dry_run_hardware: not given; name the cards, like 4xV100-32GB, or {_OTHER_CARD}")
    match = _TEXT.fullmatch("1xGPU" if text is None else text.strip())
    if match is None or int(match["number"] or 1) == 0:
        raise ConfigError(f"--dry_run_hardware: {text!r} is no NUMBERxCARD, like 4xV100-32GB")
    card = find_card(match["name"]) or card_of_size(match["name"])
    if card is None and match["name"].upper() == "GPU" and device_memory_gib is not None:
        card = Card(f"GPU of {device_memory_gib:g} GiB", device_memory_gib)
    if card is None:
        raise ConfigError(f"--dry_run_hardware: {explain_unknown_card(match['name'])}; or {_OTHER_CARD}")
    if device_memory_gib is not None:
        card = replace(card, memory_gib=device_memory_gib)
    card = replace(card, host_memory_gib=host_memory_gib)
    return Hardware(card, int(match["number"] or 1), nodes, network_gbps, price_per_hour, measured)
