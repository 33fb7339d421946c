"""Executors: what runs a step. One module per target; `open_executor` picks it by the manifest's target."""
