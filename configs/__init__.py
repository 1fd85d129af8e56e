"""What a run can be told: one flat dataclass per concern, read from flags and YAML by `configs.flags`."""
