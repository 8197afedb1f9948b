"""Files and options of RLlib's removed command `rllib train`, as configurations of fever.

`translate.py` translates one experiment of a YAML file and `files.py` reads such a file; `options.py` translates
options of the command line. Both use `reader.py`, which gives settings their current names by the tables in
`old_names.py`. None of them needs RLlib to be installed.
"""
