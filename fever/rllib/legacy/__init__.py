"""Files and options of the removed `rllib train` command."""
