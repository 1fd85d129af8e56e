"""Plans of 1,024 GPUs: which bytes a node sends, and which layout is faster for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import planned_scaling
from benchmarks.planned_scaling import Planned, latency_seconds, num_parameters, sent_by_a_node
from tests.helpers.processes import ROOT


def test_groups_of_a_node_send_gradients_alone_so_micro_batches_share_them(tmp_path: Path) -> None:
    whole, grouped = (Planned(tmp_path, 1024, more) for more in ("", "--hsdp"))
    num_weights = num_parameters(whole.model)
    # Weights in bf16 are gathered in forward and in backward, those of the root once; gradients are reduced in fp32.
    assert sent_by_a_node(whole.model, whole.hardware) == pytest.approx((2 * 2 + 4) * num_weights, rel=0.03)
    # An all-reduce of gradients over the nodes sends them twice.
    assert sent_by_a_node(grouped.model, grouped.hardware) == pytest.approx(2 * 4 * num_weights, rel=0.03)
    assert latency_seconds(grouped.model, grouped.hardware) < latency_seconds(whole.model, whole.hardware) / 10
    of_whole, of_grouped = figures(whole), figures(grouped)
    for at_once, slow, _ in (of_whole, of_grouped):
        assert slow < at_once / 5, "one micro-batch per step waits for the network"
    assert of_whole[2] == pytest.approx(of_whole[1], rel=0.05), "every micro-batch gathers the weights"
    assert of_grouped[2] > 5 * of_grouped[1], "gradients are reduced once for all micro-batches"


def figures(planned: Planned) -> list[float]:
    """Tokens/s per GPU with the fast network, the slow one, and the slow one with 16 micro-batches."""
    return [float(figure.replace(",", "")) for figure in planned.speeds().split(" | ")]


@pytest.mark.slow
@pytest.mark.parametrize("table", ["speed_table", "group_table", "checkpoint_table"])
def test_the_tables_of_the_page_are_computed(table: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/scaling.md").read_text()
    for line in getattr(planned_scaling, table)(tmp_path).splitlines():
        assert line in page
