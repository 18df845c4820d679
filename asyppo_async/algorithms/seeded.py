"""Decisions that are random but the same on every machine: hashes of a seed and labels. Torch-free."""

import hashlib


def seeded_integer(seed: int, *labels: int | str) -> int:
    """A 64-bit integer from the seed and labels."""
    text = "|".join(str(label) for label in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def seeded_uniform(seed: int, *labels: int | str) -> float:
    """A number in [0, 1) from the seed and labels, with 53 random bits."""
    return (seeded_integer(seed, *labels) >> 11) / float(1 << 53)
