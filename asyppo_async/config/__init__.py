"""Settings of a run and of a fleet server: pydantic models, presets, loading. Torch-free."""
