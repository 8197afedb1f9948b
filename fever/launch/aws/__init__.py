"""Clusters of EC2 instances, launched by Ray's cluster launcher."""
