"""Machines of the user's own, on which a Ray stays up between jobs."""
