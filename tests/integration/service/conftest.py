"""The servers of these tests are those of the unit tests: real servers over real sockets, with scripted engines."""

from tests.unit.fleet.conftest import draw, model_folder, sender, serving, until

__all__ = ["draw", "model_folder", "sender", "serving", "until"]
