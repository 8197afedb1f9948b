"""Samplers: environments and a policy make fragments, in this process or as Ray actors."""
