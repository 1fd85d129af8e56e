"""Settings of planning: predictions before a run, and the check that it loads."""

from dataclasses import dataclass

from configs.setting import setting


@dataclass(frozen=True)
class PlanningConfig:
    """The plan of a run, made without weights or a GPU (docs/planning.md)."""

    dry_run: bool = setting(
        False,
        "plan the run and end: the memory of each rank, whether it fits, time and price; reads config.json alone, and "
        "writes nothing",
    )
    dry_run_hardware: str | None = setting(
        None,
        "plan for these cards of each machine, such as 4xV100-32GB (dry_run)",
        default_text="this machine's own",
    )
    nodes: int | None = setting(None, "machines to plan for (dry_run)", unit="machines", minimum=1, stands_for=1)
    device_memory_gib: float | None = setting(
        None,
        "usable memory of each card: replaces the known value of a card in dry_run_hardware; alone, it describes a "
        "card of unknown speed (dry_run)",
        unit="GiB",
        exclusive_minimum=0,
    )
    host_memory_gib: float | None = setting(
        None,
        "memory of each machine, which its ranks share: the verdict covers it (dry_run)",
        unit="GiB",
        exclusive_minimum=0,
        default_text="this machine's, if the plan is for it; else the verdict is on the cards alone",
    )
    network_gbps: float | None = setting(
        None, "speed of the network between machines, for plans", unit="Gbit/s", exclusive_minimum=0
    )
    network_speeds: str | None = setting(
        None,
        "file that tools.doctor --json wrote: plans use the speeds between ranks that it measured, not the known ones "
        "of links and network",
        is_path=True,
    )
    price_per_hour: float | None = setting(
        None, "price of each machine, in any currency: plans say what a run costs", unit="per hour", minimum=0
    )
    dry_run_json: str | None = setting(
        None, "also write the plan into this file, as one JSON object (dry_run)", is_path=True
    )
    load_only: bool = setting(
        False, "load the model as the run would, print each rank's memory next to the plan, and end"
    )
