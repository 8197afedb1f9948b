"""Go against a GTP engine as a Gymnasium environment."""

from fever_go.env import Go9x9

__all__ = ["Go9x9"]
