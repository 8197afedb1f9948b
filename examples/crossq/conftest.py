"""This file's place makes `fever_crossq` importable without installing it."""
