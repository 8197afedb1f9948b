"""Replay: explorers fill a buffer of transitions, a learner draws from it."""
