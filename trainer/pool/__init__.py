"""A trajectory pool on disk: written by runs and by `pool collect`, read by value pretraining."""
