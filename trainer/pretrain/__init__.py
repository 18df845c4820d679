"""Value pretraining: critics learn from a pool, or from a frozen policy, before a run."""
