"""How the ranks of one job find each other and start one Ray together."""
